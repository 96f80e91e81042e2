"""Where metrics go: a JSONL file, wandb, the terminal. The x-axis of every training metric is the training step."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf.config.sections import WandbConfig
from rlhf.types import Histogram, StepMetrics

STEP = "step"


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


def to_values(metrics: StepMetrics) -> dict[str, Any]:
    """Reduce to plain numbers. A histogram becomes its mean and four quantiles.

    What is not finite (a mean over nothing, the norm of a skipped gradient) is left out: JSON has no word for it.
    """
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Histogram):
            values |= {f"{name}/{key}": value for key, value in _describe(metric.values).items()}
        elif math.isfinite(value := metric.value()):
            values[name] = value
    return values


def _describe(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    low, median, high, top = np.quantile(values, [0.0, 0.5, 0.95, 1.0])
    return {"mean": float(np.mean(values)), "min": low, "p50": median, "p95": high, "max": top}


class JsonlSink:
    """`metrics.jsonl`: one object a line. Resuming at a step cuts off what a killed run had logged beyond it."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        if resume_step is not None:
            keep_lines_up_to(path, resume_step)
        self._file = path.open("a")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({STEP: step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


def keep_lines_up_to(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row[STEP] <= step:
            kept.append(line)
    path.write_text("".join(line + "\n" for line in kept))


class WandbSink:
    """A wandb run whose training metrics are drawn over the training step, from the first day."""

    def __init__(self, config: WandbConfig, run_dir: Path, resolved: dict[str, Any], *, run_id: str | None) -> None:
        import wandb

        mode = config.mode
        if mode == "auto":
            mode = "online" if has_wandb_key() else "offline"
        self._run = wandb.init(
            mode=mode,
            dir=run_dir,
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=config.name or run_dir.name,
            tags=list(config.tags) or None,
            id=run_id or config.run_id,
            resume="allow" if run_id or config.run_id else None,
            config=resolved,
            settings=wandb.Settings(silent=True),
        )
        self.run_id: str = self._run.id
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({STEP: step, **values})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def has_wandb_key() -> bool:
    """Whether wandb could log in without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, NetrcParseError):
        return False


class TerminalSink:
    """One line a training step: what a person watches, and when it will be done."""

    COLUMNS = (
        ("reward", "reward/mean", "{:.3f}"),
        ("kl", "policy/kl_k3", "{:.4f}"),
        ("length", "rollout/response_length/mean", "{:.1f}"),
        ("entropy", "policy/entropy", "{:.3f}"),
        ("grad", "learner/grad_norm", "{:.2f}"),
        ("tokens/s", "rollout/tokens_per_second", "{:.0f}"),
        ("s", "time/step", "{:.2f}"),
    )

    def __init__(self, console: Console, *, total_steps: int, first_step: int = 0) -> None:
        self._console = console
        self._total = total_steps
        self._first = first_step
        self.start()

    def start(self) -> None:
        """From here on the remaining time is reckoned."""
        self._started = time.monotonic()

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if "time/step" not in values:
            return
        shown = [f"{name} {form.format(values[key])}" for name, key, form in self.COLUMNS if key in values]
        per_step = (time.monotonic() - self._started) / max(1, step - self._first)
        eta = time.strftime("%H:%M:%S", time.gmtime(per_step * (self._total - step)))
        width = len(str(self._total))
        self._console.print(f"step {step:>{width}}/{self._total}  {'  '.join(shown)}  eta {eta}", highlight=False)

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.3f}" for name, value in values.items())
        self._console.print(f"[bold]eval at step {step}[/bold]  {shown}", highlight=False)

    def warn(self, messages: Iterable[str]) -> None:
        for message in messages:
            self._console.print(f"[yellow]warning:[/yellow] {escape(message)}", highlight=False)

    def close(self, *, failed: bool = False) -> None:
        return


def summary_table(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Table:
    """Evaluation before and after, for the end of a run."""
    table = Table(title=f"evaluation, {seconds:.0f} s of training")
    for column in ("metric", "before", "after"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in after:
        table.add_row(name, f"{before[name]:.3f}" if name in before else "-", f"{after[name]:.3f}")
    return table
