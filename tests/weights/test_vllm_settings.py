"""What our code sets in vLLM, read from vLLM itself, in this process."""

from __future__ import annotations

import gc
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import ALONE, make_config

from rlhf.weights import transfer
from rlhf.weights.cpu_worker import fork_worker_of_one_thread

pytestmark = pytest.mark.slow


def test_an_engine_prefills_as_many_tokens_at_once_as_vllm_does_offline(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rlhf.sampling import engine

    chosen = []

    def start(arguments: Any, usage_context: Any = UsageContext.ENGINE_CONTEXT, **_: Any) -> Any:
        started = arguments.create_engine_config(usage_context)
        chosen.append(started.scheduler_config.max_num_batched_tokens)
        return SimpleNamespace(vllm_config=started)

    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = make_config(tiny_model_dir / "model", rollout={"max_response_tokens": 128})
    engine.RolloutEngine(config, ALONE)
    offline = AsyncEngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]
    assert chosen == [offline]
    assert offline > 2048


@pytest.mark.parametrize("fault", ["", "a prefix cache", "raw log-probs"])
def test_an_engine_that_keeps_its_kv_has_no_prefix_cache_and_its_logprobs_are_processed_ones(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    from rlhf.sampling import engine

    def start(arguments: Any, usage_context: Any, **_: Any) -> Any:
        started = arguments.create_engine_config(usage_context)
        if fault == "a prefix cache":
            started.cache_config.enable_prefix_caching = True
        if fault == "raw log-probs":
            started.model_config.logprobs_mode = "raw_logprobs"
        return SimpleNamespace(vllm_config=started)

    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    keeps = {"max_policy_lag": 1, "on_weight_update": "keep_kv"}
    config = make_config(tiny_model_dir / "model", rollout=keeps)
    if not fault:
        engine.RolloutEngine(config, ALONE)
        return
    with pytest.raises(AssertionError, match="old keys" if fault == "a prefix cache" else "sampled distribution"):
        engine.RolloutEngine(config, ALONE)


def test_a_deterministic_engine_computes_prompts_whole_and_refuses_a_cache_in_which_a_sequence_may_lose_its_place(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf.sampling import engine

    ended = []

    def start(arguments: Any, usage_context: Any, **_: Any) -> Any:
        started = arguments.create_engine_config(usage_context)
        scheduler = started.scheduler_config
        assert not scheduler.enable_chunked_prefill
        assert not started.cache_config.enable_prefix_caching
        assert scheduler.max_num_batched_tokens >= started.model_config.max_model_len
        started.cache_config.kv_cache_max_concurrency = 8.5
        return SimpleNamespace(vllm_config=started, shutdown=lambda: ended.append(True))

    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # longer than what vLLM computes at once by default
    for sequences in (8, 9):
        config = make_config(
            tiny_model_dir / "model",
            run={"deterministic": True},
            rollout={"max_response_tokens": 20_000, "max_concurrent_sequences": sequences},
            learner={"max_tokens_per_microbatch": 32_768},
        )
        if sequences == 8:
            engine.RolloutEngine(config, ALONE)
            continue
        with pytest.raises(
            ValueError, match=r"max_concurrent_sequences=9 .* holds 8 seq.*20064 tok.*at most 8, .*kv_ca"
        ):
            engine.RolloutEngine(config, ALONE)
    assert ended == [True]


@pytest.mark.private
def test_a_worker_whose_notice_of_a_message_is_lost_looks_for_itself_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    transfer.register_with_vllm()
    forever: Any = shm_broadcast.MessageQueue.ReadTimeoutWithWarnings(None, should_warn=False)
    assert forever.timeout_ms() == transfer.LOOK_EVERY_MS


@pytest.mark.private
@pytest.mark.parametrize("on_cpu", [True, False])
def test_workers_busy_wait_less_on_cpu_and_as_vllm_does_on_gpus(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    monkeypatch.setattr(SpinCondition.__init__, "__defaults__", (1,))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    gc.disable()  # as in vLLM's own processes
    transfer.register_with_vllm()
    assert gc.isenabled()
    assert SpinCondition.__init__.__defaults__ == ((transfer.SPIN_S,) if on_cpu else (1,))


@pytest.mark.private
@pytest.mark.parametrize(
    ("threads", "workers", "method"), [("1", 1, "fork"), ("2", 1, "spawn"), ("1", 2, "spawn")], ids=str
)
def test_the_only_worker_of_an_engine_on_cpu_is_forked_to_its_core_if_it_has_one_thread(
    threads: str, workers: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor import multiproc_executor as executor

    def make(vllm_config: Any, inherited_fds: list[int] | None = None) -> Any:
        return executor.get_mp_context().get_start_method(), os.sched_getaffinity(0), inherited_fds

    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    monkeypatch.setattr(executor, "get_mp_context", lambda: multiprocessing.get_context("spawn"))
    monkeypatch.setattr(executor.WorkerProc, "make_worker_process", staticmethod(make))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("GOMP_CPU_AFFINITY", str(core))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for _ in range(2):  # the plugin runs more than once in some processes
        fork_worker_of_one_thread()
    config = SimpleNamespace(parallel_config=SimpleNamespace(local_world_size=workers))
    expected = ("fork", {core}, []) if method == "fork" else ("spawn", before, None)
    assert executor.WorkerProc.make_worker_process(vllm_config=config) == expected
    assert os.sched_getaffinity(0) == before
    assert executor.get_mp_context().get_start_method() == "spawn"
