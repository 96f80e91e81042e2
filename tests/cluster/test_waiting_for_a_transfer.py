"""A transfer of weights whose receiver dies: the wait ends, and nothing goes on waiting behind it."""

from __future__ import annotations

import asyncio

import pytest

from rlhf.cluster import cluster
from rlhf.cluster.actors import ClusterError
from rlhf.cluster.cluster import Cluster


class DeadEngine(Cluster):
    """A cluster without actors, whose engine does not answer."""

    def __init__(self) -> None:
        pass

    async def _check_engines(self) -> None:
        raise ClusterError("engine 0 is lost")


def test_a_transfer_to_a_dead_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "HEALTH_PERIOD_S", 0.01)
    given_up = []

    async def send_forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(True)
            raise

    async def transfer() -> list[bool]:
        with pytest.raises(ClusterError, match="engine 0 is lost"):
            await DeadEngine()._while_engines_live(send_forever())
        await asyncio.sleep(0)  # the sender hears of it
        return list(given_up)

    assert asyncio.run(transfer()) == [True]
