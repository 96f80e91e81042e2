"""Which engine a worker asks, and what it does when a request fails or is not wanted any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from rlhf.cluster.actors import LostError
from rlhf.cluster.engine_choice import EngineChoice
from rlhf.sampling.requests import SamplingSettings

IDS, SETTINGS = np.arange(3, dtype=np.int32), SamplingSettings(1.0, 8)


class Worker:
    """An `EngineChoice`, the open requests of each engine in order, and its reports."""

    def __init__(self, engines: int, *, number: int = 0, deadline_s: float = 60.0) -> None:
        self.requests: dict[int, list[asyncio.Future[str]]] = {engine: [] for engine in range(engines)}
        self.reports: list[tuple[int, int, str, bool]] = []
        self.choice = EngineChoice(number, deadline_s, lambda *report: self.reports.append(report))

    def update(self, number: int, *engines: int) -> None:
        self.choice.update(number, {engine: (self._actor(engine), {}) for engine in engines})

    def _actor(self, engine: int) -> Any:
        def remote(method: str, *_: Any) -> asyncio.Future[str]:
            assert method == "generate"
            self.requests[engine].append(asyncio.get_running_loop().create_future())
            return self.requests[engine][-1]

        return SimpleNamespace(call=SimpleNamespace(remote=remote))

    def ask(self, prefer: int | None = None) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.choice.generate(IDS, SETTINGS, what="p/1", prefer=prefer))

    async def asked(self, prefer: int | None = None) -> int:
        """The engine of a new request, which is not answered."""
        before = self.counts()
        self.ask(prefer)
        await asyncio.sleep(0)
        (engine,) = (engine for engine, count in enumerate(self.counts()) if count > before[engine])
        return engine

    def counts(self) -> list[int]:
        return [len(requests) for requests in self.requests.values()]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_goes_to_the_engine_with_the_fewest_and_ties_go_round_from_the_workers_number() -> None:
    async def scenario() -> None:
        for number, order in ((0, [0, 1, 2]), (1, [1, 2, 0]), (5, [2, 0, 1])):
            worker = Worker(3, number=number)
            worker.update(1, 0, 1, 2)
            assert [await worker.asked() for _ in range(6)] == order * 2
            worker.requests[1][0].set_result("answer")
            await settled()
            assert await worker.asked() == 1
        worker.update(2, 0, 2)  # with two of three engines, worker 5 begins with the second
        assert [await worker.asked() for _ in range(2)] == [2, 0]

    play(scenario)


def test_a_rollout_stays_with_its_engine_unless_that_has_far_more_requests() -> None:
    async def scenario() -> None:
        worker = Worker(2)
        worker.update(1, 0, 1)
        assert [await worker.asked(1) for _ in range(8 + 1)] == [1] * 9
        assert await worker.asked(1) == 0  # 9 requests, more than 2 * 0 + 8
        assert await worker.asked(1) == 1  # not more than 2 * 1 + 8
        worker.update(2, 0)
        assert await worker.asked(1) == 0

    play(scenario)


def test_a_failed_request_is_reported_with_its_list_and_made_again_with_a_newer_one() -> None:
    async def scenario() -> None:
        worker = Worker(2)
        worker.update(4, 0, 1)
        request = worker.ask()
        await asyncio.sleep(0)
        worker.update(3, 1)  # an older list that arrives late
        worker.requests[0][0].set_exception(ray.exceptions.RayActorError())
        await settled()
        ((engine, number, error, silent),) = worker.reports
        assert (engine, number, silent) == (0, 4, False)
        assert error.startswith("engine 0, sampling p/1 failed: ")
        worker.update(4, 1)  # not newer
        await settled()
        assert worker.counts() == [1, 0]
        worker.update(5)  # fewer than cluster.min_engines are ready
        await settled()
        assert worker.counts() == [1, 0]
        worker.update(6, 1)
        await settled()
        assert worker.counts() == [1, 1]
        worker.requests[1][0].set_result("answer")
        assert await request == "answer"

    play(scenario)


def test_a_newer_list_that_came_before_the_failure_is_used_at_once() -> None:
    async def scenario() -> None:
        worker = Worker(2)
        worker.update(1, 0)
        worker.ask()
        await asyncio.sleep(0)
        worker.update(2, 1)
        worker.requests[0][0].set_exception(ray.exceptions.RayActorError())
        await settled()
        assert [report[:2] for report in worker.reports] == [(0, 1)]
        assert worker.counts() == [1, 1]

    play(scenario)


def test_an_engine_without_an_answer_until_the_deadline_is_reported_as_silent() -> None:
    async def scenario() -> None:
        worker = Worker(1, deadline_s=0.01)
        worker.update(1, 0)
        worker.ask()
        while not worker.reports:
            await asyncio.sleep(0.01)
        assert worker.reports == [(0, 1, "engine 0, sampling p/1: no answer within 0 s.", True)]

    play(scenario)


def test_requests_fail_when_engines_cannot_be_replaced_and_a_users_error_is_raised_as_it_is() -> None:
    async def scenario() -> None:
        worker = Worker(1)
        worker.update(1, 0)
        wrong, failed = worker.ask(), worker.ask()
        await asyncio.sleep(0)
        worker.requests[0][0].set_exception(ValueError("rollout.stop: ..."))
        with pytest.raises(ValueError, match=r"^rollout\.stop: \.\.\.$"):
            await wrong
        assert worker.reports == []
        worker.requests[0][1].set_exception(ray.exceptions.RayActorError())
        await settled()
        worker.choice.update(2, {}, "engine 0 is lost")
        for request in (failed, worker.ask()):
            with pytest.raises(LostError, match=r"^engine 0 is lost$"):
                await request

    play(scenario)


def test_a_cancelled_request_is_cancelled_at_its_engine_and_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)

    async def scenario() -> None:
        worker = Worker(2)
        worker.update(1, 0, 1)
        request = worker.ask()
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert cancelled == worker.requests[0]
        assert worker.reports == []
        assert await worker.asked() == 0

    play(scenario)
