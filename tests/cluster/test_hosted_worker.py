"""A rollout worker in an actor: its orders and answers, without Ray, engines and processes."""

from __future__ import annotations

import asyncio
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_dispatch import PURPOSE, prompt
from worlds import make_config

from rlhf.cluster import hosted_worker
from rlhf.cluster.dispatch import Answer, Order, Printed
from rlhf.cluster.hosted_worker import HostedWorker
from rlhf.cluster.worker_actors import WorkerParts
from rlhf.types import Prompt, RolloutGroup

WARNING = Printed("warning: this kernel is old")


class Player:
    """Plays the prompts that it is told to; others go on until they are cancelled."""

    reward_model = None

    def __init__(self, *_: Any) -> None:
        self.begun = list[str]()

    async def rollout_group(self, asked: Prompt, _: Any) -> RolloutGroup:
        self.begun.append(asked.id)
        match asked.id:
            case "cancelled inside":
                raise asyncio.CancelledError
            case "endless":
                await asyncio.sleep(1000)
        return RolloutGroup(asked, ())


def play(monkeypatch: pytest.MonkeyPatch, folder: Path, *exchanges: list[Order]) -> tuple[Player, list[Any]]:
    """Start a worker and send it orders. Returns what plays its groups, and all news."""
    player, start = Player(), os.getcwd()
    scorer = SimpleNamespace(sources={}, warnings=("this kernel is old",))
    monkeypatch.setattr(hosted_worker, "_import_without_torch", lambda: None)
    monkeypatch.setattr(hosted_worker, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(hosted_worker, "Scorer", lambda *_, **__: nullcontext(scorer))
    monkeypatch.setattr(hosted_worker, "RolloutWorker", lambda *_: player)
    monkeypatch.setattr(hosted_worker, "NEWS_S", 0.01)
    parts = WorkerParts(0, 1, 1, str(folder), {"reward": {}}, (1, {}, None), None, None, None)

    async def scenario() -> list[Any]:
        worker, news = HostedWorker(make_config(folder / "model"), parts), list[Any]()
        assert os.getcwd() == str(folder)
        for orders in (*exchanges, []):
            news += pickle.loads(await worker.exchange(pickle.dumps(orders)))
        await worker.close()
        return news

    try:
        return player, asyncio.run(asyncio.wait_for(scenario(), 60))
    finally:
        os.chdir(start)


def begin(ticket: int, name: str) -> Order:
    return ticket, prompt(name), PURPOSE


def test_a_group_that_ends_by_a_cancellation_that_nobody_ordered_has_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, (warning, (ticket, error)) = play(monkeypatch, tmp_path, [begin(1, "cancelled inside")])
    assert (warning, ticket) == (WARNING, 1)
    assert str(error) == "the sampling of prompt cancelled inside was cancelled."


def test_a_cancelled_group_has_no_answer_and_does_not_begin_if_its_cancellation_came_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    orders: list[list[Order]] = [[2, begin(1, "endless")], [begin(2, "late"), 1, begin(3, "p")]]
    player, news = play(monkeypatch, tmp_path, *orders)
    assert player.begun == ["endless", "p"]
    assert [answer.ticket for answer in news if isinstance(answer, Answer)] == [3]
