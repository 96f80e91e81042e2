"""An async context in an event loop of its own, in a thread of its own; other threads and event loops make calls in it.

What the context has started goes on between two calls, and the thread that calls may have an event loop already.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

from rlhf.run.threads import call_in_thread

R = TypeVar("R")
T = TypeVar("T")


class InterruptedLoopError(Exception):
    """Thrown into the context if the program was interrupted: asyncio stops at a KeyboardInterrupt."""


class LoopThread(Generic[T]):
    """Enters the context at once.

    Attributes:
        started: what the context gave.
        ended: done when the context is left and the thread has ended; it has the error that ended it.
        closed: True as soon as the context is being left.
    """

    def __init__(self, context: contextlib.AbstractAsyncContextManager[T]) -> None:
        self.closed = self._entered = False
        self.started: Future[T] = Future()
        self._calls: set[Future[Any]] = {self.started}
        begun = threading.Event()
        self.ended = call_in_thread(lambda: asyncio.run(self._live(context, begun)))
        self.ended.add_done_callback(self._cancel_calls)
        begun.wait()

    async def _live(self, context: contextlib.AbstractAsyncContextManager[T], begun: threading.Event) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._end: asyncio.Future[BaseException | None] = self._loop.create_future()
        begun.set()
        try:
            async with context as value:
                try:
                    self._entered = True
                    if self.started.set_running_or_notify_cancel():
                        self.started.set_result(value)
                    error = await self._end
                    if error is not None:
                        raise error if isinstance(error, Exception) else InterruptedLoopError
                finally:
                    self.closed = True
        finally:
            self.closed = True

    def _cancel_calls(self, _: object) -> None:
        for call in [*self._calls]:  # nobody answers them any more
            call.cancel()

    # --- calls ---

    def submit(self, call: Coroutine[Any, Any, R]) -> Future[R]:
        """Start a call in the event loop of this thread."""
        if self.closed:
            call.close()
            raise self._reason()
        future = asyncio.run_coroutine_threadsafe(self._guarded(call), self._loop)
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        if self.ended.done():
            future.cancel()
        return future

    async def _guarded(self, call: Coroutine[Any, Any, R]) -> R:
        try:
            return await call
        except Exception:
            if self.closed:  # what ends the context is the reason; its end cancels this call
                await asyncio.Event().wait()
            raise

    def wait(self, future: Future[R]) -> R:
        """The result of a call. Ctrl-C cancels it."""
        try:
            return future.result()
        except CancelledError:
            if not self.closed:
                raise
            raise self._reason() from None
        except BaseException:
            future.cancel()
            raise

    async def wait_async(self, future: Future[R]) -> R:
        """The result of a call, in another event loop. If the task that waits is cancelled, so is the call."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.closed or (task is not None and task.cancelling()):
                raise
            raise self._reason() from None

    def _reason(self) -> BaseException:
        """Why no call is answered any more."""
        failure = self.ended.exception()
        if isinstance(failure, Exception) and not isinstance(failure, InterruptedLoopError):
            return failure
        return ValueError("the trainer is closed. Make another one; with resume=True it goes on from the checkpoint.")

    # --- end ---

    def end(self, error: BaseException | None) -> None:
        """Leave the context, with `error` if it is not None; before it was entered, cancel that."""

        def leave() -> None:
            if not self._entered:
                self.cancel()
            elif not self._end.done():
                self._end.set_result(error)

        self._call_soon(leave)

    def cancel(self) -> None:
        """Cancel whatever the context does, also its end."""
        assert self._task is not None
        self._call_soon(self._task.cancel)

    def _call_soon(self, call: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(call)
