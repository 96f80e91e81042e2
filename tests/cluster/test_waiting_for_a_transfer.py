"""A transfer of weights whose receiver dies: the wait ends, and nothing goes on waiting behind it."""

from __future__ import annotations

import asyncio

import pytest

from rlhf.cluster import replacement
from rlhf.cluster.actors import ActorGroup, ClusterError


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
