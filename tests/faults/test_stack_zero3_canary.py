"""ZeRO-3 on one learner: the share of a parameter and the whole one are one memory, and the start of a run holds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups, plan_first_epoch

from rlhf.cluster.canary import Canary
from rlhf.cluster.engines import started_engines
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, Prompt

pytestmark = [pytest.mark.stack, pytest.mark.faults]


async def start_and_update(config: Any) -> None:
    prompts = [Prompt(f"p/{n}", 0, np.arange(20 + n, 60 + n, dtype=np.int32), (), "0", "p") for n in range(4)]
    batch, minibatches, advantages = plan_first_epoch(
        config, make_groups(groups=4, samples=4, vocabulary=200, longest=24, seed=1)
    )
    async with started_engines(config) as engines:
        canary = Canary(engines, prompts, dtype="float32", max_tokens=128)
        await canary.measure_noise()
        await canary.check_start(0)
        await engines.learners.start_step(batch, [minibatches])
        await engines.learners.update(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))
        await engines.send_weights(1)
        await canary.check(1)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "targets": "all-linear"}])
def test_a_small_model_at_zero_stage_3_with_one_learner_starts_and_trains(
    tiny_model_dir: Path, lora: dict[str, Any] | None
) -> None:
    config = make_config(
        tiny_model_dir / "model", model={"lora": lora}, learner={"zero_stage": 3, "optimizer": {"lr": 1e-2}}
    )
    asyncio.run(start_and_update(config))
