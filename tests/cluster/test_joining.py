"""An engine that was built while weights are sent and compared joins after both, compared with the new weights."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from fake_canary import PROMPTS

from rlhf.cluster.canary import Canary
from rlhf.cluster.engines import Engines
from rlhf.run.rollout_loop import RolloutLoop


class Learners:
    """Learners of one weight; a transfer gives its value to the engines that are present."""

    def __init__(self, group: EngineGroup) -> None:
        self.group, self.weight, self.changed = group, 0.0, False

    async def locate(self, **_: Any) -> list[Any]:
        return [SimpleNamespace(host="here", port=1, node="here")]

    async def call(self, method: str, *arguments: Any, **_: Any) -> Any:
        await asyncio.sleep(0)
        if method == "send_weights":
            self.group.weights |= dict.fromkeys(self.group.present, self.weight)
            return None
        return [[np.full(3, self.weight)]]  # the canary's log-probs


class EngineGroup:
    """Two engines; the second one is lost, and the one in its place is built."""

    def __init__(self) -> None:
        self.actors, self.absent = ["engine 0", "lost"], {1}
        self.weights = {"engine 0": 0.0, "new": -1.0}
        self.locations = [SimpleNamespace(node="here")] * 2

    @property
    def present(self) -> list[str]:
        return [actor for rank, actor in enumerate(self.actors) if rank not in self.absent]

    def replace(self, rank: int, new: Any) -> None:
        self.actors[rank] = new

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        asked = self.present
        for _turn in range(3):  # slower than the learner
            await asyncio.sleep(0)
        return [[np.full(3, self.weights[actor])] for actor in asked]

    async def call_one(self, *_: Any, **__: Any) -> None:
        await asyncio.sleep(0)


def test_an_engine_that_was_built_during_a_transfer_joins_after_the_comparison_and_with_the_new_weights() -> None:
    async def publish_while_one_is_built(after: int) -> None:
        group = EngineGroup()
        learners = Learners(group)
        sections = SimpleNamespace(device="cpu", placement="separate", min_engines=1, tensor_parallel=1)
        config: Any = SimpleNamespace(
            cluster=SimpleNamespace(**vars(sections), start_deadline_s=1.0), run=SimpleNamespace(max_restarts=1)
        )
        cluster: Any = SimpleNamespace(
            group=lambda _: group, learners=learners, first_step=0, shares_gpus=False, trains=True
        )
        engines = Engines(cluster, config)
        engines._connected = group.present
        canary = Canary(engines, PROMPTS, dtype="float32", max_tokens=8)
        canary.sequences = [np.zeros(3, np.int32)]
        await canary.check(0)
        clock = SimpleNamespace(phase=lambda _: contextlib.nullcontext())
        loop: Any = SimpleNamespace(engines=engines, canary=canary, _run=SimpleNamespace(clock=clock))

        async def build() -> None:
            for _turn in range(after):
                await asyncio.sleep(0)
            engines._replacements.built[1] = cast(Any, "new")
            await engines._join(1)

        engines._check_joined = canary.check_joined
        learners.weight, learners.changed = 1.0, True
        await asyncio.gather(build(), RolloutLoop.publish(loop, 1))
        assert group.weights == {"engine 0": 1.0, "new": 1.0}
        assert not engines._replacements._joining

    for after in range(30):
        asyncio.run(publish_while_one_is_built(after))
