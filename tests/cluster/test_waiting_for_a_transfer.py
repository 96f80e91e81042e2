"""A transfer of weights whose receiver dies: the wait ends, and nothing goes on waiting behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf.cluster import engine_recovery
from rlhf.cluster.actors import ActorGroup, ClusterError, LostError, record_call
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.engines import Engines
from rlhf.config.roles import ENGINE, LEARNER
from rlhf.log.clock import EngineWork


class DeadEngine(ActorGroup):
    """An engine that does not answer."""

    def __init__(self) -> None:
        super().__init__("engine", [], deadline_s=1.0)

    async def call(self, ask: Callable[[Any], Any], *, deadline_s: float | None = None) -> list[Any]:
        raise ClusterError("engine 0 is lost")


def test_a_transfer_to_a_dead_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_recovery, "HEALTH_PERIOD_S", 0.01)
    given_up = []

    async def send_forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(True)
            raise

    async def transfer() -> list[bool]:
        with pytest.raises(ClusterError, match="engine 0 is lost"):
            await engine_recovery.while_healthy(DeadEngine(), send_forever())
        await asyncio.sleep(0)  # the sender hears of it
        return list(given_up)

    assert asyncio.run(transfer()) == [True]


class FakeEngines(ActorGroup):
    """Engines that answer every call."""

    def __init__(self) -> None:
        super().__init__("engine", ["engine 0", "engine 1"], deadline_s=1.0)
        self.calls: list[str] = []

    async def call(self, ask: Callable[[Any], Any], *, deadline_s: float | None = None) -> list[Any]:
        self.calls.append(record_call(ask)[0])
        return []

    async def call_one(self, rank: int, ask: Callable[[Any], Any], **_: Any) -> Any:
        return await self.call(ask)


def test_a_transfer_ends_when_another_task_replaces_an_engine_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_recovery, "HEALTH_PERIOD_S", 0.01)

    async def transfer() -> None:
        engines = FakeEngines()
        asyncio.get_running_loop().call_later(0.05, engines.absent.add, 1)
        with pytest.raises(LostError, match=r"\bengine\b.*\blost\b"):
            await engine_recovery.while_healthy(engines, asyncio.Event().wait())

    asyncio.run(transfer())


def test_the_error_of_a_learner_is_that_of_an_engine_that_another_task_replaces() -> None:
    async def transfer() -> None:
        engines = FakeEngines()

        async def fail() -> None:
            engines.absent.add(1)
            raise LostError("learner.send_weights failed: the actor died")

        with pytest.raises(LostError, match=r"\bengine\b.*\blost\b"):
            await engine_recovery.while_healthy(engines, fail())

    asyncio.run(transfer())


def started(group: Any, learners: Any = None) -> Engines:
    class Started(Cluster):
        def __init__(self) -> None:
            self.shares_gpus, self.trains, self.first_step = False, True, 0

        def group(self, role: str) -> Any:
            return {LEARNER: learners, ENGINE: group}[role]

    cluster = SimpleNamespace(min_engines=1, step_deadline_s=1.0)
    config: Any = SimpleNamespace(cluster=cluster, run=SimpleNamespace(max_restarts=0), request_deadline_s=1.0)
    return Engines(Started(), config)


def test_the_work_of_several_engines_without_a_lost_one() -> None:
    async def work(*done: EngineWork | None) -> tuple[float, ...]:
        class Measured(FakeEngines):
            async def call_one(self, rank: int, ask: Callable[[Any], Any], **_: Any) -> Any:
                assert record_call(ask) == ("take_work",)
                if (own := done[rank]) is None:
                    raise LostError("engine 1 is lost")
                return own

        group = Measured()
        group.actors = group.actors[: len(done)]
        metrics, busy_s = await started(group).take_work()
        return busy_s, *metrics.values()

    # tokens over the seconds of the busiest engine; the fullest cache; waiting passes over all passes
    one, other, idle = EngineWork(30, 1.5, 0.3, 10, 1), EngineWork(60, 2.0, 0.9, 30, 9), EngineWork(0, 0.0, 0.0, 0, 0)
    assert asyncio.run(work(one)) == (1.5, 20.0, 0.3, 0.1)
    assert asyncio.run(work(one, other)) == (2.0, 45.0, 0.9, 0.25)
    assert asyncio.run(work(one, None)) == (1.5, 20.0, 0.3, 0.1)
    assert asyncio.run(work(idle, None)) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("layer.weight: vLLM loaded 0 of 5"), ClusterError),  # no LostError, after which a run starts again
        (LostError("learner 0 is lost"), LostError),
    ],
)
def test_after_a_failed_transfer_no_engine_goes_on_sampling(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recovery, "ENGINE_DEATH_NOTICE_S", 0)
    group = FakeEngines()

    class Learners:
        async def call(self, ask: Callable[[Any], Any]) -> None:
            group.calls.append(record_call(ask)[0])
            raise error

    async def transfer() -> None:
        engines = started(group, Learners())
        engines._connected = group.present
        await engines.send_weights(5)

    with pytest.raises(kind, match=str(error)) as raised:
        asyncio.run(transfer())
    assert raised.type is kind
    assert group.calls == ["pause", "pause", "send_weights"]
