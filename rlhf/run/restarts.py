"""Continues a run after one of its processes has died: from the newest checkpoint, with new engines and learners."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlhf.cluster.actors import LostError
from rlhf.config import cli
from rlhf.config.printing import waiting
from rlhf.config.program import TrainingProgramConfig
from rlhf.run import supervisor
from rlhf.run.run import Run

C = TypeVar("C", bound=TrainingProgramConfig)


def train_with_restarts(
    config: C, flags: argparse.Namespace, train: Callable[[Run[C]], Coroutine[Any, Any, None]]
) -> None:
    """Train, and restart after a LostError: at most `run.max_restarts` times in a row without a new checkpoint.

    Of the program's flags, `resume` and `resume_from` are read. The last LostError is raised if no checkpoint was
    complete, the first start failed, a signal had asked the run to end, or too many restarts in a row brought no new
    checkpoint.
    """
    resume, start_at, restarted = flags.resume or flags.resume_from is not None, flags.resume_from, False
    if supervisor.follows_lost_driver():
        resume, start_at, restarted = True, None, True
    address = config.cluster.ray_address or os.environ.get("RAY_ADDRESS")
    supervisor.tell_command(supervisor.Training(config.run.dir, not address, config.run.max_restarts))
    restarts, has_started = supervisor.Restarts(), False
    while True:
        with waiting("starting: reading the run folder, its checkpoint and the tokenizer"):
            run = Run(config, resume=resume, start_at=start_at, restarted=restarted)
        try:
            return cli.run_async(train(run), on_signal=run.stop.on_signal)
        except LostError as error:
            has_started |= run.stop.can_save
            restart = restarts.restart_after(run.folder.saved_step, allowed=config.run.max_restarts)
            if not restart or not has_started or run.stop.requested:
                raise
            run.log.warn(" ".join([str(error), *getattr(error, "__notes__", ()), restart]))
        finally:
            run.folder.unlock()
        del run
        gc.collect()  # the prompts of the lost run, before those of the next are read
        resume, start_at, restarted = True, None, True
