"""Follows the folders of runs for `rlhf watch`: reads only what their files have gained since the last look."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.config.load import stored_values
from rlhf.log.sinks import Row, parse_rows
from rlhf.log.status import LOST_S, STATES, STATUS
from rlhf.report.page import page_metrics, page_rollouts
from rlhf.report.run_files import METRICS, RunFiles, add_rows, config_file_of, read_groups

NEWEST_BYTES = 2 * 2**20  # most bytes of rollout files in one answer; older ones of the new steps are left out
FIRST_FILES = {"objects", "rollouts", "checkpoints", ".lock", "run_id", "run_id.new", "config.new"}  # before the config
HEAD_BYTES = 256  # the first line of metrics.jsonl has the time at which it was written


class Tail:
    """The rows of a growing file with one JSON object per line. A half-written last line waits for its end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # of the first byte that was not read
        self._identity: tuple[int, bytes] | None = None

    def read(self) -> tuple[list[Row], bool]:
        """(new rows, whether they begin anew, because the file was replaced or got shorter, as after a resume)."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                identity = about.st_ino, file.readline(HEAD_BYTES)
                began = self._offset > 0 and (identity != self._identity or about.st_size < self._offset)
                self._offset *= not began
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return [], False
        complete = data[: data.rfind(b"\n") + 1]
        self._offset, self._identity = self._offset + len(complete), identity
        # names of metrics are stored once, not once per row
        rows = [{sys.intern(name): value for name, value in row.items()} for row in parse_rows(io.BytesIO(complete))]
        return rows, began


class LiveRun:
    """One run folder, which need not exist yet.

    Attributes:
        files: what was read of it; None before there is a config.
        changes: number of times that the metrics or the config were found changed.
        beginnings: number of times that they were found to begin anew.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.files: RunFiles | None = None
        self.changes = self.beginnings = 0
        self._tail = Tail(self.path / METRICS)
        self._rows: dict[int, Row] = {}
        self._config: tuple[Path, int] | None = None  # the config that was read, and when it was written
        if self.path.exists() and not self._may_become_a_run():
            raise ValueError(f"{self.path}: not a run folder: config.yaml is missing. Name the run.dir of a run.")

    def _may_become_a_run(self) -> bool:
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else {""}
        return "config.yaml" in names or names <= FIRST_FILES

    def look(self) -> None:
        """Read what is new."""
        rows, began = self._tail.read()
        if began:
            self._rows, self.beginnings = {}, self.beginnings + 1
        add_rows(self._rows, rows)
        file = config_file_of(self.path)
        try:
            config = file, file.stat().st_mtime_ns
            if not (rows or began or config != self._config):
                return
            values = stored_values(file) if config != self._config or self.files is None else self.files.values
        except (OSError, ValueError):  # not there yet
            return
        self._config = config
        self.files = RunFiles(self.path, file, values, [self._rows[step] for step in sorted(self._rows)])
        self.changes += 1

    def status(self) -> dict[str, Any]:
        """What the run does and waits for, as the page shows it. Times are seconds before now."""
        try:
            told = json.loads((self.path / STATUS).read_bytes())
            age_s = time.time() - told["time"]
        except (OSError, ValueError, LookupError, TypeError):  # none yet, or the run of another version
            told, age_s = {}, math.inf
        newest = self.files and next((row for row in reversed(self.files.rows) if "time/step" in row), None)
        state, text = self._state(told, age_s)
        return {
            "name": self.path.resolve().name,
            "state": state,
            "text": text,
            "step": max(told.get("step", 0), newest["step"] if newest else 0),
            "steps": told.get("steps"),
            "remaining_s": told.get("remaining_s") if state in STATES else None,
            "waits": told.get("waits", ""),
            "step_s": newest["time/step"] if newest else None,
            "since_step_s": round(time.time() - newest["time"]) if newest and "time" in newest else None,
        }

    def _state(self, told: Row, age_s: float) -> tuple[str, str]:
        """(state, the same in words)."""
        if self.files is None:
            return "not started", "there is no run in this folder yet"
        alive = age_s < LOST_S and told["ended"] is None
        if self.files.finished and not alive:
            return "finished", ""
        if not told:
            return "not finished", "it writes no status.json, so whether it goes on is not known"
        if told["ended"] is not None:
            return ("failed", "its log says why") if told["ended"] == "failed" else ("stopped", "before its last step")
        if not alive:
            return "lost", f"it has not been heard of for {age_s / 60:.0f} min; the last was: {told['now']}"
        states = (state for state, phases in STATES.items() if not set(phases).isdisjoint(told["phases"]))
        return next(states, "between two phases"), told["now"]

    def newest_groups(self, after: int, max_bytes: int) -> tuple[int, int, list[list[Row]]]:
        """(first step, last step, groups) of the rollouts of the newest steps above `after`, in order.

        At most about `max_bytes` of their files are read. A file without the end of its last line waits.
        """
        first, last, by_step = after, after, list[list[list[Row]]]()
        files = self.files.rollout_files() if self.files else {}
        for step in sorted((step for step in files if step > after), reverse=True):
            with contextlib.suppress(OSError):  # a resumed run removes the files of steps that it repeats
                size = files[step].stat().st_size
                if not _is_complete(files[step], size):
                    continue
                if size > max_bytes and by_step:
                    break
                by_step.append([*read_groups(files[step], max_bytes if size > max_bytes else None)])
                first, last, max_bytes = step, max(last, step), max_bytes - size
        return first, last, [group for groups in reversed(by_step) for group in groups]


def _is_complete(file: Path, size: int) -> bool:
    with file.open("rb") as content:
        content.seek(max(0, size - 1))
        return size == 0 or content.read() == b"\n"


class LiveRuns:
    """Several run folders, as one page shows them."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._runs = [LiveRun(folder) for folder in {Path(folder).resolve(): folder for folder in folders}.values()]

    @property
    def names(self) -> list[str]:
        return [run.path.resolve().name for run in self._runs]

    def status(self) -> dict[str, Any]:
        """Look at all runs. `version` changes with their metrics; `generation` where a page has to begin anew."""
        for run in self._runs:
            run.look()
        generation = [[run.files is not None, run.beginnings] for run in self._runs]
        version = [run.changes for run in self._runs]
        return {"generation": generation, "version": version, "runs": [run.status() for run in self._runs]}

    @property
    def _readable(self) -> list[LiveRun]:
        return [run for run in self._runs if run.files is not None]

    def metrics(self) -> dict[str, Any]:
        """All data of the page except rollouts, of the runs that have begun."""
        return page_metrics([run.files for run in self._readable if run.files is not None])

    def rollouts(self, after: Sequence[int]) -> dict[str, Any]:
        """The rollouts of the newest steps above `after` of each run that has begun, as `page_rollouts` gives them."""
        runs = self._readable
        after = [*after, *[0] * (len(runs) - len(after))]
        new = [run.newest_groups(step, NEWEST_BYTES // len(runs)) for run, step in zip(runs, after, strict=False)]
        groups = ((number, group) for number, (_, _, groups) in enumerate(new) for group in groups)
        return page_rollouts(groups) | {"first": [each[0] for each in new], "last": [each[1] for each in new]}
