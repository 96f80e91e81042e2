"""Continues a run after one of its processes has died: from the newest checkpoint, with new engines and learners."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rlhf.cluster.actors import LostError
from rlhf.config.program import TrainingProgramConfig
from rlhf.run import supervisor
from rlhf.run.run import Run

C = TypeVar("C", bound=TrainingProgramConfig)


class Restarts(Generic[C]):
    """Trains, and restarts after a LostError, at most `run.max_restarts` times in a row without a new checkpoint."""

    def __init__(self, config: C, *, resume: bool, start_at: str | None = None) -> None:
        if supervisor.takes_over():
            resume, start_at = True, None
        address = config.cluster.ray_address or os.environ.get("RAY_ADDRESS")
        supervisor.tell_command(supervisor.Training(config.run.dir, not address, config.run.max_restarts))
        self._run: Run[C] | None = Run(config, resume=resume or start_at is not None, start_at=start_at)
        self._stop = self._run.stop
        self._first = True

    def on_signal(self, name: str, cancel: Callable[[], object]) -> None:
        self._stop.on_signal(name, cancel)

    async def train(self, train: Callable[[Run[C]], Awaitable[None]]) -> None:
        """Call `train` with the run until it ends.

        Raises:
            LostError: the last failure, if no checkpoint was complete, the first start failed, a signal had asked the
                run to end, or too many restarts in a row brought no new checkpoint.
        """
        restarts, restarted_from = 0, -1
        while True:
            run, self._run = self._run, None
            assert run is not None
            try:
                return await train(run)
            except LostError as error:
                if run.folder.saved_step > restarted_from:
                    restarts = 0
                restarts, restarted_from = restarts + 1, run.folder.saved_step
                first_start_failed = self._first and not run.stop.can_save
                allowed = run.config.run.max_restarts
                if not run.folder.saved_step or first_start_failed or run.stop.requested or restarts > allowed:
                    raise
                message = " ".join([str(error), *getattr(error, "__notes__", ())])
                run.log.warn(
                    f"{message} Restart {restarts} of at most {allowed} (run.max_restarts) from the checkpoint of step "
                    f"{run.folder.saved_step}."
                )
            run.folder.unlock()
            run.stop.can_save = False  # a signal from now on ends the program at once: nothing is trained yet
            self._first = False
            config = run.config
            del run
            gc.collect()  # the prompts of the lost run, before those of the next are read
            self._run = await asyncio.to_thread(Run, config, resume=True)
            self._stop = self._run.stop
