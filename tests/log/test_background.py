"""A sink behind a server that fails, hangs or comes back: the run does not wait, and rows arrive in order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S, eventually

from rlhf.log import sinks
from rlhf.log.sinks import NO_DETAILS, BackgroundSink, Details, MlflowSink


class Server:
    """Takes rows as the test says: `refuses` answers this often with an error, `hangs` not at all."""

    def __init__(self, *, refuses: int = 0, every_second: bool = False, hangs: bool = False) -> None:
        self.refuses, self.every_second, self.hangs = refuses, every_second, hangs
        self.steps: list[int] = []
        self.closed: bool | None = None
        self.requests = 0

    def log(self, step: int, values: Mapping[str, Any], details: Details = NO_DETAILS) -> None:
        self.requests += 1
        if self.hangs:
            time.sleep(WAIT_S)
        if self.requests <= self.refuses or (self.every_second and self.requests % 2):
            raise ConnectionError("refused")
        self.steps.append(step)

    def close(self, *, failed: bool = False) -> None:
        self.closed = failed


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(sinks, "CLOSE_S", WAIT_S)


@pytest.mark.parametrize("server", [Server(), Server(refuses=3), Server(every_second=True)])
def test_every_row_arrives_in_order(server: Server) -> None:
    warnings: list[str] = []
    sink = BackgroundSink(server, "logging.mlflow", warnings.append)
    for step in range(5):
        sink.log(step, {})
    sink.close(failed=True)
    assert server.steps == [0, 1, 2, 3, 4]
    assert server.closed is True
    if server.refuses:
        assert [warning.split(" The ")[0] for warning in warnings] == ["logging.mlflow: it takes no rows (refused)."]


def test_a_server_that_never_answers_costs_the_run_nothing_but_a_count_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_S", 0.05)
    warnings: list[str] = []
    sink = BackgroundSink(server := Server(hangs=True), "logging.mlflow", warnings.append)
    began = time.monotonic()
    for step in range(3):
        sink.log(step, {})
    assert time.monotonic() - began < WAIT_S / 2
    assert eventually(lambda: server.requests == 1)
    sink.close()
    assert warnings == ["logging.mlflow: 3 rows were not sent; metrics.jsonl has them."]


def test_an_mlflow_server_that_is_not_reached_at_the_start_is_one_message(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(ValueError, match=r"^logging\.mlflow\.uri=http://127\.0\.0\.1:9: "):
        MlflowSink("http://127.0.0.1:9", "mine", "first", {}, run_id=None)
