"""Options of `rollout.engine`, read back from an engine that has started with them and samples."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from worlds import make_config

from rlhf.sampling.requests import SamplingSettings, engine_arguments

pytestmark = pytest.mark.stack

PROMPT = np.arange(20, 148, dtype=np.int32)
SETTINGS = SamplingSettings(temperature=1.0, max_tokens=8)
# Option -> a value that differs from what an engine on CPU has without it, and where vLLM's config has it. On CPU vLLM
# turns async_scheduling off, whatever it is given.
OPTIONS: dict[str, tuple[Any, str]] = {
    "max_num_batched_tokens": (256, "scheduler_config.max_num_batched_tokens"),
    "max_num_active_seqs": (3, "scheduler_config.max_num_active_seqs"),
    "enable_chunked_prefill": (False, "scheduler_config.enable_chunked_prefill"),
    "long_prefill_token_threshold": (48, "scheduler_config.long_prefill_token_threshold"),
    "long_prefill_token_threshold_adaptive": (True, "scheduler_config.long_prefill_token_threshold_adaptive"),
    "scheduler_reserve_full_isl": (False, "scheduler_config.scheduler_reserve_full_isl"),
    "watermark": (0.05, "scheduler_config.watermark"),
    "stream_interval": (4, "scheduler_config.stream_interval"),
    "block_size": (64, "cache_config.block_size"),
    "kv_cache_dtype": ("bfloat16", "cache_config.cache_dtype"),
    "prefix_caching_hash_algo": ("xxhash", "cache_config.prefix_caching_hash_algo"),
    "max_logprobs": (5, "model_config.max_logprobs"),
}


class Started(NamedTuple):
    """Values by option, of a started engine and of one without options; log-probs as sampled and as scored [R]."""

    has: dict[str, Any]
    without: dict[str, Any]
    max_num_seqs: int
    sampled: np.ndarray
    scored: np.ndarray


async def start(model: Path, options: dict[str, Any]) -> Started:
    from rlhf.cluster.engines import started_engines

    rollout = {"engine": options, "max_concurrent_sequences": 8}
    config = make_config(model, data={"max_prompt_tokens": len(PROMPT)}, rollout=rollout)
    plain = engine_arguments(make_config(model, data={"max_prompt_tokens": len(PROMPT)}), seed=0)
    values = attrgetter(*(place for _, place in OPTIONS.values()))

    def read(actor: Any) -> tuple[Any, ...]:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        started = actor._hosted._engine.vllm_config
        without = AsyncEngineArgs(**plain).create_engine_config(UsageContext.LLM_CLASS)
        return values(started), values(without), started.scheduler_config.max_num_seqs

    async with started_engines(config, trains=False) as engines:
        has, without, max_num_seqs = await engines.group.actors[0].__ray_call__.remote(read)
        first, *_ = await engines.choice.generate(PROMPT, SETTINGS, samples=4)
        (scored,) = (
            await engines.group.call(lambda engine: engine.canary([np.concatenate([PROMPT, first.token_ids])]))
        )[0]
    by_option = (dict(zip(OPTIONS, each, strict=True)) for each in (has, without))
    return Started(*by_option, max_num_seqs, first.logprobs, scored[len(PROMPT) :])


def test_a_started_engine_has_the_options_of_its_config(tiny_model_dir: Path) -> None:
    options = {name: value for name, (value, _) in OPTIONS.items()}
    started = asyncio.run(start(tiny_model_dir / "model", options))
    assert started.has == options
    assert [name for name in options if started.without[name] == options[name]] == []
    assert started.max_num_seqs == 8  # of rollout.max_concurrent_sequences
    # It samples, and its keys and values are rounded: without the option the two agree within 1e-3.
    assert 1e-3 < np.abs(started.sampled - started.scored).max() < 0.2
