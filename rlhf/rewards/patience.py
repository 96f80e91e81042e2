"""Retries for reward functions that call a service."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def patiently(
    call: Callable[[], Awaitable[T]],
    *,
    retries: int = 5,
    first_wait_s: float = 0.5,
    retry_on: tuple[type[Exception], ...] = (Exception,),
) -> T:
    """The result of `await call()`, retried after an exception; the wait doubles, plus a random part of up to half.

    After an exception that has a `wait_s` it waits so long at least.

    Args:
        retries: further tries after the first one; the last exception is raised.
    """
    for attempt in range(retries + 1):
        try:
            return await call()
        except retry_on as error:
            if attempt == retries:
                raise
            least_s = getattr(error, "wait_s", 0.0)
        await asyncio.sleep(max(least_s, first_wait_s * 2**attempt * random.uniform(1, 1.5)))
    raise AssertionError("unreachable")
