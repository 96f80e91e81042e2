"""A transfer of weights whose receiver dies: the wait ends, and nothing goes on waiting behind it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlhf.cluster import replacement
from rlhf.cluster.actors import ActorGroup, ClusterError, LostError
from rlhf.cluster.cluster import Cluster
from rlhf.config.roles import ENGINE, LEARNER


class DeadEngine(ActorGroup):
    """An engine that does not answer."""

    def __init__(self) -> None:
        super().__init__("engine", [], deadline_s=1.0)

    async def call(self, method: str, *arguments: object, deadline_s: float | None = None) -> list[object]:
        raise ClusterError("engine 0 is lost")


def test_a_transfer_to_a_dead_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "HEALTH_PERIOD_S", 0.01)
    given_up = []

    async def send_forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(True)
            raise

    async def transfer() -> list[bool]:
        with pytest.raises(ClusterError, match="engine 0 is lost"):
            await replacement.while_healthy(DeadEngine(), send_forever())
        await asyncio.sleep(0)  # the sender hears of it
        return list(given_up)

    assert asyncio.run(transfer()) == [True]


class Engines(ActorGroup):
    """Engines that answer every call."""

    def __init__(self) -> None:
        super().__init__("engine", ["engine 0", "engine 1"], deadline_s=1.0)
        self.calls: list[str] = []

    async def call(self, method: str, *arguments: object, deadline_s: float | None = None) -> list[object]:
        self.calls.append(method)
        return []

    async def call_one(self, rank: int, method: str, *arguments: object, what: str) -> object:
        return await self.call(method)


def test_a_transfer_ends_when_another_task_replaces_an_engine_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "HEALTH_PERIOD_S", 0.01)

    async def transfer() -> None:
        engines = Engines()
        asyncio.get_running_loop().call_later(0.05, engines.absent.add, 1)
        with pytest.raises(LostError, match="an engine was lost"):
            await replacement.while_healthy(engines, asyncio.Event().wait())

    asyncio.run(transfer())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("layer.weight arrived, and"), ClusterError),  # no LostError, after which a run starts again
        (LostError("learner 0 is lost"), LostError),
    ],
)
def test_after_a_failed_transfer_no_engine_goes_on_sampling(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "ENGINE_DEATH_NOTICE_S", 0)
    engines = Engines()

    class Learners:
        async def call(self, method: str, *arguments: Any) -> None:
            engines.calls.append(method)
            raise error

    class Connected(Cluster):
        def __init__(self) -> None:
            self._shares_gpus = self._asleep = False
            self._replacements, self._transfer_lock, self._connected = None, asyncio.Lock(), engines.present

        def group(self, role: str) -> Any:
            return {LEARNER: Learners(), ENGINE: engines}[role]

    with pytest.raises(kind, match=str(error)) as raised:
        asyncio.run(Connected().send_weights(5))
    assert raised.type is kind
    assert engines.calls == ["pause", "pause", "send_weights"]
