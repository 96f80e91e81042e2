"""Where metrics go: a JSONL file, wandb, the terminal. The x-axis of every training metric is the training step."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlhf.config.sections import WandbConfig

if TYPE_CHECKING:
    import wandb

STEP = "step"
WANDB_ANSWER_S = 10.0  # for the server to answer at all; wandb itself would wait 90 s
WANDB_START_S = 20.0  # for a server that answers to accept the run


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None: ...


class JsonlSink:
    """`metrics.jsonl`: one object per line. Resuming at a step removes the lines of later steps."""

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        if resume_step is not None:
            keep_lines_up_to(path, resume_step)
        self._file = path.open("a")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({STEP: step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def keep_lines_up_to(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that a kill cut short; by rename, so that a crash loses none."""
    if not path.exists():
        return
    shorter = path.with_suffix(".new")
    with path.open() as lines, shorter.open("w") as kept:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row[STEP] <= step:
                kept.write(line if line.endswith("\n") else line + "\n")
        kept.flush()
        os.fsync(kept.fileno())
    shorter.replace(path)


class WandbSink:
    """A wandb run with the training step as the x-axis of every metric.

    If the server does not answer or does not accept the run, the run is offline, with a warning.
    """

    def __init__(
        self,
        config: WandbConfig,
        run_dir: Path,
        resolved: dict[str, Any],
        *,
        run_id: str | None,
        warn: Callable[[str], None],
    ) -> None:
        import wandb

        def start(mode: Literal["online", "offline"]) -> wandb.Run:
            return wandb.init(
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
                settings=wandb.Settings(silent=True, init_timeout=WANDB_START_S),
            )

        online = config.mode == "online" or (config.mode == "auto" and has_wandb_key())
        self._run = _start_online(start, run_dir, warn) if online else start("offline")
        self.run_id: str = self._run.id
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({STEP: step, **values})

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title, text, level="WARN")

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _start_online(start: Callable[..., wandb.Run], run_dir: Path, warn: Callable[[str], None]) -> wandb.Run:
    """Start an online run; if the server does not answer or accept it, an offline one, with a warning."""
    import wandb

    settings = wandb.setup().settings
    # The server is asked first, because a run that fails to start keeps trying in the background, even when the program
    # ends. A proxy in wandb's own settings can be used by wandb alone.
    problem = "" if settings.http_proxy or settings.https_proxy else no_answer(settings.base_url)
    if not problem:
        try:
            return start("online")
        except wandb.errors.CommError as error:
            problem = str(error).strip().splitlines()[0]
    warn(
        f"logging.wandb: {settings.base_url} does not take the run ({problem}). Metrics are kept in "
        f"{run_dir / 'wandb'}; `wandb sync` uploads them later."
    )
    return start("offline")


def no_answer(url: str) -> str:
    """Why the server does not answer within WANDB_ANSWER_S, name look-up included; "" if it answers anything."""
    reasons = [f"no answer within {WANDB_ANSWER_S:.0f} s"]

    def ask() -> None:
        reason = ""
        try:
            urllib.request.urlopen(url, timeout=WANDB_ANSWER_S).close()
        except urllib.error.HTTPError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # wandb may know certificates that Python does not
                reason = str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
        reasons.append(reason)

    asking = threading.Thread(target=ask, daemon=True)  # a name look-up has no time limit of its own
    asking.start()
    asking.join(WANDB_ANSWER_S)
    return reasons[-1]


def has_wandb_key() -> bool:
    """Whether wandb could log in without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators("api.wandb.ai") is not None
    except (FileNotFoundError, NetrcParseError):
        return False


class TerminalSink:
    """One line per training step with the main metrics and the estimated remaining time."""

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
        """Estimate the remaining time from here on."""
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

    def warn(self, message: str) -> None:
        self._console.print(f"[yellow]warning:[/yellow] {escape(message)}", highlight=False)


def summary_table(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Table:
    """Evaluation before and after training, printed at the end of a run."""
    table = Table(title=f"evaluation, {seconds:.0f} s of training")
    for column in ("metric", "before", "after"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in after:
        table.add_row(name, f"{before[name]:.3f}" if name in before else "-", f"{after[name]:.3f}")
    return table
