"""What our code sets in vLLM, read from vLLM itself, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.weights import transfer


def test_an_engine_prefills_as_many_tokens_at_once_as_vllm_does_offline(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rlhf.rollout import engine

    chosen = []

    def start(arguments: Any, usage_context: Any = UsageContext.ENGINE_CONTEXT) -> None:
        chosen.append(arguments.create_engine_config(usage_context).scheduler_config.max_num_batched_tokens)

    monkeypatch.setattr(engine.AsyncLLM, "from_engine_args", start)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config = make_config(tiny_model_dir / "model", rollout={"max_response_tokens": 128})
    engine.RolloutEngine(config, 0, transfer.BACKEND)
    offline = AsyncEngineArgs.get_batch_defaults(1)[0][UsageContext.LLM_CLASS]
    assert chosen == [offline]
    assert offline > 2048


@pytest.mark.parametrize("on_cpu", [True, False])
def test_workers_busy_wait_less_on_cpu_and_as_vllm_does_on_gpus(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.platforms import current_platform

    monkeypatch.setattr(SpinCondition.__init__, "__defaults__", (1,))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: on_cpu)
    transfer.register_with_vllm()
    assert SpinCondition.__init__.__defaults__ == ((transfer.SPIN_S,) if on_cpu else (1,))
