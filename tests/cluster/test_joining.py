"""A new engine that has started joins between updates, and is compared with the weights that it was sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from fake_canary import PROMPTS

from rlhf.cluster.actors import ActorGroup, LostError, record_call
from rlhf.cluster.canary import Canary
from rlhf.cluster.engine_choice import ListedEngines
from rlhf.cluster.engines import Engines


class Learners:
    """Learners of one weight; a transfer gives its value to the engines that are present."""

    def __init__(self, group: EngineGroup) -> None:
        self.group, self.weight = group, 0.0

    async def locate(self, **_: Any) -> list[Any]:
        return [SimpleNamespace(host="here", port=1, node="here")]

    async def call(self, ask: Callable[[Any], Any], **_: Any) -> Any:
        await asyncio.sleep(0)
        if record_call(ask)[0] == "send_weights":
            self.group.weights |= dict.fromkeys(self.group.present, self.weight)
            return [None]
        return [[np.full(3, self.weight)]]  # the canary's log-probs

    async def update(self, _: Any) -> None:
        await asyncio.sleep(0)
        self.weight = 1.0


class EngineGroup:
    """Engines, without actors."""

    name = "engine"

    def __init__(self, count: int) -> None:
        self.actors = [f"engine {rank}" for rank in range(count)]
        self.absent = set[int]()
        self.weights = dict.fromkeys(self.actors, 0.0) | {"new": -1.0}
        self.locations = [SimpleNamespace(node="here")] * count
        self.homes = {actor: actor for actor in self.actors}

    @property
    def present(self) -> list[str]:
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    def replace(self, rank: int, new: Any) -> None:
        self.actors[rank] = new
        self.absent.discard(rank)

    async def call(self, _: Callable[[Any], Any], **__: Any) -> Any:
        asked = self.present
        for _turn in range(3):  # slower than the learner
            await asyncio.sleep(0)
        return [[np.full(3, self.weights[actor])] for actor in asked]

    async def call_one(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0)


async def publish_while_one_starts(engines_in_all: int, after: int) -> None:
    group = EngineGroup(engines_in_all)
    learners = Learners(group)
    joined = asyncio.get_running_loop().create_future()

    async def start_another(*_: Any, **__: Any) -> Any:
        for _turn in range(after):
            await asyncio.sleep(0)
        return "new"

    def update(_number: int, listed: ListedEngines, _failure: str | None = None) -> None:
        if "new" in (actor for actor, _ in listed.values()):
            joined.set_result(None)

    sections = SimpleNamespace(device="cpu", placement="separate", min_engines=1, tensor_parallel=1)
    config: Any = SimpleNamespace(
        cluster=SimpleNamespace(**vars(sections), start_deadline_s=1.0, step_deadline_s=1.0),
        run=SimpleNamespace(max_restarts=1),
        model=SimpleNamespace(lora=None),
        request_deadline_s=1.0,
    )
    cluster: Any = SimpleNamespace(
        group=lambda _: group, learners=learners, first_step=0, shares_gpus=False, trains=True,
        end_with=joined.set_exception, background=asyncio.ensure_future, start_another=start_another,
    )  # fmt: skip
    async with Engines(cluster, config) as engines:
        canary = Canary(engines, PROMPTS, dtype="float32", max_tokens=8)
        canary.sequences = [np.zeros(3, np.int32)]
        engines.replace_lost(canary.check)
        engines.recovery.subscribe(cast(Any, SimpleNamespace(update=update)))
        assert engines.recovery.recover(engines_in_all - 1, LostError("it died."))
        await engines.update_learners(cast(Any, None))
        assert (await engines.publish(1, canary.check))["sync/canary_difference"] == 0.0
        await joined
    assert {group.weights[actor] for actor in group.present} == {1.0}
    assert "new" in group.present


@pytest.mark.parametrize("engines_in_all", [1, 2])
def test_an_engine_that_starts_while_the_weights_change_joins_with_all_or_none_of_the_update(
    engines_in_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActorGroup, "end", lambda _: asyncio.sleep(0))
    for after in range(40):
        asyncio.run(asyncio.wait_for(publish_while_one_starts(engines_in_all, after), 60))
