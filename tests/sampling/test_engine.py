"""An engine's answers: a token has its own log-prob and support, and a failed update of the weights is remembered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import ALONE, make_config

from rlhf.sampling.requests import SamplingSettings

pytestmark = pytest.mark.slow

PROMPT = np.arange(5, dtype=np.int32)
SETTINGS = SamplingSettings(1.0, 8)
VOCABULARY = 12
ON_GPU = {"model": {"dtype": "bfloat16"}, "cluster": {"device": "cuda"}}


class FakeVLLM:
    """Answers every request with `outputs`; its workers cannot load weights."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=False),
            model_config=SimpleNamespace(logprobs_mode="processed_logprobs", get_vocab_size=lambda: VOCABULARY),
        )
        self.asked: list[Any] = []

    async def generate(self, _: Any, params: Any, **__: Any) -> AsyncIterator[Any]:
        self.asked.append(params)
        prompt_logprobs = [{int(token): SimpleNamespace(logprob=-1.0)} for token in PROMPT]
        yield SimpleNamespace(outputs=self.outputs, prompt_logprobs=prompt_logprobs)

    async def update_weights(self, _: Any) -> None:
        raise RuntimeError("no memory is left for the weights")

    async def check_health(self) -> None:
        pass


@pytest.fixture
def engine_with(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], Any]:
    from rlhf.sampling import engine

    def make(outputs: list[Any], **rollout: Any) -> Any:
        sections: dict[str, Any] = {"rollout": rollout, **ON_GPU} if rollout else {}
        monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", lambda *_, **__: FakeVLLM(outputs))
        return engine.RolloutEngine(make_config(tiny_model_dir / "model", **sections), ALONE)

    return make


def answer(
    token_ids: list[int],
    logprobs_of: list[int | None],
    kept: list[list[int]] | None = None,
    experts: np.ndarray | None = None,
) -> Any:
    """A sampled response, whose log-probs are -1, -2, ... and belong to these tokens; None: a place without any.

    `kept`: the ids that each token was sampled from.
    """
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, SamplingMask

    logprobs = FlatLogprobs()
    for place, token in enumerate(logprobs_of, 1):
        logprobs.append(None if token is None else {token: Logprob(-float(place))})
    mask = None if kept is None else SamplingMask(kept)
    return CompletionOutput(
        0, "", token_ids, None, logprobs, finish_reason="stop", sampling_mask=mask, routed_experts=experts
    )


def test_each_token_gets_its_own_logprob(engine_with: Callable[[list[Any]], Any]) -> None:
    (completion,) = asyncio.run(engine_with([answer([7, 8, 9], [7, 8, 9])]).generate(PROMPT, SETTINGS, 1, None))
    assert completion.token_ids.tolist() == [7, 8, 9]
    assert completion.logprobs.tolist() == [-1, -2, -3]


@pytest.mark.parametrize(
    ("logprobs_of", "count"),
    [([7, 8], 2), ([7, 8, 9, 9], 4), ([7, None, 9], 2), ([8, 9, 7], 3), ([], 0)],
    ids=["one too few", "one too many", "a gap", "shifted", "none"],
)
def test_tokens_without_their_own_logprobs_are_refused(
    engine_with: Callable[[list[Any]], Any], logprobs_of: list[int | None], count: int
) -> None:
    engine = engine_with([answer([7, 8, 9], logprobs_of)])
    with pytest.raises(RuntimeError, match=rf"\b3 tokens and log-probs of {count}\b"):
        asyncio.run(engine.generate(PROMPT, SETTINGS, 1, None))


def test_each_token_gets_its_own_support_and_none_where_that_is_the_vocabulary(
    engine_with: Callable[..., Any],
) -> None:
    output = answer([7, 8, 9], [7, 8, 9], [[3, 7], list(range(VOCABULARY)), [9]])
    (completion,) = asyncio.run(engine_with([output], top_p=0.9).generate(PROMPT, SETTINGS, 1, None))
    assert completion.support.ids.tolist() == [3, 7, 9]
    assert completion.support.offsets.tolist() == [0, 2, 2, 3]
    everything = answer([7], [7], [list(range(VOCABULARY))])
    (completion,) = asyncio.run(engine_with([everything], top_p=0.9).generate(PROMPT, SETTINGS, 1, None))
    assert completion.support is None


@pytest.mark.parametrize("kept", [None, [[7]], [[7], [9, 10]]], ids=["no supports", "one too few", "of another token"])
def test_a_token_without_its_own_support_is_refused(engine_with: Callable[..., Any], kept: Any) -> None:
    engine = engine_with([answer([7, 8], [7, 8], kept)], top_k=4)
    with pytest.raises(RuntimeError, match=r"2 tokens and the supports of \d, or of other tokens"):
        asyncio.run(engine.generate(PROMPT, SETTINGS, 1, None))


def test_an_engine_that_returns_supports_is_asked_with_a_top_k_and_the_canary_is_not_restricted(
    engine_with: Callable[..., Any],
) -> None:
    def asked(settings: SamplingSettings, **rollout: Any) -> list[tuple[float, float, int, float]]:
        engine = engine_with([answer([7], [7], [[7]])], **rollout)
        asyncio.run(engine.generate(PROMPT, settings, 1, None))
        asyncio.run(engine.canary([PROMPT]))
        return [(p.temperature, p.top_p, p.top_k, p.min_p) for p in engine._engine.asked]

    assert asked(SETTINGS) == [(1.0, 1.0, 0, 0.0), (1.0, 1.0, 0, 0.0)]
    nucleus = SamplingSettings(0.7, 8, top_p=0.9, min_p=0.1)
    assert asked(nucleus, top_p=0.9, min_p=0.1) == [(0.7, 0.9, VOCABULARY, 0.1), (1.0, 1.0, 1, 0.0)]
    assert asked(SamplingSettings(1.0, 8, top_k=5), top_k=5)[0] == (1.0, 1.0, 5, 0.0)
    greedy = SamplingSettings(0.0, 8)
    assert asked(greedy)[0][0] == 0.0
    assert asked(greedy, top_p=0.9)[0] == (1.0, 1.0, 1, 0.0)


def test_experts_are_those_of_the_asked_tokens_without_the_last_and_the_engine_is_asked_for_no_others(
    engine_with: Callable[..., Any],
) -> None:
    def generated(experts: np.ndarray | None, experts_from: int | None) -> tuple[Any, int]:
        engine = engine_with([answer([7, 8], [7, 8], experts=experts)])
        settings = SamplingSettings(1.0, 8, experts_from=experts_from)
        (completion,) = asyncio.run(engine.generate(PROMPT, settings, 1, None))
        return completion.experts, engine._engine.asked[0].routed_experts_prompt_start

    six = np.zeros((6, 4, 2), np.uint8)
    assert generated(six, None) == (None, len(PROMPT))
    experts, start = generated(six, 0)
    assert (len(experts), start) == (6, 0)
    experts, start = generated(six[:3], 3)
    assert (len(experts), start) == (3, 3)
    with pytest.raises(RuntimeError, match=r"experts of shape \(6, 4, 2\) for 3 tokens"):
        generated(six, 3)


def test_an_engine_that_has_failed_to_load_weights_is_not_healthy(engine_with: Callable[[list[Any]], Any]) -> None:
    async def fail() -> None:
        engine = engine_with([])
        await engine.check_health()
        with pytest.raises(RuntimeError, match=r"^no memory is left for the weights"):
            await engine.update_weights({})
        with pytest.raises(RuntimeError, match=r"update of its weights failed: no memory"):
            await engine.check_health()

    asyncio.run(fail())


def test_requests_wait_for_kv_cache_where_seats_are_free_and_blocks_may_be_too_few() -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from rlhf.sampling.cache_meter import CacheMeter

    def counted(seats: int, sequences: float | None, *passes: tuple[int, int, float]) -> tuple[float, int, int]:
        """What is counted of passes with (running, waiting, usage), if the cache holds this many sequences."""
        cache, scheduler = SimpleNamespace(kv_cache_max_concurrency=sequences), SimpleNamespace(max_num_seqs=seats)
        meter = CacheMeter().attach(SimpleNamespace(cache_config=cache, scheduler_config=scheduler))
        for running, waiting, usage in passes:
            meter.record(SchedulerStats(running, waiting, kv_cache_usage=usage), None)
        meter.record(None, None)  # the answer to another call
        taken = meter.take()
        assert meter.take() == (0.0, 0, 0)
        return taken

    full, fits, all_seats_taken = (6, 2, 0.95), (6, 0, 0.95), (8, 30, 0.95)
    assert counted(8, 10, full, full, fits, all_seats_taken) == (0.95, 4, 2)
    reset_by_an_update, computed_again = (0, 8, 0.0), (5, 3, 0.6)
    assert counted(8, 10, fits, reset_by_an_update, computed_again, fits) == (0.95, 4, 0)
    assert counted(8, 2.5, computed_again) == (0.6, 1, 0)
    assert counted(8, 2.5, (5, 3, 0.61)) == (0.61, 1, 1)  # 0.39 of the cache: not enough for one of 2.5 sequences
    assert counted(8, None, computed_again) == (0.6, 1, 1)


def test_with_the_scheduler_of_vllm_requests_wait_for_a_full_cache_and_not_after_a_reset(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from rlhf.sampling.cache_meter import CacheMeter

    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    arguments = AsyncEngineArgs(
        str(tiny_model_dir / "model"), dtype="float32", max_model_len=320, max_num_seqs=64, block_size=32,
        enable_prefix_caching=False, scheduling_policy="priority", async_scheduling=False,
    )  # fmt: skip

    def counted(requests: int, reset_at: int) -> tuple[float, int, int]:
        """Each request is 300 tokens long, 10 of the 100 blocks (one is vLLM's own)."""
        config = arguments.create_engine_config()
        config.cache_config.num_gpu_blocks, config.cache_config.kv_cache_max_concurrency = 100, 9.9
        group = KVCacheGroupSpec(["layer"], FullAttentionSpec(32, num_kv_heads=1, head_size=32, dtype=torch.float32))
        cache = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=[group])
        scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=32, hash_block_size=32, log_stats=True
        )
        meter = CacheMeter().attach(config)
        for number in range(requests):
            settings = SamplingParams(max_tokens=280, ignore_eos=True)
            scheduler.add_request(Request(str(number), [5] * 20, settings, None))
        for index in range(600):
            if index == reset_at:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
            scheduled = scheduler.schedule()
            names = list(scheduled.num_scheduled_tokens)
            sampled = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, [[7] for _ in names])
            for outputs in scheduler.update_from_output(scheduled, sampled).values():
                meter.record(outputs.scheduler_stats, None)
        return meter.take()

    usage, passes, waiting = counted(requests=8, reset_at=150)
    assert (usage, waiting) == (pytest.approx(80 / 99), 0)
    assert passes >= 280
    usage, passes, waiting = counted(requests=30, reset_at=150)
    assert usage == 1.0
    assert 0.4 < waiting / passes < 0.6
