"""The outputs of a run: metrics.jsonl, wandb and other trackers, and the terminal, opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rlhf.cluster.node_report import report
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.secrets import hide_in_output
from rlhf.log import sinks
from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import NO_DETAILS, Details
from rlhf.log.terminal import Terminal
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState, code_state

if TYPE_CHECKING:
    from rlhf.log.wandb_sink import WandbSink


class RunLog:
    """All sinks of a run.

    Raises:
        ValueError: the config asks for one whose package is not installed.

    Attributes:
        files: writes metrics.jsonl and the rollouts.
        wandb_run_id, mlflow_run_id: ids of the run there, which a resumed run continues; None without one.
    """

    def __init__(self, config: TrainingProgramConfig, state: RunState) -> None:
        self.console = Console()
        self.terminal = Terminal(
            self.console,
            total_steps=config.steps,
            first_step=state.step,
            warmup_steps=config.training.idle_steps,
            title=config.run.dir,
        )
        self.warn, self.print = self.terminal.warn, self.terminal.print
        self.files = PatientFiles(self.warn)
        self.wandb_run_id, self.mlflow_run_id = state.wandb_run_id, state.mlflow_run_id
        _check_packages(config)
        self._config, self._first_step = config, state.step
        self._sinks: list[sinks.Sink] = []
        self._wandb: WandbSink | None = None

    def open(self, folder: RunFolder, exit_stack: contextlib.AsyncExitStack) -> None:
        """Open every sink; `exit_stack` closes them, and tells them whether the run failed."""
        resume_step = self._first_step if folder.restored is not None else None
        self._sinks.append(sinks.JsonlSink(folder.metrics, self.files, resume_step=resume_step))
        exit_stack.push(self._write_what_waits)
        logging, resolved = self._config.logging, self._config.stored()
        if logging.wandb.mode != "disabled":
            from rlhf.log.wandb_sink import WandbSink  # imports wandb

            run_id = self.wandb_run_id
            resume = None if run_id is None or resume_step is None else (run_id, resume_step)
            self._wandb = WandbSink(logging.wandb, folder.path, resolved, about(), resume=resume, warn=self.warn)
            self._add(self._wandb, exit_stack)
            self.wandb_run_id = self._wandb.run_id
            exit_stack.enter_context(hide_in_output())  # wandb now stores what is printed
        if logging.tensorboard:
            tensorboard = sinks.TensorBoardSink(folder.path / "tensorboard", resume_step=resume_step)
            self._add(sinks.BackgroundSink(tensorboard, "logging.tensorboard", self.warn), exit_stack)
        if logging.mlflow.uri is not None:
            name, run_id = folder.path.name, self.mlflow_run_id
            mlflow = sinks.MlflowSink(logging.mlflow.uri, logging.mlflow.experiment, name, resolved, run_id=run_id)
            self.mlflow_run_id = mlflow.run_id
            self._add(sinks.BackgroundSink(mlflow, "logging.mlflow", self.warn), exit_stack)
        if logging.trackio.project is not None:
            trackio = sinks.TrackioSink(logging.trackio, folder.id, resolved)
            self._add(sinks.BackgroundSink(trackio, "logging.trackio", self.warn), exit_stack)
        self._sinks.append(self.terminal)

    def _add(self, sink: sinks.ClosingSink, exit_stack: contextlib.AsyncExitStack) -> None:
        exit_stack.push(lambda kind, *_: sink.close(failed=kind is not None))
        self._sinks.append(sink)

    def _write_what_waits(self, *failure: Any) -> None:
        try:
            self.files.check()
        except OSError as error:
            self.warn(f"the end of the log is lost: {error}")

    def write(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        for sink in self._sinks:
            sink.log(step, values, details)

    def alert(self, title: str, text: str) -> None:
        """Say what looks wrong, in the terminal and on wandb."""
        self.warn(f"{title}: {text}")
        if self._wandb is not None:
            self._wandb.alert(title, text)


def _check_packages(config: TrainingProgramConfig) -> None:
    """Raise a ValueError if a package of a sink that the config asks for is not installed."""
    uri = config.logging.mlflow.uri
    wanted = [("tensorboard", "tensorboard")] if config.logging.tensorboard else []
    wanted += [] if uri is None else [("mlflow", "mlflow")]
    wanted += [] if config.logging.trackio.project is None else [("trackio", "trackio")]
    wanted += [("mlflow", name) for name in ("sqlalchemy", "alembic") if uri and sinks.MLFLOW_DATABASE.match(uri)]
    for key, package in wanted:
        if find_spec(package) is None:
            raise ValueError(
                f"logging.{key}: the package {package} is not installed. pip install -e '.[{key}]', or leave this "
                "key at its default."
            )


def about() -> dict[str, Any]:
    """Versions of Python and the packages, and the commit of the source if it is a git checkout."""
    return {"versions": {name: text for name, text in report().items() if name != "node"}, "code": code_state()}
