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
WANDB_ANSWER_S = 10.0  # a server that has not answered by then is taken for unreachable; wandb alone waits 90 s
WANDB_START_S = 20.0  # and one that answers, but does not take the run


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self, *, failed: bool = False) -> None: ...


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
    """A wandb run whose training metrics are drawn over the training step, from the first day.

    Offline, with a warning, where the server is not reached or does not take the run.
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

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=1 if failed else 0)


def _start_online(start: Callable[..., wandb.Run], run_dir: Path, warn: Callable[[str], None]) -> wandb.Run:
    """The run on its server; offline, with a warning, where that is not reached or does not take the run."""
    import wandb

    settings = wandb.setup().settings
    # Asked first, since a run that failed to begin goes on trying in the background, also when the program ends. Only
    # wandb itself can use a proxy of its own settings.
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
    """Why nothing at all answers there within WANDB_ANSWER_S, looking up its name included; "" if something does."""
    found = [f"no answer within {WANDB_ANSWER_S:.0f} s"]

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=WANDB_ANSWER_S).close()
        except urllib.error.HTTPError:
            found.append("")
        except urllib.error.URLError as error:  # certificates that only wandb knows are for wandb to judge
            found.append("" if isinstance(error.reason, ssl.SSLError) else str(error.reason))
        except (OSError, http.client.HTTPException) as error:
            found.append(str(error) or type(error).__name__)
        else:
            found.append("")

    asking = threading.Thread(target=ask, daemon=True)  # a look-up of a name has no time limit of its own
    asking.start()
    asking.join(WANDB_ANSWER_S)
    return found[-1]


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
