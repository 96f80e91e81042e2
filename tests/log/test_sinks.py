"""TensorBoard, MLflow and Trackio: what a run logs, read back by their own libraries."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.config.sections import TrackioConfig
from rlhf.log.sinks import COLUMNS, BackgroundSink, Details, MlflowSink, TensorBoardSink, TrackioSink


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


@pytest.mark.parametrize("address", ["file://", pytest.param("sqlite:///", marks=pytest.mark.slow)])
def test_mlflow_holds_config_and_metrics_and_a_resumed_run_goes_on(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps the files of runs in a database
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = f"{address}{tmp_path / 'mlflow'}"
    config = {"run": {"steps": 2}}
    sink = MlflowSink(uri, "mine", "first", config, run_id=None)
    sink.log(1, {"eval/test/avg@1": 0.25})
    sink.close(failed=True)
    resumed = MlflowSink(uri, "mine", "first", config, run_id=sink.run_id)
    resumed.log(2, {"eval/test/avg@1": 0.5})
    resumed.close()
    client = mlflow.MlflowClient(uri)
    assert [(m.step, m.value) for m in client.get_metric_history(sink.run_id, "eval/test/avg_at_1")] == [
        (1, 0.25),
        (2, 0.5),
    ]
    assert client.get_run(sink.run_id).info.status == "FINISHED"
    assert client.get_run(sink.run_id).info.run_name == "first"
    assert [file.path for file in client.list_artifacts(sink.run_id)] == ["config.json"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uri", "reason"),
    [
        ("sqlite:///{folder}", "unable to open database file"),
        ("postgresql+nodriver://host/x", "nodriver"),
        ("ftp://host", "unsupported URI"),
        ("http://127.0.0.1:1", "failed with exception"),
    ],
)
def test_an_address_that_mlflow_cannot_use_is_one_message_soon(uri: str, reason: str, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    uri = uri.format(folder=tmp_path)
    began = time.monotonic()
    with pytest.raises(ValueError, match=rf"^logging\.mlflow\.uri={re.escape(uri)}: .*{reason}"):
        MlflowSink(uri, "mine", "first", {}, run_id=None)
    assert time.monotonic() - began < 90  # MLflow itself retries for 100 s or longer


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
    warnings: list[str] = []
    for first_step, name in ((0, "first-1a"), (0, "first-2b"), (2, "first-1a")):
        sink = BackgroundSink(TrackioSink(config, name, {"run": {"steps": 4}}), "logging.trackio", warnings.append)
        for step in (first_step, first_step + 1):
            sink.log(step, {"eval/test/avg@1": step / 4}, details if step == 3 else Details())
        sink.close(failed=True)
    assert warnings == []
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

    def init(*_: Any, **named: Any) -> Any:
        given.update(named)
        return SimpleNamespace(log=lambda *_, **__: None)

    monkeypatch.setattr(trackio, "init", init)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/space")  # Trackio would prefer it to an address
    TrackioSink(TrackioConfig(project="mine", server=server), "first-1a", {}).log(1, {})
    assert "TRACKIO_SPACE_ID" not in os.environ
    assert {name: given[name] for name in ("space_id", "server_url") if given[name]} == (
        {} if argument is None else {argument: server}
    )


@pytest.mark.slow
def test_a_trackio_run_that_cannot_start_is_a_warning_and_is_tried_again(
    trackio: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, starts = trackio.init, []

    def init(*arguments: Any, **named: Any) -> Any:
        starts.append(1)
        if len(starts) == 1:
            raise OSError("no space left")
        return start(*arguments, **named)

    monkeypatch.setattr(trackio, "init", init)
    warnings: list[str] = []
    late = TrackioSink(TrackioConfig(project="late"), "first-1a", {})
    sink = BackgroundSink(late, "logging.trackio", warnings.append)
    sink.log(1, {"reward/mean": 0.5})
    sink.close()
    assert [warning.split(" The ")[0] for warning in warnings] == ["logging.trackio: it takes no rows (no space left)."]
    assert [run.name for run in trackio.Api().runs("late")] == ["first-1a"]
