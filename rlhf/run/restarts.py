"""Continues a run after one of its processes has died: from the newest checkpoint, with new engines and learners."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlhf.cluster.actors import LostError
from rlhf.config import cli
from rlhf.config.program import TrainingProgramConfig
from rlhf.run import supervisor
from rlhf.run.run import Run
from rlhf.run.stop import Stop

C = TypeVar("C", bound=TrainingProgramConfig)


def train_with_restarts(config: C, flags: argparse.Namespace, train: Callable[[Run[C]], Awaitable[None]]) -> None:
    """Train; after a LostError again, at most `run.max_restarts` times in a row without a new checkpoint.

    Args:
        flags: those of the program; `resume` and `resume_from` are read.

    Raises:
        LostError: the last failure, if no checkpoint was complete, the first start failed, a signal had asked the run
            to end, or too many restarts in a row brought no new checkpoint.
    """
    resume, start_at = flags.resume, flags.resume_from
    if supervisor.takes_over():
        resume, start_at = True, None
    address = config.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    supervisor.tell_command(supervisor.Training(config.run.dir, not address, config.run.max_restarts))
    stop: Stop  # of the newest run

    async def train_to_the_end(run: Run[C]) -> None:
        nonlocal stop
        restarts, restarted_from, allowed = 0, -1, config.run.max_restarts
        while True:
            stop = run.stop
            try:
                return await train(run)
            except LostError as error:
                saved = run.folder.saved_step
                restarts = 1 if saved > restarted_from else restarts + 1
                first_start_failed = restarted_from < 0 and not stop.can_save
                if not saved or first_start_failed or stop.requested or restarts > allowed:
                    raise
                message = " ".join([str(error), *getattr(error, "__notes__", ())])
                restart = f"Restart {restarts} of at most {allowed} (run.max_restarts)"
                run.log.warn(f"{message} {restart} from the checkpoint of step {saved}.")
            restarted_from = saved
            run.folder.unlock()
            stop.can_save = False  # a signal from now on ends the program at once: nothing is trained yet
            del run
            gc.collect()  # the prompts of the lost run, before those of the next are read
            run = await asyncio.to_thread(Run, config, resume=True)

    training = train_to_the_end(Run(config, resume=resume or start_at is not None, start_at=start_at))
    cli.run_async(training, on_signal=lambda name, cancel: stop.on_signal(name, cancel))
