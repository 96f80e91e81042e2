"""TensorBoard and Trackio: what a run logs, read back by their own libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.config.sections import TrackioConfig
from rlhf.log.sinks import COLUMNS, NO_DETAILS, Details, OptionalTracker, TensorBoardSink, TrackioSink


def test_tensorboard_reads_numbers_and_hides_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path, resume_step=None)
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": step / 10})
    sink.close()
    resumed = TensorBoardSink(tmp_path, resume_step=2)
    resumed.log(3, {"reward/mean": 0.7})
    resumed.close()
    read = events.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [
        (step, pytest.approx(value)) for step, value in ((1, 0.1), (2, 0.2), (3, 0.7))
    ]


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))  # read when it is imported
        return pytest.importorskip("trackio")


def test_trackio_holds_config_metrics_histograms_and_responses_and_a_resumed_run_goes_on(
    trackio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")  # the config names none: nothing leaves the machine
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = TrackioConfig(project="mine", group="both")
    response = {**dict.fromkeys(COLUMNS, "x"), "reward": 0.5, "reward_parts": {"math": 1.0}}
    details = Details({"reward/histogram": (np.array([3, 1]), np.array([0.0, 0.5, 1.0]))}, [response])
    for first_step, name in ((0, "first-1a"), (0, "first-2b"), (2, "first-1a")):
        sink = TrackioSink(config, name, {"run": {"steps": 4}})
        for step in (first_step, first_step + 1):
            sink.log(step, {"eval/test/avg@1": step / 4}, details if step == 3 else Details())
        sink.close(failed=True)
    runs = list(trackio.Api().runs("mine"))
    assert sorted(run.name for run in runs) == ["first-1a", "first-2b"]
    assert all(run.config["run"] == {"steps": 4} and run.config["_Group"] == "both" for run in runs)
    rows = storage.get_logs("mine", "first-1a")
    assert [(row["step"], row["eval/test/avg@1"]) for row in rows] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert rows[3]["reward/histogram"]["values"] == [3, 1]
    (shown,) = rows[3]["responses"]["_value"]
    assert (list(shown), shown["reward/part/math"]) == ([*COLUMNS, "reward/part/math"], 1.0)
    assert "responses" not in rows[2]


@pytest.mark.parametrize(
    ("server", "argument"),
    [(None, None), ("team/space", "space_id"), ("https://host:7860/?write_token=abcd", "server_url")],
)
def test_trackio_is_sent_to_the_server_of_its_key_alone(
    server: str | None, argument: str | None, trackio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def init(**named: Any) -> Any:
        given.update(named)
        return SimpleNamespace(log=lambda *_, **__: None)

    monkeypatch.setattr(trackio, "init", init)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")  # Trackio would prefer it to an address
    TrackioSink(TrackioConfig(project="mine", server=server), "first-1a", {}).log(1, {})
    assert "TRACKIO_SPACE_ID" not in os.environ
    assert {name: given[name] for name in ("space_id", "server_url") if given[name]} == (
        {} if argument is None else {argument: server}
    )


class FailingTracker:
    """Fails with the second row."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self.steps.append(step)
        if step == 2:
            raise ConnectionError("no space\nleft")

    def close(self, *, failed: bool = False) -> None:
        self.closed = failed
        raise ConnectionError("again")


def test_a_tracker_that_fails_gets_no_more_rows_is_closed_and_is_one_warning() -> None:
    warnings: list[str] = []
    tracker = FailingTracker()
    sink = OptionalTracker(tracker, "logging.trackio", warnings.append)
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": 0.5})
    sink.close(failed=True)
    assert (tracker.steps, tracker.closed) == ([1, 2], True)
    assert [warning.split(" The ")[0] for warning in warnings] == ["logging.trackio: it failed (no space left)."]
