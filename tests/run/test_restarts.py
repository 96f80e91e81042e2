"""A run that goes on after a process has died: how often, and from where. The stack is in tests/faults."""

from __future__ import annotations

import asyncio
import weakref
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cluster.actors import ClusterError, LostError
from rlhf.run import restarts
from rlhf.run.restarts import train_with_restarts


def config_of(*, max_restarts: int) -> Any:
    run = SimpleNamespace(dir="run", max_restarts=max_restarts)
    return SimpleNamespace(run=run, cluster=SimpleNamespace(ray_address=None))


def play(
    monkeypatch: pytest.MonkeyPatch,
    script: Sequence[tuple[int, Exception | None]],
    *,
    allowed: int = 2,
    started: bool = True,
    stopping: bool = False,
    start_at: str | None = None,
) -> list[bool | str]:
    """Train by a script (newest checkpoint when a run ends, and how it ends); from what each run resumed."""
    remaining = iter(script)
    made: list[bool | str] = []

    def make(config: Any, *, resume: bool, start_at: str | None = None, restarted: bool) -> Any:
        assert restarted == bool(made)
        made.append(start_at or resume)
        return SimpleNamespace(
            config=config,
            stop=SimpleNamespace(can_save=started or len(made) > 1, requested=stopping, on_signal=None),
            log=SimpleNamespace(warn=lambda text: None),
            folder=SimpleNamespace(unlock=lambda: None, saved_step=0),
        )

    async def train(run: Any) -> None:
        run.folder.saved_step, failure = next(remaining)
        if failure is not None:
            raise failure

    monkeypatch.setattr(restarts, "Run", make)
    config: Any = config_of(max_restarts=allowed)
    train_with_restarts(config, Namespace(resume=False, resume_from=start_at), train)
    return made


def test_the_lost_run_has_left_memory_before_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        def __init__(self, config: Any, **how: Any) -> None:
            assert [run() for run in made] == [None] * len(made)
            made.append(weakref.ref(self))
            self.itself, self.config = self, config
            self.stop = SimpleNamespace(can_save=True, requested=False, on_signal=None)
            self.log = SimpleNamespace(warn=lambda text: None)
            self.folder = SimpleNamespace(unlock=lambda: None, saved_step=len(made))

    async def train(run: Any) -> None:
        await asyncio.sleep(0)  # the event loop holds the result of its last call until the next
        if run.folder.saved_step < 3:
            raise LostError(f"engine 0 of {run} is lost")

    made: list[weakref.ref[Run]] = []
    monkeypatch.setattr(restarts, "Run", Run)
    config: Any = config_of(max_restarts=2)
    train_with_restarts(config, Namespace(resume=False, resume_from=None), train)
    assert len(made) == 3


LOST = LostError("engine 0 is lost")


@pytest.mark.slow
def test_a_lost_process_is_followed_by_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(monkeypatch, [(2, LOST), (4, None)]) == [False, True]
    assert play(monkeypatch, [(2, LOST), (4, None)], start_at="best") == ["best", True]  # then from the newest


@pytest.mark.slow
def test_only_restarts_without_a_new_checkpoint_use_up_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(play(monkeypatch, [(2, LOST), (2, LOST), (4, LOST), (4, LOST), (5, None)])) == 5
    with pytest.raises(LostError):
        play(monkeypatch, [(2, LOST), (2, LOST), (2, LOST), (2, None)])


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ([(0, LOST), (0, None)], {}),
        ([(2, LOST), (2, None)], {"allowed": 0}),
        ([(2, LOST), (2, None)], {"started": False}),
        ([(2, LOST), (2, None)], {"stopping": True}),
        ([(2, ClusterError("canary: engine 0 does not hold the weights")), (2, None)], {}),
    ],
    ids=["no checkpoint", "not allowed", "the start failed", "a signal came", "wrong weights"],
)
def test_these_failures_end_the_run(
    monkeypatch: pytest.MonkeyPatch, script: list[Any], options: dict[str, Any]
) -> None:
    with pytest.raises(ClusterError):
        play(monkeypatch, script, **options)
