"""SIGTERM and SIGINT: what the first and the second one do to a run, without the stack."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rlhf.config import cli
from rlhf.run.stop import Stop


async def a_run(
    stop: Stop, log: list[str], *, at_boundary: Callable[[], None] = lambda: None, save_s: float = 0.0
) -> None:
    """A step that cannot be interrupted, in which the first signal comes, and then a wait that can."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        at_boundary()
        log.append("step")
        assert await stop.unless_requested(asyncio.Event().wait()) is None
        with stop.saving():
            await asyncio.sleep(save_s)
            log.append("saved")
    finally:
        log.append("cleaned up")


def status_of(stop: Stop, log: list[str], **options: Any) -> int:
    run = a_run(stop, log, **options)
    return cli.run_program(lambda: cli.run_async(run, on_signal=stop.on_signal))


def ready(grace_s: float, said: list[str]) -> Stop:
    stop = Stop(grace_s, said.append)
    stop.can_save = True
    return stop


def test_the_first_signal_lets_the_step_end_and_save_even_if_the_save_outlasts_the_grace() -> None:
    log: list[str] = []
    said: list[str] = []
    assert status_of(ready(3.0, said), log, save_s=3.2) == 0
    assert log == ["step", "saved", "cleaned up"]
    assert [text.split(":")[0] for text in said] == ["SIGTERM"]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, cli.TERMINATED), (signal.SIGINT, cli.TERMINATED)], ids=["TERM", "INT"]
)
def test_a_second_signal_ends_the_run_at_once_with_the_status_of_the_first(
    number: signal.Signals, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "SAME_SIGNAL_S", 0.0)
    log: list[str] = []
    stop = ready(60, [])
    assert status_of(stop, log, at_boundary=lambda: os.kill(os.getpid(), number)) == status
    assert log == ["step", "cleaned up"]


def test_when_no_boundary_is_reached_within_the_grace_the_run_ends_without_saving() -> None:
    log: list[str] = []
    said: list[str] = []
    assert status_of(ready(0.01, said), log) == cli.TERMINATED
    assert log == ["cleaned up"]
    assert "ends without saving" in said[-1]


def test_in_start_up_there_is_nothing_to_save_and_the_first_signal_ends_the_run() -> None:
    log: list[str] = []
    assert status_of(Stop(60, lambda _: None), log) == cli.TERMINATED
    assert log == ["cleaned up"]
