"""Groups and the workers that have them: who gets a group, what a lost worker costs, which answers count. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from rlhf.cluster import dispatch
from rlhf.cluster.dispatch import Answer, Dispatcher, FailedRequest, LostWorker, News, Order, Printed
from rlhf.environments import turns
from rlhf.rollout.purpose import Purpose
from rlhf.sampling.requests import SamplingSettings
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

PURPOSE = Purpose("training", 2, SamplingSettings(1.0, 8))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_S", 0)


def prompt(name: str) -> Prompt:
    return Prompt(name, 0, np.arange(3, dtype=np.int32), (), "", "")


class Worker:
    """What an actor does with its orders; it answers when it is told to, and dies when it is told to.

    Attributes:
        open: ticket -> id of the prompt, in the order of arrival.
        calls: how often the driver called it.
    """

    def __init__(self) -> None:
        self.open, self.cancelled, self.calls = dict[int, str](), list[str](), 0
        self._news: asyncio.Queue[list[News] | Exception] = asyncio.Queue()

    async def exchange(self, orders: Sequence[Order]) -> Sequence[News]:
        self.send(orders)
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def send(self, orders: Sequence[Order]) -> None:
        self.calls += 1
        for order in orders:
            if isinstance(order, int):
                self.cancelled.append(self.open.pop(order))
            else:
                self.open[order[0]] = order[1].id

    def tell(self, *news: News) -> None:
        self._news.put_nowait(list(news))

    def answer(self, *names: str, error: Exception | None = None) -> None:
        tickets = [next(ticket for ticket, name in self.open.items() if name == wanted) for wanted in names]
        groups = {ticket: RolloutGroup(prompt(self.open.pop(ticket)), ()) for ticket in tickets}
        self.tell(*(Answer(ticket, error or group) for ticket, group in groups.items()))

    def die(self) -> None:
        self._news.put_nowait(ConnectionError("the actor died"))


class Driver:
    """A dispatcher with workers, and groups by the name of their prompt."""

    def __init__(self, *workers: Worker) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.dispatcher = Dispatcher(lambda name, news: self.heard.append((name, news)))
        self.served = [self.serve(worker) for worker in workers]

    def serve(self, worker: Worker) -> asyncio.Task[LostWorker]:
        return asyncio.ensure_future(self.dispatcher.serve("b", worker.exchange, worker.send))

    async def begin(self, *names: str) -> list[asyncio.Task[RolloutGroup]]:
        tasks = []
        for name in names:
            tasks.append(asyncio.ensure_future(self.dispatcher.rollout_group(prompt(name), PURPOSE)))
            await settled()
        return tasks


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def names(worker: Worker) -> list[str]:
    return list(worker.open.values())


def test_a_group_goes_to_the_worker_with_the_fewest_open_ones() -> None:
    async def run() -> None:
        a, b = Worker(), Worker()
        driver = Driver(a, b)
        await settled()
        groups = await driver.begin("1", "2", "3", "4")
        assert (names(a), names(b)) == (["1", "3"], ["2", "4"])
        a.answer("1", "3")
        assert [(await groups[i]).prompt.id for i in (0, 2)] == ["1", "3"]
        await driver.begin("5", "6", "7")
        assert (names(a), names(b)) == (["5", "6", "7"], ["2", "4"])

    asyncio.run(run())


def test_groups_wait_while_there_is_no_worker() -> None:
    async def run() -> None:
        driver, worker = Driver(), Worker()
        (group,) = await driver.begin("1")
        driver.serve(worker)
        await settled()
        worker.answer("1")
        assert (await group).prompt.id == "1"

    asyncio.run(run())


def test_the_groups_of_a_lost_worker_begin_anew_with_the_same_prompt_ticket_and_purpose() -> None:
    async def run() -> None:
        a, b = Worker(), Worker()
        driver = Driver(a, b)
        await settled()
        groups = await driver.begin("1", "2", "3")
        first = dict(a.open)
        a.die()
        lost = await driver.served[0]
        assert (str(lost.error), lost.groups) == ("the actor died", 2)
        await settled()
        assert b.open.items() >= first.items()
        b.answer("1", "2", "3")
        assert [(await group).prompt.id for group in groups] == ["1", "2", "3"]

    asyncio.run(run())


def test_the_groups_of_the_only_worker_wait_until_it_has_started_again() -> None:
    async def run() -> None:
        first, second = Worker(), Worker()
        driver = Driver(first)
        await settled()
        (group,) = await driver.begin("1")
        first.die()
        await driver.served[0]
        assert not group.done()
        driver.serve(second)
        await settled()
        second.answer("1")
        assert (await group).prompt.id == "1"

    asyncio.run(run())


def test_an_answer_of_a_worker_that_no_longer_has_the_group_is_dropped() -> None:
    """A worker that was slow, not dead, gives its answer when another one has the group."""

    async def run() -> None:
        a, b = Worker(), Worker()
        driver = Driver(a, b)
        await settled()
        (group,) = await driver.begin("1")
        (ticket,) = a.open
        b.tell(Answer(ticket, RolloutGroup(prompt("another"), ())))
        await settled()
        assert not group.done()
        a.answer("1")
        assert (await group).prompt.id == "1"

    asyncio.run(run())


def test_a_cancelled_group_is_cancelled_in_its_worker_and_its_answer_is_dropped() -> None:
    async def run() -> None:
        worker = Worker()
        driver = Driver(worker)
        await settled()
        cancelled, other = await driver.begin("1", "2")
        (ticket, _) = worker.open
        cancelled.cancel()
        await settled()
        assert worker.cancelled == ["1"]
        worker.tell(Answer(ticket, RolloutGroup(prompt("1"), ())))  # it was on its way
        worker.answer("2")
        assert (await other).prompt.id == "2"
        worker.die()
        assert (await driver.served[0]).groups == 0

    asyncio.run(run())


@pytest.mark.parametrize("error", [RuntimeError("over the budget"), ValueError("no such row")])
def test_the_error_of_a_group_is_raised_to_its_caller_and_loses_no_worker(error: Exception) -> None:
    async def run() -> None:
        worker = Worker()
        driver = Driver(worker)
        await settled()
        failed, other = await driver.begin("1", "2")
        worker.answer("1", error=error)
        with pytest.raises(type(error), match=f"^{error}$"):
            await failed
        worker.answer("2")
        await other
        assert not driver.served[0].done()

    asyncio.run(run())


def test_a_worker_whose_groups_fail_at_once_does_not_get_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = turns.failed_rollout(prompt("2"), 0, turns.FailedError("open: no place"))
    failed_group = RolloutGroup(prompt("2"), (ScoredRollout(lost, "", "", None, {}, turns.FAILED),))

    async def run() -> None:
        later: list[tuple[float, Callable[[], None]]] = []
        loop: Any = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "call_later", lambda delay, *call: later.append((delay, partial(*call))))
        a, b = Worker(), Worker()
        driver = Driver(a, b)
        await settled()
        (failed,) = await driver.begin("1")
        a.answer("1", error=RuntimeError("it failed"))
        with pytest.raises(RuntimeError):
            await failed
        await driver.begin("2", "3")
        assert (names(a), names(b)) == (["3"], ["2"])
        (ticket,) = b.open
        b.open.clear()
        b.tell(Answer(ticket, failed_group))
        await settled()
        await driver.begin("4", "5", "6")
        assert (names(a), names(b)) == (["3", "5"], ["4", "6"])
        for delay, count_no_more in later:
            assert delay == dispatch.FAILED_COUNTS_S
            count_no_more()
        await driver.begin("7", "8")
        assert (len(a.open), len(b.open)) == (3, 3)

    asyncio.run(run())


def test_other_news_are_heard_with_the_name_of_the_worker() -> None:
    async def run() -> None:
        worker = Worker()
        driver = Driver(worker)
        await settled()
        worker.tell(Printed("a line"), FailedRequest(1, 3, "it died", False))
        await settled()
        assert driver.heard == [("b", Printed("a line")), ("b", FailedRequest(1, 3, "it died", False))]

    asyncio.run(run())


def test_groups_that_follow_finished_ones_need_no_calls_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PAUSE_S", 0.3)

    async def run() -> None:
        worker = Worker()
        driver = Driver(worker)
        await settled()
        for _ in range(2):
            groups = [asyncio.ensure_future(driver.dispatcher.rollout_group(prompt(str(i)), PURPOSE)) for i in range(9)]
            while len(worker.open) < 9:
                await asyncio.sleep(0)
            worker.answer(*map(str, range(9)))
            await asyncio.gather(*groups)
        # the first exchange; the first groups, while it waits; the second exchange, with the groups that followed
        assert worker.calls == 3

    asyncio.run(run())
