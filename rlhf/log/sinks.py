"""Where metrics go: a JSONL file, TensorBoard, MLflow, Trackio; log/wandb_sink.py and log/terminal.py have others.

The x-axis of every metric is the training step. A server is written to in a thread, so that it does not slow the run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
# MLflow itself would try for half an hour to reach a server, and for 100 s to open a database.
MLFLOW_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
}
MLFLOW_DATABASE_RETRIES = 2
MLFLOW_DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?:")
# They would send a run to a server that its config does not name.
TRACKIO_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0  # before a row is tried again; the wait doubles
CLOSE_S = 20.0  # at the end of a run, for the rows that wait
MAX_REASON = 200  # characters
MAX_ROWS = 2000  # rows that can wait; after a longer failure the newest are only in metrics.jsonl
TRAINED_SHARE = "/in_training_fraction"  # name ending of the share of an evaluation's rows that are trained on
BOUNDS = ("/low", "/high")  # name endings of the bounds of an evaluation's interval
COLUMNS = ("step", "prompt", "answer", "text", "extracted", "reward", "advantage", "status", "finish_reason")


@dataclass(frozen=True)
class Details:
    """What a step has in addition to numbers, for the sinks that can show it.

    Attributes:
        responses: sampled responses, rows as in rollouts/; empty in most steps.
    """

    histograms: Mapping[str, Counts] = field(default_factory=dict)
    responses: Sequence[Mapping[str, Any]] = ()


NO_DETAILS = Details()


def table_of_responses(responses: Sequence[Mapping[str, Any]]) -> tuple[list[str | int], list[list[Any]]]:
    """Columns and rows of the table of sampled responses; parts of the reward have a column each."""
    parts = list(dict.fromkeys(part for row in responses for part in row["reward_parts"]))

    def cell(value: Any) -> Any:
        return as_utf8(value) if isinstance(value, str) else value

    rows = [[*(cell(row[name]) for name in COLUMNS), *map(row["reward_parts"].get, parts)] for row in responses]
    return [*COLUMNS, *(f"reward/part/{logged_name(part)}" for part in parts)], rows


class Sink(Protocol):
    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None: ...


class ClosingSink(Sink, Protocol):
    def close(self, *, failed: bool = False) -> None: ...


class JsonlSink:
    """`metrics.jsonl`: one object per line. Resuming at a step removes the lines of later steps."""

    def __init__(self, path: Path, files: PatientFiles, *, resume_step: int | None = None) -> None:
        if resume_step is not None and (unread := keep_lines_up_to(path, resume_step)):
            files.warn(f"{path}: {unread} line(s) could not be read, and were left out.")
        path.touch()
        self._path, self._files = path, files

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self._files.append(self._path, json.dumps({STEP: step, "time": round(time.time(), 3), **values}) + "\n")


def keep_lines_up_to(path: Path, step: int) -> int:
    """Drop lines of later steps and lines that cannot be read; by rename, so that a crash loses no line.

    Returns:
        Lines that could not be read, without a last one that a kill cut short.
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


def read_rows(file: Path) -> Iterator[Row]:
    """The JSON objects of a file, one per line; what is not one, as the end of a live file, is left out."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and type(row.get(STEP)) is int:
                yield row


def read_summary(run: Path) -> Row:
    """What a finished run wrote in its folder; empty if the run has not finished.

    Raises:
        ValueError: the file cannot be read.
    """
    file = run / SUMMARY
    try:
        summary = json.loads(file.read_bytes().decode())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: it cannot be read ({first_line(error)}).") from None
    if not isinstance(summary, dict) or type(summary.get("steps")) is not int:
        raise ValueError(f"{file}: it does not say how many steps the run had.")
    return summary


class TensorBoardSink:
    """Event files for TensorBoard; resuming at a step makes TensorBoard hide what was logged after it."""

    def __init__(self, folder: Path, *, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


class MlflowSink:
    """A run of an MLflow experiment; `run_id` continues an earlier run.

    Raises:
        ValueError: the server or database does not take the run.
    """

    def __init__(self, uri: str, experiment: str, name: str, config: Mapping[str, Any], *, run_id: str | None) -> None:
        for variable, value in MLFLOW_SETTINGS.items():
            os.environ.setdefault(variable, value)
        from mlflow import MlflowClient

        try:
            if MLFLOW_DATABASE.match(uri):
                from mlflow.store.db import utils

                utils.MAX_RETRY_COUNT = MLFLOW_DATABASE_RETRIES
            self._client = MlflowClient(uri)
            self.run_id: str = run_id or self._start(experiment, name, config)
        except Exception as error:  # many types: of MLflow, of SQLAlchemy, of the driver of a database
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"logging.mlflow.uri={uri}: it does not take the run ({reason}). Start the server, correct the "
                "address, or set it to null."
            ) from None

    def _start(self, experiment: str, name: str, config: Mapping[str, Any]) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        self._client.log_dict(run_id, dict(config), "config.json")
        return run_id

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        named = [(name.replace("@", "_at_"), float(value)) for name, value in values.items()]
        self._client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in named])

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


class TrackioSink:
    """A run of a Trackio project, opened with the first row.

    Args:
        name: unique in the project; a run that has it already goes on. Steps that are taken again are there twice.
        resolved: the config of the run.
    """

    def __init__(self, config: TrackioConfig, name: str, resolved: Mapping[str, Any]) -> None:
        import trackio

        for variable in TRACKIO_VARIABLES:
            os.environ.pop(variable, None)
        self._trackio, self._config, self._name, self._resolved = trackio, config, name, resolved
        self._run: Any = None

    def _start(self) -> Any:
        server, project = self._config.server or "", self._config.project
        assert project is not None, "without a project nothing is logged"
        by_address = server.startswith(("http://", "https://"))
        return self._trackio.init(
            project, self._name, self._config.group, resume="allow", config=dict(self._resolved),
            server_url=server if by_address else None, space_id=None if by_address else server or None,
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        if self._run is None:
            self._run = self._start()
        shown: dict[str, Any] = dict(values)
        for name, counts in details.histograms.items():
            shown[name] = self._trackio.Histogram(np_histogram=counts)
        if details.responses:
            columns, rows = table_of_responses(details.responses)
            shown["responses"] = self._trackio.Table(columns=list(map(str, columns)), data=rows)
        self._run.log(shown, step=step)

    def close(self, *, failed: bool = False) -> None:
        if self._run is not None:
            self._run.finish()


class BackgroundSink:
    """Sends rows to `sink` in order, in a thread; one that fails is sent again. `key`: of the config, for messages."""

    def __init__(self, sink: ClosingSink, key: str, warn: Callable[[str], None]) -> None:
        self._sink, self._key, self._warn = sink, key, warn
        self._rows: queue.Queue[Callable[[], None]] = queue.Queue(MAX_ROWS)
        self._lost = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send, name=key, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        try:
            self._rows.put_nowait(lambda: self._sink.log(step, values, details))
        except queue.Full:
            self._lost += 1

    def close(self, *, failed: bool = False) -> None:
        """Send the waiting rows, within CLOSE_S; a warning counts the rows that were not sent."""
        end = time.monotonic() + CLOSE_S
        self._closing.set()
        with contextlib.suppress(queue.Full):
            self._rows.put_nowait(lambda: self._sink.close(failed=failed))
        while self._rows.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.01)
        if left := self._lost + max(0, self._rows.unfinished_tasks - 1):
            self._warn(f"{self._key}: {left} rows were not sent; metrics.jsonl has them.")

    def _send(self) -> None:
        while True:
            send = self._rows.get()
            for tries in itertools.count():
                try:
                    send()
                    break
                except Exception as error:  # clients raise many types
                    if tries == 0:
                        reason = " ".join(str(error).split())[:MAX_REASON]
                        self._warn(
                            f"{self._key}: it takes no rows ({reason}). The run goes on, and they are sent later."
                        )
                if self._closing.wait(min(FIRST_WAIT_S * 2 ** min(tries, 20), LONGEST_WAIT_S)):
                    time.sleep(FIRST_WAIT_S)
            self._rows.task_done()


def shown_reward(reward: float | None) -> tuple[str, str]:
    """A reward as text, and the color of its response: green above 0, else red."""
    return ("none", "red") if reward is None else (f"{reward:.4g}", "green" if reward > 0 else "red")


def on_training_data(rows: Iterable[Mapping[str, Any]]) -> str:
    """The end of a run's title if a whole evaluation set is in its training data, else empty; `rows`: its metrics."""
    ends = (name for row in rows for name, share in row.items() if name.endswith(TRAINED_SHARE) and share == 1)
    names = [name.removesuffix(TRAINED_SHARE).removeprefix("eval").strip("/") for name in dict.fromkeys(ends)]
    sets = f" ({', '.join(names)})" if any(names) else ""
    return f", evaluated on its training data{sets}" if names else ""


def evaluation_table(title: str, by_column: Mapping[str, Mapping[str, float]]) -> Table:
    """Evaluations side by side, with their intervals: before and after training, or of several models."""
    table = Table(Column("metric", overflow="fold"), title=escape(printable(title)))
    for column in by_column:
        table.add_column(escape(printable(column)), justify="right", overflow="fold")

    def cell(values: Mapping[str, float], name: str) -> str:
        bounds = [f"{values[name + bound]:.3f}" for bound in BOUNDS if name + bound in values]
        interval = f" ({' to '.join(bounds)})" if bounds else ""
        return f"{values[name]:.3f}{interval}" if name in values else "-"

    for name in dict.fromkeys(name for values in by_column.values() for name in values):
        if not name.endswith(BOUNDS):
            shown = escape(printable(name.removeprefix("eval/")))
            table.add_row(shown, *(cell(values, name) for values in by_column.values()))
    return table
