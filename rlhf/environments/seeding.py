"""The random state of a rollout: `random`, and `numpy.random` if numpy is installed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import random
import sys
import types
from collections.abc import Awaitable, Coroutine, Generator
from contextvars import ContextVar
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


def seed_all(seed: int) -> None:
    """Seed each generator anew, in the state that is in place."""
    for _, _, set_seed in _generators().values():
        set_seed(seed)


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


of_tasks: ContextVar[RandomState | None] = ContextVar("of_tasks", default=None)  # of tasks that start in this context


def start_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
    """A task factory: a rollout's state is in place in all tasks that its code starts."""
    if (state := of_tasks.get()) is not None:
        coroutine = _in_state(coroutine, state)
    return asyncio.Task(coroutine, loop=loop, **options)


async def _in_state(coroutine: Coroutine[Any, Any, Any], state: RandomState) -> Any:
    return await run_with_state(coroutine, state)
