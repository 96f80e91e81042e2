"""wandb: axes, summaries, histograms, a table of responses, alerts, and a resumed run that is one curve.

Every row is logged under its training step, so what the evaluation adds to a step joins its row, and the server can
rewind a run to the step of a checkpoint. An offline run that is resumed writes a second file under the same id.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from rlhf.config.base import first_line
from rlhf.config.secrets import hide
from rlhf.config.sections import WandbConfig
from rlhf.log.reachable import ANSWER_S, connection_problem
from rlhf.log.sinks import NO_DETAILS, STEP, Details, with_details

WANDB_START_S = 20.0  # for a server that answers to accept the run
WANDB_RETRIES = 3  # of requests such as an alert, which delays the end of the run; rows are sent until they arrive
WANDB_FINISH_S = 60.0  # to upload the rest at the end of a run; wandb itself would try for days


class WandbSink:
    """A wandb run with the training step as the x-axis of every metric.

    If the server does not answer or does not accept the run, the run is offline, with a warning.

    Args:
        resolved: the config of the run. about: versions and the state of the source, which are added to the config.
        resume: id of the run, and the step of the checkpoint to continue from; None for a new run.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        resolved: Mapping[str, Any],
        about: Mapping[str, Any],
        *,
        resume: tuple[str, int] | None,
        warn: Callable[[str], None],
    ) -> None:
        sys.argv[1:] = map(hide, sys.argv[1:])  # wandb stores them
        common: dict[str, Any] = {
            "dir": run_dir, "project": config.project, "entity": config.entity, "group": config.group,
            "name": config.name or run_dir.name, "tags": list(config.tags) or None,
            "config": {**resolved, "about": dict(about)},
        }  # fmt: skip
        run_id = config.run_id if resume is None else resume[0]
        same_run = common | {"id": run_id, "resume": "allow" if run_id else None}
        # the server removes the rows after the checkpoint, if it can
        rewound = [] if resume is None else [common | {"resume_from": f"{resume[0]}?_step={resume[1]}"}]
        online = config.mode == "online" or (config.mode == "auto" and has_wandb_key())
        run = _start_online([*rewound, same_run], run_dir, warn) if online else None
        if run is None:  # else wandb's telemetry asks the server when the program ends, and waits for an answer
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = run or wandb.init(mode="offline", settings=_settings(), **same_run)
        self.run_id: str = self._run.id
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("eval/*", step_metric=STEP, summary="max,last")  # the summary keeps the best too

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self._run.log({STEP: step, **with_details(wandb, values, details)}, step=step)

    def alert(self, title: str, text: str) -> None:
        self._run.alert(hide(title), hide(text), level="WARN")

    def close(self, *, failed: bool = False) -> None:
        try:
            self._run.finish(exit_code=1 if failed else 0)
        except Exception:
            with contextlib.suppress(Exception):  # otherwise wandb fails, with a traceback, when the program exits
                wandb.teardown()
            raise


def _settings() -> wandb.Settings:
    """New settings for each attempt, because `wandb.init` writes its arguments into them."""
    return wandb.Settings(
        disable_git=True,  # in a repository, wandb would store the remote's address and every uncommitted change
        silent=True, init_timeout=WANDB_START_S, finish_timeout=WANDB_FINISH_S, finish_timeout_raises=True,
        x_graphql_timeout_seconds=ANSWER_S, x_graphql_retry_max=WANDB_RETRIES,
    )  # fmt: skip


def _start_online(
    attempts: Sequence[Mapping[str, Any]], run_dir: Path, warn: Callable[[str], None]
) -> wandb.Run | None:
    """An online run, from the first of `attempts` that the server accepts; None, with a warning, if it accepts none."""
    # The server is asked first, because a run that fails to start keeps trying in the background, even after the
    # program has ended.
    url, problem = server_problem()
    for arguments in () if problem else attempts:
        try:
            return wandb.init(mode="online", settings=_settings(), **arguments)
        except wandb.errors.UsageError:
            raise
        except wandb.errors.Error as error:
            problem = first_line(error)
            wandb.teardown()  # else the failed start continues in the background, and holds the id of the run
    warn(
        f"logging.wandb: {url} does not take the run ({problem}). Metrics are kept in "
        f"{run_dir / 'wandb'}; `wandb sync` uploads them later."
    )
    return None


def server_problem() -> tuple[str, str]:
    """The server's address in wandb's settings, and why it does not answer.

    The reason is empty if the server answers, or if only wandb can ask it.
    """
    settings = wandb.setup().settings
    through_proxy = settings.http_proxy or settings.https_proxy  # in wandb's own settings, which only wandb can use
    return settings.base_url, "" if through_proxy else connection_problem(settings.base_url)


def has_wandb_key() -> bool:
    """Whether wandb could log in to the server of its settings without a prompt."""
    wandb.setup(settings=wandb.Settings(silent=True))
    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.errors.AuthenticationError:  # a key of another form, which the start of the run reports
        return True
