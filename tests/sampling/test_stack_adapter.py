"""An adapter in an engine's slot: what is sampled after an update and by a new engine, what the canary and the slot's
check see, and that the engine's base stays as it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import save
from worlds import make_config, make_groups, plan_first_epoch

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.canary import Canary
from rlhf.cluster.engines import Engines, started_engines
from rlhf.sampling.requests import Completion, SamplingSettings
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, Prompt
from rlhf.weights.adapter import peft_name

pytestmark = pytest.mark.stack

SETTINGS = SamplingSettings(temperature=1.0, max_tokens=24)
PROMPT = np.arange(20, 120, dtype=np.int32)  # several blocks of the prefix cache


async def base_checksums(engines: Engines) -> dict[str, int]:
    """Of every tensor of an engine's base, by name."""

    def on_worker(worker: Any) -> dict[str, int]:
        import zlib

        import torch

        tensors = {}
        for name, module in worker.model_runner.get_model().named_modules():
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.named_parameters(recurse=False)}
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.named_buffers(recurse=False)}
            if hasattr(module, "cpu_linear"):  # vLLM has packed its weights: the product with one gives them
                inputs = getattr(module, "input_size", None) or module.embedding_dim
                tensors[f"{name}.packed"] = module.cpu_linear(torch.eye(inputs), module.weight, None)
        return {name: zlib.crc32(tensor.detach().contiguous().numpy().tobytes()) for name, tensor in tensors.items()}

    ((checksums,),) = await engines.group.call(lambda engine: engine.on_workers(on_worker))
    return dict(checksums)


async def train(engines: Engines, config: Any) -> None:
    batch, minibatches, advantages = plan_first_epoch(
        config, make_groups(groups=4, samples=4, vocabulary=200, longest=24, seed=1)
    )
    await engines.learners.start_step(batch, [minibatches])
    await engines.update_learners(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))


class Seen(NamedTuple):
    """A response after PROMPT, and its largest |log-prob difference| between engine and learner."""

    sampled: Completion
    difference: float


async def sample(engines: Engines) -> Seen:
    (sampled,) = await engines.choice.generate(PROMPT, SETTINGS)
    return Seen(sampled, float(np.abs(await own_logprobs(engines, sampled) - sampled.logprobs).max()))


async def own_logprobs(engines: Engines, sampled: Completion) -> np.ndarray:
    """The learner's, of a response after PROMPT."""
    (own,) = (
        await engines.learners.call(lambda learner: learner.canary([np.concatenate([PROMPT, sampled.token_ids])]))
    )[0]
    return np.asarray(own)[len(PROMPT) :]


async def look(config: Any) -> list[Seen]:
    prompts = [Prompt(f"p/{n}", 0, PROMPT[n : n + 40], (), "0", "p") for n in range(4)]
    async with started_engines(config) as engines:
        base = await base_checksums(engines)
        assert sum(name.endswith(".packed") for name in base) > 8
        canary = Canary(engines, prompts, dtype="float32", max_tokens=128)
        await canary.measure_noise()
        await canary.check_start(0)
        seen = [await sample(engines)]
        for version in (1, 2):
            await engines.learners.call(lambda learner: learner.perturb_weights(0, 4 * version))  # noqa: B023
            await engines.send_weights(version)
            await canary.check(version)
            seen.append(await sample(engines))
            await engines.learners.call(lambda learner: learner.restore_weights())
        with pytest.raises(ClusterError, match="does not hold the weights of version 3"):  # it has those of version 2
            await canary.check(3)
        for version in (3, 4):
            await train(engines, config)
            await engines.send_weights(version)
        moved = np.abs(await own_logprobs(engines, seen[0].sampled) - seen[0].sampled.logprobs)
        assert moved.mean() > 0.02, "what a new engine samples would not show that it has no adapter"
        assert await base_checksums(engines) == base
        engines.replace_lost(canary.check)
        ray.kill(engines.group.actors[0])
        seen.append(await sample(engines))  # of the engine in its place
        await engines.stop_replacing()

        def set_scale(factor: float) -> Callable[[Any], None]:
            def on_rank(rank: Any) -> None:
                rank._sender._scale = factor * rank.config.model.lora.scale

            return on_rank

        await engines.learners.call(lambda learner: learner.perturb_weights())
        for factor, holds in ((1.0, True), (0.0, False), (2.0, False)):  # sent; not applied; applied twice
            await engines.learners.call(lambda learner: learner.apply(set_scale(factor)))  # noqa: B023
            await engines.send_weights(5)
            if holds:
                await canary.check(5)
            else:
                with pytest.raises(ClusterError, match="does not hold the weights of version 5"):
                    await canary.check(5)
        unknown = {
            peft_name(f"model.layers.99.self_attn.q_proj.{name}"): torch.ones(4, 4) for name in ("lora_A", "lora_B")
        }
        with pytest.raises(ValueError, match=r"no layer model.layers.99.self_attn.q_proj"):
            await engines.group.call(lambda engine: engine.load_adapter(save(unknown), "6"))
    return seen


@pytest.mark.private
def test_requests_after_an_update_or_to_a_new_engine_get_the_new_adapter_from_their_first_token_on(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for `base_checksums`
    config = make_config(
        tiny_model_dir / "model",
        model={"path": str(tiny_model_dir / "model"), "dtype": "float32", "lora": {"rank": 4, "alpha": 8}},
        learner={"max_tokens_per_microbatch": 512, "optimizer": {"lr": 1e-2}},
        data={"train": str(tiny_model_dir / "train.jsonl"), "max_prompt_tokens": 104},
    )
    seen = asyncio.run(look(config))
    assert [{span.version for span in each.sampled.version_spans} for each in seen] == [{0}, {1}, {2}, {4}]
    assert max(each.difference for each in seen) < 1e-4
