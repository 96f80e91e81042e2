"""Blocking calls next to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def call_in_thread(function: Callable[..., T], *arguments: Any) -> Future[T]:
    """Call a function in a daemon thread. Unlike a thread of `asyncio.to_thread` it does not keep the program alive."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled, so that its result can always be set

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a blocking function in a thread, so that deadlines and signals still count."""
    return await asyncio.wrap_future(call_in_thread(function, *arguments))
