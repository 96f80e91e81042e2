"""Plans of many GPUs in numbers, and the hours of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlhf.check import hours, layouts
from rlhf.check.memory import GIB, kv_cache, learner_memory, total
from rlhf.check.model_shape import model_shape, shape_at
from rlhf.check.report import make_plan
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig

ROOT = Path(__file__).parents[2]
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672,
}  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def build(model: dict[str, Any], *overrides: str) -> GRPOConfig:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model))
        file = tmp_path / "run.yaml"
        config = {
            "run": {"dir": "x", "steps": 200},
            "model": {"path": str(folder), "gradient_checkpointing": True},
            "data": {"train": "x.jsonl", "max_prompt_tokens": 1024},
            "rollout": {"prompts_per_step": 128, "samples_per_prompt": 16, "max_response_tokens": 3072},
            "algo": {"kl_coef": 0.01},
            "learner": {"max_tokens_per_microbatch": 8192},
        }
        file.write_text(json.dumps(config))
        return load_config(GRPOConfig, [str(file)], overrides)

    return build


@pytest.mark.parametrize(
    ("learners", "gib", "offloaded_gib"),
    [(8, 220.27, 72.43), (16, 121.71, 47.79), (32, 72.43, None), (64, 47.79, None)],
)
def test_70b_on_16_to_128_gpus(make: Any, learners: int, gib: float, offloaded_gib: float | None) -> None:
    engines = learners // 4
    overrides = [f"cluster.learners={learners}", f"cluster.engines={engines}", "cluster.tensor_parallel=4"]
    overrides.append("learner.zero_stage=3")
    config, shape = make(LLAMA_70B, *overrides), model_shape(LLAMA_70B)
    assert total(learner_memory(shape, config)) / GIB == pytest.approx(gib, abs=0.05)
    text = " ".join(make_plan(config).text.split())
    assert ("does not fit: a learner needs " in text) == (offloaded_gib is not None)
    if offloaded_gib is not None:
        offloaded = make(LLAMA_70B, *overrides, "learner.offload_optimizer=true")
        assert total(learner_memory(shape, offloaded)) / GIB == pytest.approx(offloaded_gib, abs=0.05)
        assert "does not fit" not in " ".join(make_plan(offloaded).text.split())
    assert kv_cache(shape, config)[1] == 410_201  # two of the 8 heads on each of 4 GPUs


def test_a_critic_and_a_reward_model_that_do_not_fit_are_named(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "NODES", ())  # larger layouts take seconds
    make(LLAMA_8B)
    fits, large = tmp_path / "model", tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(LLAMA_70B))
    overrides = ["cluster.learners=16", f"reward_model.path={large}", f"critic.path={fits}"]
    text = " ".join(make_plan(load_config(PPOConfig, [str(tmp_path / "run.yaml")], overrides)).text.split())
    assert "a reward model needs " in text
    assert "a critic needs " not in text
    # 12 bytes per parameter of the policy (8.03 billion) and the critic (7.50 billion)
    assert "173.6 GiB (" in text
    overrides = ["cluster.learners=16", "algo.ref_update=average", f"critic.path={large}"]
    text = " ".join(make_plan(load_config(PPOConfig, [str(tmp_path / "run.yaml")], overrides)).text.split())
    assert "a critic needs " in text
    assert "a changing reference" in text


# --- hours ---

KEYS = re.compile(r" +[\w.]+=\S+( [\w.]+=\S+)*$")  # a line to paste

SPEEDS = ["plan.engine_tokens_per_second=2500", "plan.learner_tokens_per_second=4000", "plan.prompt_tokens=200"]
SIZES = ["cluster.learners=8", "cluster.engines=8", "plan.response_tokens=800", "learner.minibatches_per_epoch=2"]


def expected_time(config: GRPOConfig) -> list[tuple[str, str]]:
    time = hours.step_time(config, shape_at(config.model.path))
    assert time is not None
    return hours.time_rows(config, time)


def test_the_hours_of_a_run_by_hand(make: Any) -> None:
    assert dict(expected_time(make(LLAMA_8B, *SPEEDS, *SIZES))) == {
        "lengths": "prompt 200 (plan.prompt_tokens) and response 800 (plan.response_tokens)",
        "tokens per step": "2,048,000, of which sampled 1,638,400",  # 2,048 rollouts of 200 + 800 tokens
        "sampling": "1,638,400 / (8 engines x 2,500) = 81.9 s",
        "log-probs": "2 passes, each 1/3 of an epoch = 42.7 s",  # old and reference policy, forward alone
        "update": "2,048,000 x 1 epoch / (8 learners x 4,000) = 64.0 s",
        "one step": "188.6 s, one after the other; transfer, evaluation, checkpoints not included",
        "the run": "200 steps = 10.5 hours, 409,600,000 tokens, 168 GPU-hours",
    }


def test_with_a_lag_sampling_and_training_run_side_by_side(make: Any) -> None:
    time = dict(expected_time(make(LLAMA_8B, *SPEEDS, *SIZES, "rollout.max_policy_lag=1")))
    assert time["one step"].startswith("106.7 s, sampling at the same time")  # longer than the 81.9 s of sampling


def test_the_time_of_ppo_is_the_critics_where_it_takes_more_passes(make: Any, tmp_path: Path) -> None:
    make(LLAMA_8B)
    times = ["learner.minibatches_per_epoch=1", "algo.kl_coef=0", "critic.epochs_per_step=3"]
    time = dict(expected_time(load_config(PPOConfig, [str(tmp_path / "run.yaml")], [*SPEEDS, *SIZES[:3], *times])))
    assert time["log-probs"].startswith("1 pass, ")  # the values of the critic
    assert time["update"].endswith("x 3 epochs / (8 learners x 4,000) = 192.0 s")


def test_an_optimizer_in_host_memory_takes_time_that_its_threads_share(make: Any) -> None:
    offload = ["learner.offload_optimizer=true", "cluster.threads_per_learner=4"]
    time = dict(expected_time(make(LLAMA_8B, *SPEEDS, *SIZES, *offload)))
    assert time["optimizer in host memory"] == "1.9 s"  # 2 updates x 8.03 B / 8 learners x 3.8 ns / 4 threads
    assert time["one step"].startswith("190.5 s, ")  # 188.6 s without


def test_without_a_speed_the_account_has_it_but_on_cpu_there_are_no_hours(make: Any) -> None:
    assert "Time, expected" not in make_plan(make(LLAMA_8B, *SPEEDS[1:], "cluster.device=cpu")).text
    time = dict(expected_time(make(LLAMA_8B, *SPEEDS[1:], *SIZES)))
    assert time["speeds"].endswith("plan.engine_tokens_per_second")
    assert time["update"].endswith("(8 learners x 4,000) = 64.0 s")  # the one that is given
    text = make_plan(make(LLAMA_8B, *SPEEDS, *SIZES)).text
    assert "Time, expected" in text
    assert max(len(line) for line in text.splitlines() if not KEYS.match(line)) <= 100
