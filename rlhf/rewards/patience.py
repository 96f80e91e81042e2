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
    """Return `await call()`; retry after an exception. The pause doubles, plus a random part of up to half.

    If the exception has an attribute `wait_s`, the pause is at least that long.

    Args:
        retries: further tries after the first one; then the last exception is raised.
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
