"""The outputs of a run: metrics.jsonl, wandb, TensorBoard, MLflow and the terminal, opened and closed together."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from rich.console import Console

from rlhf.cluster.node_report import report
from rlhf.config.grpo import GRPOConfig
from rlhf.log.sinks import NO_DETAILS, Details, JsonlSink, MlflowSink, Sink, TensorBoardSink
from rlhf.log.terminal import Terminal
from rlhf.log.wandb_sink import WandbSink
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState


class RunLog:
    """All sinks of a run.

    Raises:
        ValueError: the config asks for one whose package is not installed.

    Attributes:
        wandb_run_id, mlflow_run_id: of the run there, which a resumed run continues; None without it.
    """

    def __init__(self, config: GRPOConfig, *, first_step: int, state: RunState) -> None:
        self.console = Console()
        self.terminal = Terminal(
            self.console,
            total_steps=config.run.steps,
            first_step=first_step,
            exports=config.run.export,
            warmup_steps=config.training.idle_steps,
            title=config.run.dir,
        )
        self.warn, self.print = self.terminal.warn, self.terminal.print
        self.wandb_run_id, self.mlflow_run_id = state.wandb_run_id, state.mlflow_run_id
        _check_packages(config)
        self._config = config
        self._first_step = first_step
        self._sinks: list[Sink] = []
        self._wandb: WandbSink | None = None

    def open(self, folder: RunFolder, exit_stack: contextlib.AsyncExitStack) -> None:
        """Open every sink; `exit_stack` closes them, and tells them whether the run failed."""
        resume_step = self._first_step if folder.restored is not None else None
        jsonl = JsonlSink(folder.metrics, resume_step=resume_step)
        exit_stack.callback(jsonl.close)
        self._sinks.append(jsonl)
        logging, resolved = self._config.logging, self._config.model_dump(mode="json")
        if logging.wandb.mode != "disabled":
            run_id = self.wandb_run_id
            resume = None if run_id is None or resume_step is None else (run_id, resume_step)
            wandb = WandbSink(logging.wandb, folder.path, resolved, about(), resume=resume, warn=self.warn)
            exit_stack.push(lambda kind, *_: wandb.close(failed=kind is not None))
            self.wandb_run_id = wandb.run_id
            self._sinks.append(wandb)
            self._wandb = wandb
        if logging.tensorboard:
            tensorboard = TensorBoardSink(folder.path / "tensorboard", resume_step=resume_step)
            exit_stack.callback(tensorboard.close)
            self._sinks.append(tensorboard)
        if logging.mlflow.uri is not None:
            name, run_id = folder.path.name, self.mlflow_run_id
            mlflow = MlflowSink(logging.mlflow.uri, logging.mlflow.experiment, name, resolved, run_id=run_id)
            exit_stack.push(lambda kind, *_: mlflow.close(failed=kind is not None))
            self.mlflow_run_id = mlflow.run_id
            self._sinks.append(mlflow)
        self._sinks.append(self.terminal)

    def write(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        for sink in self._sinks:
            sink.log(step, values, details)

    def alert(self, title: str, text: str, *, in_terminal: bool) -> None:
        """Say what looks wrong, in the terminal and on wandb."""
        if in_terminal:
            self.warn(f"{title}: {text}")
        if self._wandb is not None:
            self._wandb.alert(title, text)


def _check_packages(config: GRPOConfig) -> None:
    wanted = {"tensorboard": config.logging.tensorboard, "mlflow": config.logging.mlflow.uri is not None}
    for package, is_wanted in wanted.items():
        if is_wanted and find_spec(package) is None:
            raise ValueError(
                f"logging.{package}: the package {package} is not installed. pip install -e '.[{package}]', or leave "
                "this key at its default."
            )


def about() -> dict[str, Any]:
    """Versions of what computes, and the commit of the source where that is a git checkout."""
    source = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(source.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    told: dict[str, Any] = {"versions": {name: text for name, text in report().items() if name != "node"}}
    if which("git") and git("ls-files", source.name):  # not a package installed somewhere in another checkout
        changed = git("status", "--porcelain", "--untracked-files=no") != ""
        told["git"] = {"commit": git("rev-parse", "HEAD"), "changed": changed}
    return told
