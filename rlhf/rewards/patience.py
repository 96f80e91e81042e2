"""Retries and a rate limit for reward functions that call a service."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class RateLimit:
    """At most `per_second` calls per second, spread evenly, in one worker: workers do not know of each other."""

    def __init__(self, per_second: float) -> None:
        self._interval_s, self._next = 1 / per_second, 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        self._next = max(self._next + self._interval_s, now)
        await asyncio.sleep(self._next - now)


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    retries: int = 5,
    first_wait_s: float = 0.5,
    limit: RateLimit | None = None,
    retry_on: tuple[type[Exception], ...] = (Exception,),
) -> T:
    """The result of `await call()`, retried after an exception; the wait doubles, plus a random part of up to half.

    After an exception that has a `wait_s` it waits so long at least.

    Args:
        retries: further tries after the first one; the last exception is raised.
        limit: the rate limit to wait for before every try.
    """
    for attempt in range(retries + 1):
        if limit is not None:
            await limit.wait()
        try:
            return await call()
        except retry_on as error:
            if attempt == retries:
                raise
            least_s = getattr(error, "wait_s", 0.0)
        await asyncio.sleep(max(least_s, first_wait_s * 2**attempt * random.uniform(1, 1.5)))
    raise AssertionError("unreachable")
