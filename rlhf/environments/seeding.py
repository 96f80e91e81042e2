"""The random state of a rollout: `random`, and `numpy.random` where numpy is installed, seeded and swapped with it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import random
import sys
import types
from collections.abc import Awaitable, Generator
from typing import Any


def derive(*parts: int | str) -> int:
    """A seed of 32 bits, which is what numpy takes, that depends on every part and on nothing else."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def import_numpy() -> None:
    """Import numpy where it is installed: a class that imports it in the middle of a call is then seeded as well."""
    with contextlib.suppress(Exception):  # a broken numpy is no concern of a class that does not use it
        if importlib.util.find_spec("numpy"):
            importlib.import_module("numpy.random")


class RandomState:
    """The global generators while a `with` block of one rollout runs; outside they are as if it had not run."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, Any] | None = None
        self._outside: tuple[Any, Any] = (None, None)

    def __enter__(self) -> None:
        numpy_random = sys.modules.get("numpy.random")
        self._outside = (random.getstate(), numpy_random and numpy_random.get_state())
        inside, numpy_inside = self._inside or (None, None)
        if inside is None:
            random.seed(self._seed)
        else:
            random.setstate(inside)
        if numpy_random and numpy_inside is None:
            numpy_random.seed(self._seed)
        elif numpy_random:
            numpy_random.set_state(numpy_inside)

    def __exit__(self, *_: object) -> None:
        numpy_random = sys.modules.get("numpy.random")
        self._inside = (random.getstate(), numpy_random and numpy_random.get_state())
        outside, numpy_outside = self._outside
        random.setstate(outside)
        if numpy_random and numpy_outside is not None:
            numpy_random.set_state(numpy_outside)


@types.coroutine
def swapped(awaitable: Awaitable[Any], state: contextlib.AbstractContextManager[Any]) -> Generator[Any, Any, Any]:
    """Await something; the state is in place while its code runs, and not while it waits."""
    iterator: Any = awaitable.__await__()
    resume, value = next, iterator
    while True:
        try:
            with state:
                waits_for = resume(value)
        except StopIteration as end:
            return end.value
        try:
            yield waits_for
            resume, value = next, iterator
        except BaseException as error:  # a cancellation
            if not hasattr(iterator, "throw"):
                raise
            resume, value = iterator.throw, error
