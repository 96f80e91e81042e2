"""The random state of a rollout: `random`, and `numpy.random` if numpy is installed."""

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
    """A seed of 32 bits, as numpy needs, that depends only on the parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big")


def import_numpy() -> None:
    """Import numpy if it is installed, so that a class that imports it later, during a call, is seeded too."""
    with contextlib.suppress(Exception):  # a broken numpy does not matter to a class that does not use it
        if importlib.util.find_spec("numpy"):
            importlib.import_module("numpy.random")


class RandomState:
    """A `with` block of one rollout has its own state of the global generators, which it leaves as they were before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: dict[str, Any] = {}  # state by generator
        self._outside: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._outside = {}
        for name, (get_state, set_state, set_seed) in _generators().items():
            self._outside[name] = get_state()
            set_state(self._inside[name]) if name in self._inside else set_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        for name, (get_state, set_state, _) in _generators().items():
            self._inside[name] = get_state()
            if name in self._outside:  # numpy may have been imported inside
                set_state(self._outside[name])


def _generators() -> dict[str, tuple[Any, Any, Any]]:
    """The functions that read, set and seed each generator; numpy's only if it is imported."""
    generators = {"random": (random.getstate, random.setstate, random.seed)}
    if numpy := sys.modules.get("numpy.random"):
        generators["numpy"] = numpy.get_state, numpy.set_state, numpy.seed
    return generators


@types.coroutine
def run_with_state(
    awaitable: Awaitable[Any], state: contextlib.AbstractContextManager[Any]
) -> Generator[Any, Any, Any]:
    """Await something. The state is in place while its code runs, but not while it waits."""
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
