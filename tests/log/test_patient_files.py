"""A full disk and the files of a log: nothing is lost, nothing is half written, and one message says what is needed."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import JsonlSink


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A context in which this process cannot make a file longer: a write then stops in the middle."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def steps(file: Path) -> list[int]:
    return [json.loads(line)["step"] for line in file.read_text().splitlines()]


def test_rows_wait_for_room_and_are_written_in_order(tmp_path: Path) -> None:
    warnings: list[str] = []
    files = PatientFiles(warnings.append)
    metrics, rollouts = tmp_path / "metrics.jsonl", tmp_path / "step-000002.jsonl"
    sink = JsonlSink(metrics, files)
    sink.log(1, {"reward/mean": 0.5})
    size = metrics.stat().st_size
    with files_of_at_most(size + 20):
        sink.log(2, {"reward/mean": 0.5})
        files.replace(rollouts, "x" * 1000)
        sink.log(3, {"reward/mean": 0.5})
        assert metrics.stat().st_size == size  # not half a line
        with pytest.raises(OSError, match=rf"^{metrics}: .*File too large.*[\d,]+ bytes"):
            files.check()
    assert len(warnings) == 1
    assert warnings[0].endswith("make room.")
    sink.log(4, {"reward/mean": 0.5})
    assert steps(metrics) == [1, 2, 3, 4]
    assert rollouts.read_text() == "x" * 1000
    assert len(warnings) == 2
    assert "written again" in warnings[1]
    files.check()


def test_a_file_that_cannot_be_written_whole_does_not_get_its_name(tmp_path: Path) -> None:
    files = PatientFiles(lambda _: None)
    with files_of_at_most(100):
        files.replace(tmp_path / "step-000001.jsonl", "x" * 1000)
    assert not (tmp_path / "step-000001.jsonl").exists()


def test_a_log_that_needs_more_memory_than_it_may_take_ends_the_run_with_one_message(tmp_path: Path) -> None:
    files = PatientFiles(lambda _: None, max_waiting_bytes=1500)
    with files_of_at_most(10):
        files.append(tmp_path / "a", "x" * 1000)
        with pytest.raises(OSError, match=r"a: .*File too large.*\b2,000 bytes .*--resume\.$"):
            files.append(tmp_path / "a", "x" * 1000)
