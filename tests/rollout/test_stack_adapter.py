"""An adapter in an engine's slot: what is sampled after an update, and what the canary and the slot's check see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from worlds import make_config

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.canary import Canary
from rlhf.rollout.requests import SamplingSettings
from rlhf.types import Prompt
from rlhf.weights.adapter import peft_name

pytestmark = pytest.mark.stack

SETTINGS = SamplingSettings(temperature=1.0, max_tokens=24)
PROMPT = np.arange(20, 120, dtype=np.int32)  # several blocks of the prefix cache


async def look(config: Any) -> list[dict[str, Any]]:
    from rlhf.cluster.engines import started_engines

    prompts = [Prompt(f"p/{n}", 0, PROMPT[n : n + 40], (), "0", "p") for n in range(4)]
    async with started_engines(config) as engines:
        canary = Canary(engines, prompts, dtype="float32", max_tokens=128)
        await canary.measure_noise()
        await canary.check_start(0)
        seen = []
        for version in (0, 1, 2):
            if version:
                await engines.learners.call("perturb_weights", 0, 4 * version)
                await engines.send_weights(version)
                await canary.check(version)
            (sampled,) = await engines.generate(PROMPT, SETTINGS)
            (own,) = (await engines.learners.call("canary", [np.concatenate([PROMPT, sampled.token_ids])]))[0]
            seen.append({
                "versions": {span.version for span in sampled.version_spans},
                "difference": np.abs(own[len(PROMPT) :] - sampled.logprobs).max(),
            })  # fmt: skip
            if version:
                await engines.learners.call("restore_weights")
        with pytest.raises(ClusterError, match="does not hold the weights of version 3"):  # it has those of version 2
            await canary.check(3)

        def set_scale(factor: float) -> Callable[[Any], None]:
            def on_rank(rank: Any) -> None:
                rank._sender._scale = factor * rank.config.model.lora.scale

            return on_rank

        await engines.learners.call("perturb_weights")
        for factor, holds in ((1.0, True), (0.0, False), (2.0, False)):  # sent; not applied; applied twice
            await engines.learners.call("apply", set_scale(factor))
            await engines.send_weights(4)
            if holds:
                await canary.check(4)
            else:
                with pytest.raises(ClusterError, match="does not hold the weights of version 4"):
                    await canary.check(4)
        unknown = {
            peft_name(f"model.layers.99.self_attn.q_proj.{name}"): torch.ones(4, 4) for name in ("lora_A", "lora_B")
        }
        with pytest.raises(ValueError, match=r"no layer model.layers.99.self_attn.q_proj"):
            await engines.group.call("load_adapter", save(unknown), "5")
    return seen


def test_requests_after_an_update_get_the_new_adapter_from_their_first_token_on(tiny_model_dir: Path) -> None:
    config = make_config(
        tiny_model_dir / "model",
        model={"path": str(tiny_model_dir / "model"), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
        data={"train": str(tiny_model_dir / "train.jsonl"), "max_prompt_tokens": 104},
    )
    seen = asyncio.run(look(config))
    assert [each["versions"] for each in seen] == [{0}, {1}, {2}]
    assert max(each["difference"] for each in seen) < 1e-4
