"""Where metrics go: a JSONL file, TensorBoard, Trackio; log/wandb_sink.py and log/terminal.py have others.

The x-axis of every metric is the training step.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from rlhf.config.base import first_line
from rlhf.config.printing import as_utf8, printable
from rlhf.config.reward import logged_name
from rlhf.config.sections import TrackioConfig
from rlhf.log.patient_files import PatientFiles
from rlhf.log.reductions import Counts

Row = dict[str, Any]

STEP = "step"
SUMMARY = "summary.json"  # in the folder of a finished run
# These variables would send a run to a server that its config does not name.
TRACKIO_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
MAX_REASON = 200  # characters
TRAINED_SHARE = "/in_training_fraction"  # name ending of the share of an evaluation's rows that are trained on
BOUNDS = ("/low", "/high")  # name endings of the bounds of an evaluation's interval
COLUMNS = ("step", "prompt", "answer", "text", "extracted", "reward", "advantage", "status", "finish_reason")


@dataclass(frozen=True)
class Details:
    """Data of a step other than numbers, for the sinks that can show it."""

    histograms: Mapping[str, Counts] = field(default_factory=dict)
    responses: Sequence[Mapping[str, Any]] = ()  # sampled responses, rows as in rollouts/; empty in most steps


NO_DETAILS = Details()


def table_of_responses(responses: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of the table of sampled responses; each part of the reward is a column."""
    parts = list(dict.fromkeys(part for row in responses for part in row["reward_parts"]))

    def cell(value: Any) -> Any:
        return as_utf8(value) if isinstance(value, str) else value

    rows = [[*(cell(row[name]) for name in COLUMNS), *map(row["reward_parts"].get, parts)] for row in responses]
    return [*COLUMNS, *(f"reward/part/{logged_name(part)}" for part in parts)], rows


def with_details(tracker: Any, values: Mapping[str, Any], details: Details) -> dict[str, Any]:
    """One row as wandb and Trackio take it, with histograms and a table of responses; `tracker`: module of either."""
    row: dict[str, Any] = dict(values)
    for name, counts in details.histograms.items():
        row[name] = tracker.Histogram(np_histogram=counts)
    if details.responses:
        columns, rows = table_of_responses(details.responses)
        row["responses"] = tracker.Table(columns=columns, data=rows)
    return row


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None: ...


class Tracker(Sink, Protocol):
    def close(self, *, failed: bool = False) -> None: ...


class JsonlSink:
    """`metrics.jsonl`: one object per line. Resuming at a step removes the lines of later steps."""

    def __init__(self, path: Path, files: PatientFiles, *, resume_step: int | None = None) -> None:
        if resume_step is not None and (unread := keep_lines_up_to(path, resume_step)):
            files.warn(f"{path}: {unread} line(s) could not be read and were dropped.")
        path.touch()
        self._path, self._files = path, files

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self._files.append(self._path, json.dumps({STEP: step, "time": round(time.time(), 3), **values}) + "\n")


def keep_lines_up_to(path: Path, step: int) -> int:
    """Remove the lines of later steps and unreadable lines. The new file is renamed, so that a crash loses no line.

    Returns the number of unreadable lines, without an incomplete last line, which a kill leaves.
    """
    if not path.exists():
        return 0
    with path.open("rb") as lines:
        unread = sum(line.endswith(b"\n") for line in lines)
    shorter = path.with_suffix(".new")
    with shorter.open("w") as kept:
        for row in read_rows(path):
            unread -= 1
            kept.write(json.dumps(row) + "\n" if row[STEP] <= step else "")
        kept.flush()
        os.fsync(kept.fileno())
    shorter.replace(path)
    return max(0, unread)


def read_rows(file: Path, max_bytes: int | None = None) -> Iterator[Row]:
    """The JSON objects of a file, one per line; of a part, the lines that its first `max_bytes` hold."""
    with file.open("rb") as lines:
        yield from parse_rows(
            lines if max_bytes is None else iter(lambda: lines.readline(max_bytes - lines.tell()), b"")
        )


def parse_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """The JSON objects of lines. Other lines, such as the end of a growing file, are skipped."""
    for line in lines:
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get(STEP)) is int:
            yield row


def read_summary(run: Path) -> Row:
    """The summary in the folder of a finished run; empty if it has not finished. ValueError for an unreadable file."""
    file = run / SUMMARY
    try:
        summary = json.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the file cannot be read ({first_line(error)}).") from None
    if not isinstance(summary, dict) or type(summary.get("steps")) is not int:
        raise ValueError(f"{file}: the number of steps is missing.")
    return summary


class TensorBoardSink:
    """Event files for TensorBoard. After a resume, TensorBoard hides the old rows after the checkpoint."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class TrackioSink:
    """A run of a Trackio project, opened with the first row; Trackio sends rows in its own thread and tries again.

    A run of the project with the same name is continued; steps that are repeated appear twice.
    """

    def __init__(self, config: TrackioConfig, name: str, resolved: Mapping[str, Any]) -> None:
        import trackio

        for variable in TRACKIO_VARIABLES:
            os.environ.pop(variable, None)
        self._trackio: Any = trackio
        self._run: Any = None
        server = config.server or ""
        by_address = server.startswith(("http://", "https://"))
        self._options: dict[str, Any] = {
            "project": config.project, "name": name, "group": config.group, "resume": "allow", "config": {**resolved},
            "server_url": server if by_address else None, "space_id": None if by_address else server or None,
            "embed": False, "auto_log_gpu": False, "auto_log_cpu": False,
        }  # fmt: skip

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self._run = self._run or self._trackio.init(**self._options)
        self._run.log(with_details(self._trackio, values, details), step=step)

    def close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish()


class OptionalTracker:
    """Keeps a run going when a tracker fails: one warning, which names `key`, and no more rows for this tracker."""

    def __init__(self, tracker: Tracker, key: str, warn: Callable[[str], None]) -> None:
        self._tracker, self._key, self._warn = tracker, key, warn
        self._has_failed = False

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self.attempt(lambda: self._tracker.log(step, values, details))

    def close(self, *, failed: bool = False) -> None:
        if self._has_failed:
            with contextlib.suppress(Exception):
                self._tracker.close(failed=failed)
        self.attempt(lambda: self._tracker.close(failed=failed))

    def attempt(self, call: Callable[[], None]) -> None:
        """Call the tracker, unless it has failed before."""
        if self._has_failed:
            return
        try:
            call()
        except Exception as error:  # clients raise many types, some of them their own
            self._has_failed = True
            reason = " ".join(str(error).split())[:MAX_REASON] or type(error).__name__
            self._warn(f"{self._key}: it failed ({reason}). The run goes on without it; metrics.jsonl has all metrics.")


def shown_reward(reward: float | None) -> tuple[str, str]:
    """A reward as text, and the color of its response: green above 0, else red."""
    return ("none", "red") if reward is None else (f"{reward:.4g}", "green" if reward > 0 else "red")


def training_data_note(rows: Iterable[Mapping[str, Any]]) -> str:
    """A note for the title of a run that has a whole evaluation set in its training data; else empty."""
    trained = (name for row in rows for name, share in row.items() if name.endswith(TRAINED_SHARE) and share == 1)
    names = [name.removesuffix(TRAINED_SHARE).removeprefix("eval").strip("/") for name in dict.fromkeys(trained)]
    sets = f" ({', '.join(names)})" if any(names) else ""
    return f", evaluated on its training data{sets}" if names else ""


def evaluation_table(title: str, by_column: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of evaluations with their intervals, one column each: before and after training, or several models."""
    table = Table(Column("metric", overflow="fold"), title=escape(printable(title)))
    for column in by_column:
        table.add_column(escape(printable(column)), justify="right", overflow="fold")
    for name in dict.fromkeys(name for values in by_column.values() for name in values):
        if not name.endswith(BOUNDS):
            shown = escape(printable(name.removeprefix("eval/")))
            table.add_row(shown, *(_with_interval(values, name) for values in by_column.values()))
    return table


def _with_interval(values: Mapping[str, float], name: str) -> str:
    bounds = [f"{values[name + bound]:.3f}" for bound in BOUNDS if name + bound in values]
    interval = f" ({' to '.join(bounds)})" if bounds else ""
    return f"{values[name]:.3f}{interval}" if name in values else "-"


def suite_table(title: str, metrics: Mapping[str, float], sizes: Mapping[str, tuple[int, int]]) -> Table:
    """A table of an evaluation with a row per data set and one for their mean.

    `sizes`: problems and responses per problem (k) of each data set. Ungraded responses and those that were cut off
    are counts.
    """
    numbers = ("problems", "k", "avg@k (95% interval)", "pass@k", "maj@k", "ungraded", "cut off")
    columns = [Column(name, justify="right") for name in numbers]
    table = Table(Column("data set", overflow="fold"), *columns, title=escape(printable(title)), box=SIMPLE_HEAD)
    table.padding, table.show_edge = 0, False  # fits into 80 columns
    for label, (problems, k) in sizes.items():
        of, count = f"eval/{label}/", problems * k
        shares = [metrics.get(f"{of}ungraded_fraction", 1.0), 1.0 - metrics[f"{of}stopped_fraction"]]
        rates = [f"{metrics[name]:.3f}" if (name := f"{of}{rate}@{k}") in metrics else "-" for rate in ("pass", "maj")]
        table.add_row(
            escape(printable(label)), f"{problems:,}", str(k), _with_interval(metrics, f"{of}avg@{k}"), *rates,
            *(f"{round(share * count):,}" for share in shares),
        )  # fmt: skip
    if len(sizes) > 1:
        table.add_section()
        table.add_row("mean", "", "", _with_interval(metrics, "eval/mean/avg"), "", "", "", "")
    return table
