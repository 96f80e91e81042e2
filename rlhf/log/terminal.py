"""The output of a run: stages of its start, one line per step, evaluations, warnings; on a terminal also a live view.

In a file, lines fit in 80 columns, or in $COLUMNS if it is set; paths are never broken. Until the first step is
finished, a line every 10 seconds says what the run waits for.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rlhf.config.printing import heartbeat, note_line, printable
from rlhf.log.sinks import BOUNDS, NO_DETAILS, Details, shown_reward

Row = Mapping[str, Any]
Columns = Sequence[tuple[str, str, str]]  # of a step's line: title, metric and format; the last ones are dropped first

REFRESHES_PER_S = 4
TENTHS = 10  # of a run: how often a line says who waits
PROGRESS_EVERY_S = 30.0  # between two lines about one evaluation, where there is no live view
RESPONSE_LINES = 4  # shown of each of the two responses in the live view
ROLLOUT_COLUMNS: Columns = (
    ("reward", "reward/mean", "{:.3f}"),
    ("kl", "policy/kl_k3", "{:.4f}"),
    ("length", "rollout/response_length/mean", "{:.4g}"),
    ("tok/s", "rollout/tokens_per_second", "{:.0f}"),
    ("s", "time/step", "{:.3g}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad", "learner/grad_norm", "{:.2f}"),
)


class Terminal:
    """The lines of a run, and its live view; in the first `warmup_steps` only the critic is trained."""

    def __init__(
        self, console: Console, *, total_steps: int, first_step: int = 0, warmup_steps: int = 0, title: str = ""
    ) -> None:
        self._console = console
        self._is_live = console.is_interactive and console.file.isatty()
        self._total, self._first, self._step = total_steps, first_step, first_step
        self._columns = ROLLOUT_COLUMNS
        self._warmup_steps = warmup_steps
        self._title = title
        self._running: dict[str, float] = {}  # stages and phases: name -> when it began
        self._began = 0.0  # when the first step did
        self._detail: Callable[[], str] | None = None
        self._values: dict[str, Any] = {}
        self._evaluation = self._waits = ""
        self._responses: Sequence[Row] = ()

    # --- events ---

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context for a stage of the start-up; stages may overlap."""
        began = time.monotonic()
        with self.phase(name):
            yield
        self.print(f"start: {name} {time.monotonic() - began:.1f} s")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context for a phase of a step, an evaluation, a checkpoint or the export."""
        self._running[name] = time.monotonic()
        try:
            yield
        finally:
            del self._running[name]
            self._detail = None

    def show(self, detail: Callable[[], str]) -> None:
        """Show this text after the names of the phases, until one ends."""
        self._detail = detail

    def progress(self, noun: str, total: int) -> Callable[[], None]:
        """Returns a function that counts one more of `total` at each call, until the phase ends."""
        done, printed = 0, time.monotonic()

        def count() -> None:
            nonlocal done, printed
            done += 1
            self.show(lambda: f"{noun} {done}/{total}")
            if not self._is_live and time.monotonic() - printed > PROGRESS_EVERY_S:
                printed = time.monotonic()
                self.print(f"{noun} {done}/{total}")

        return count

    def log(self, step: int, values: Row, details: Details = NO_DETAILS) -> None:
        if "time/step" not in values:
            return
        self._began = self._began or time.monotonic() - values["time/step"]
        self._step, self._values = step, dict(values)
        if details.responses:
            self._responses = details.responses[:2]
        parts = [f"step {step:>{len(str(self._total))}}/{self._total}", *self._shown_values(), self._eta()]
        while len(parts) > 2 and len("  ".join(parts)) > min(self._console.width, 80):
            del parts[-2]
        self.print("  ".join(parts))

    def _shown_values(self) -> list[str]:
        return [f"{name} {form.format(self._values[key])}" for name, key, form in self._columns if key in self._values]

    def _eta(self) -> str:
        return f"eta {duration(self.remaining_s())}" if self._step > self._first else "starting"

    def evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """One line for each data set."""
        by_source: dict[str, list[str]] = {}
        for name, value in values.items():
            if not name.endswith(BOUNDS) and (value or not name.endswith("/ungraded_fraction")):
                *labels, metric = name.removeprefix("eval/").split("/", 1)  # a part of the reward may have slashes
                source, metric = "".join(labels), metric.removeprefix("part/").removeprefix("response_")
                metric = metric.removesuffix("_fraction")
                by_source.setdefault(source, []).append(f"{metric} {value:.3f}")
        for source, shown in by_source.items():
            self._evaluation = "  ".join(filter(None, [f"eval at step {step}", source, *shown]))
            self.print(self._evaluation, style="bold")

    def who_waits(self, line: str) -> None:
        """Show who waits, from now on in the live view. A line says it once in each tenth of the run.

        A warning of the diagnosis has said it the first time, and it changes slowly.
        """
        self._waits = line
        if line and self._step % max(1, self._total // TENTHS) == 0:
            self.print(line)

    def warn(self, *messages: str) -> None:
        for message in messages:
            self.print(f"warning: {message}", style="yellow", styled=len("warning: "))

    def print(self, text: str, *, style: str = "", styled: int | None = None, wrap: bool = True) -> None:
        """Print lines. The style is for the first `styled` characters, or for all of them."""
        whole = printable(text)
        shown = Text("\n".join(wrap_lines(whole, self._console.width)) if wrap else whole)
        shown.stylize(style, 0, styled)
        self._console.print(shown, soft_wrap=True)
        note_line()

    def status(self) -> dict[str, Any]:
        """What the run is doing, for `status.json`: phases, the same in words, and seconds left (None: not known)."""
        remaining_s = round(self.remaining_s(), 1) if self._step > self._first else None
        phases = {"phases": [*self._running], "now": self._now(), "remaining_s": remaining_s}
        return {"step": self._step, "steps": self._total, "waits": self._waits, **phases}

    def remaining_s(self) -> float:
        """Steps left, times the mean duration so far of a step with the evaluations and saves between steps."""
        return (self._total - self._step) * (time.monotonic() - self._began) / max(1, self._step - self._first)

    # --- the live view ---

    def live(self, columns: Columns = ROLLOUT_COLUMNS) -> contextlib.AbstractContextManager[Any]:
        """A context that shows the live view on a terminal, and elsewhere prints lines until the first step."""
        self._columns = columns
        if not self._is_live:
            return heartbeat(self._waiting_for, self.print)
        return Live(
            console=self._console, get_renderable=self.view, refresh_per_second=REFRESHES_PER_S,
            transient=True, vertical_overflow="crop",
        )  # fmt: skip

    def view(self) -> RenderableType:
        """The live view: progress, current phase, last metrics, last evaluation, two responses."""
        bar = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
        step = Text(f"{printable(self._title)}  step {self._step}/{self._total}", style="bold")
        bar.add_row(step, ProgressBar(total=self._total, completed=self._step), Text(self._eta()))
        parts: list[RenderableType] = [bar, _line(f"now     {self._now()}", "cyan")]
        if self._values:
            parts.append(_line("  ".join(["last  ", *self._shown_values()])))
        if self._waits:
            parts.append(_line(self._waits, "yellow"))
        if self._evaluation:
            parts.append(_line(self._evaluation, "bold"))
        return Group(*parts, *map(_response, self._responses))

    def _now(self) -> str:
        """The current phases of the run with their seconds so far."""
        running, now = [*self._running.items()], time.monotonic()  # a copy: other threads begin and end phases
        texts = [f"{name} {now - began:.0f} s" for name, began in running if name != "start" or len(running) == 1]
        if (detail := self._detail) is not None:
            texts.append(detail())
        if self._step < self._warmup_steps:
            texts.append(f"critic warm-up {self._step + 1}/{self._warmup_steps}")
        return ", ".join(texts) or "between two phases"

    def _waiting_for(self) -> str:
        """One line about the current phases; empty after the first step."""
        if self._step > self._first:
            return ""
        return f"{'starting' if 'start' in self._running else 'now'}: {self._now()}"


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _response(row: Row) -> Panel:
    reward, color = shown_reward(row["reward"])
    prompt = " ".join(row["prompt"].split())
    title = f"step {row['step']}, reward {reward}, {row['status']}, {row['finish_reason']}"
    if calls := sum(len(turn.get("tool_calls") or ()) for turn in row.get("turns", ())):
        title += f", {calls} tool calls"
    lines = printable(row["text"]).strip().splitlines()
    shown = "\n".join([*lines[:RESPONSE_LINES], *(["..."] if len(lines) > RESPONSE_LINES else [])])
    block = Group(_line(prompt, "dim"), Text(shown, no_wrap=True, overflow="ellipsis"))
    return Panel(block, title=_line(title), title_align="left", border_style=color)


def duration(seconds: float) -> str:
    """A duration in the unit that fits: `45 s`, `12 min`, `3.4 h`, `2.1 d`."""
    for unit, size, form in (("d", 86400, ".1f"), ("h", 3600, ".1f"), ("min", 60, ".0f")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:{form}} {unit}"
    return f"{seconds:.0f} s"


def wrap_lines(text: str, width: int) -> list[str]:
    """Break text between words into lines of at most `width`; a longer word, such as a path, stays whole."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        broken = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines += broken if len(line) > width else [line]
    return lines or [""]
