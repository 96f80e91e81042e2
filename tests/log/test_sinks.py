"""TensorBoard and MLflow: what a run logs, read back by their own libraries."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from rlhf.log.sinks import MlflowSink, TensorBoardSink


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
