"""The outputs of a run: metrics.jsonl, wandb and other trackers, and the terminal, opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from rich.console import Console

from rlhf.cluster.node_report import report
from rlhf.config import cli
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.secrets import hide_in_output
from rlhf.log import sinks
from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import NO_DETAILS, Details
from rlhf.log.status import status_file
from rlhf.log.terminal import Terminal
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState, code_state


class RunLog:
    """All sinks of a run; ValueError if the config asks for one whose package is not installed."""

    def __init__(self, config: TrainingProgramConfig, state: RunState) -> None:
        self.console = Console()
        idle_steps = config.training.idle_steps
        self.terminal = Terminal(
            self.console, total_steps=config.steps, first_step=state.step, warmup_steps=idle_steps, title=config.run.dir
        )
        self.warn, self.print = self.terminal.warn, self.terminal.print
        self.files = PatientFiles(self.warn)  # writes metrics.jsonl and the rollouts
        self.wandb_run_id = state.wandb_run_id  # of the run on wandb, which a resumed run continues; None without one
        _check_packages(config)
        self._config, self._first_step = config, state.step
        self._sinks: list[sinks.Sink] = []
        self._alert: Callable[[str, str], None] = lambda title, text: None

    def open(self, folder: RunFolder, exit_stack: contextlib.AsyncExitStack) -> None:
        """Open every sink. `exit_stack` closes them, and tells them whether the run failed."""
        exit_stack.enter_context(status_file(folder.path, self.terminal.status))
        resume_step = self._first_step if folder.restored is not None else None
        self._sinks.append(sinks.JsonlSink(folder.metrics, self.files, resume_step=resume_step))
        exit_stack.push(self._write_what_waits)
        logging, resolved = self._config.logging, self._config.stored()
        if logging.wandb.mode != "disabled":
            from rlhf.log.wandb_sink import WandbSink  # imports wandb

            run_id = self.wandb_run_id
            resume = None if run_id is None or resume_step is None else (run_id, resume_step)
            wandb = WandbSink(logging.wandb, folder.path, resolved, environment_report(), resume=resume, warn=self.warn)
            tracker = self._add(wandb, "logging.wandb", exit_stack)
            self._alert = lambda title, text: tracker.attempt(lambda: wandb.alert(title, text))
            self.wandb_run_id = wandb.run_id
            exit_stack.enter_context(hide_in_output())  # wandb now stores the output
        if logging.tensorboard:
            tensorboard = sinks.TensorBoardSink(folder.path / "tensorboard", resume_step=resume_step)
            self._add(tensorboard, "logging.tensorboard", exit_stack)
        if logging.trackio.project is not None:
            self._add(sinks.TrackioSink(logging.trackio, folder.id, resolved), "logging.trackio", exit_stack)
        self._sinks.append(self.terminal)

    def _add(self, tracker: sinks.Tracker, key: str, exit_stack: contextlib.AsyncExitStack) -> sinks.OptionalTracker:
        optional = sinks.OptionalTracker(tracker, key, self.warn)

        def close(kind: type[BaseException] | None, *_: Any) -> None:
            optional.close(failed=kind is not None and not issubclass(kind, cli.StoppedError))

        exit_stack.push(close)
        self._sinks.append(optional)
        return optional

    def _write_what_waits(self, *failure: Any) -> None:
        try:
            self.files.check()
        except OSError as error:
            self.warn(f"the end of the log is lost: {error}")

    def write(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        for sink in self._sinks:
            sink.log(step, values, details)

    def alert(self, title: str, text: str) -> None:
        """Report a problem in the terminal and on wandb."""
        self.warn(f"{title}: {text}")
        self._alert(title, text)


def _check_packages(config: TrainingProgramConfig) -> None:
    used = {"tensorboard": config.logging.tensorboard, "trackio": config.logging.trackio.project is not None}
    for package, is_used in used.items():
        if is_used and find_spec(package) is None:
            raise ValueError(
                f"logging.{package}: the package {package} is not installed. pip install -e '.[{package}]', or leave "
                "this key at its default."
            )


def environment_report() -> dict[str, Any]:
    """Versions of Python and the packages, and the commit of the source if it is a git checkout."""
    return {"versions": {name: text for name, text in report().items() if name != "node"}, "code": code_state()}
