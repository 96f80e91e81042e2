"""The outputs of a run: metrics.jsonl, wandb and the terminal, opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from rlhf.config.grpo import GRPOConfig
from rlhf.log.sinks import JsonlSink, Sink, TerminalSink, WandbSink
from rlhf.run.folder import RunFolder


class RunLog:
    """All sinks of a run.

    Attributes:
        wandb_run_id: of the run on wandb, which a resumed run continues; None without wandb.
    """

    def __init__(self, config: GRPOConfig, *, first_step: int, wandb_run_id: str | None) -> None:
        self.console = Console(soft_wrap=True)
        self.terminal = TerminalSink(self.console, total_steps=config.run.steps, first_step=first_step)
        self.warn = self.terminal.warn
        self.wandb_run_id = wandb_run_id
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
        settings = self._config.logging.wandb
        if settings.mode != "disabled":
            resolved = self._config.model_dump(mode="json")
            wandb = WandbSink(settings, folder.path, resolved, run_id=self.wandb_run_id, warn=self.warn)
            exit_stack.push(lambda kind, *_: wandb.close(failed=kind is not None))
            self._wandb = wandb
            self.wandb_run_id = wandb.run_id
            self._sinks.append(wandb)
        self._sinks.append(self.terminal)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.log(step, values)

    def alert(self, title: str, text: str, *, in_terminal: bool) -> None:
        """Say what looks wrong, in the terminal and on wandb."""
        if in_terminal:
            self.warn(f"{title}: {text}")
        if self._wandb is not None:
            self._wandb.alert(title, text)

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)
