"""After SIGTERM, SIGINT or SIGHUP a run goes on to the next step boundary, saves there, and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

R = TypeVar("R")


class Stop:
    """A request to end the run, made by its first signal; a second one is not handled here and ends the run at once.

    Before `can_save` is set, in start-up, the first signal ends the run. `grace_s` seconds after a signal the run is
    cancelled; a save that has begun may still finish.
    """

    def __init__(self, grace_s: float, say: Callable[[str], None]) -> None:
        self.can_save = False
        self._grace_s, self._say = grace_s, say
        self._requested = asyncio.Event()
        self._saving = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def requested(self) -> bool:
        return self._requested.is_set()

    def on_signal(self, name: str, cancel: Callable[[], object]) -> None:
        """Handle the first signal; `cancel` cancels the run."""
        if not self.can_save:
            cancel()
            return
        self._requested.set()
        self._say(
            f"{name}: the run goes on to the next step boundary, at most run.grace_s={self._grace_s:g} s, saves there "
            "if checkpoint.every is set, and ends. A second signal ends it at once."
        )

        def grace_is_over() -> None:
            if not self._saving:
                self._say(f"run.grace_s={self._grace_s:g}: no step boundary was reached, the run ends without saving")
                cancel()

        self._timer = asyncio.get_running_loop().call_later(self._grace_s, grace_is_over)

    def close(self) -> None:
        """End the grace time after the last step boundary. A further signal then ends the run at once."""
        self.can_save = False
        if self._timer is not None:
            self._timer.cancel()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context that the end of the grace time does not interrupt."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    async def unless_requested(self, awaitable: Awaitable[R]) -> R | None:
        """The result of the awaitable. If a signal comes first, the awaitable is cancelled and the result is None."""
        task, request = asyncio.ensure_future(awaitable), asyncio.ensure_future(self._requested.wait())
        try:
            await asyncio.wait({task, request}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            request.cancel()
