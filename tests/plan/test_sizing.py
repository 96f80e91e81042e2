"""Plans of many GPUs by hand calculation, the hours of a run, and the sizing table of the docs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import cpu_seconds

from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.config.run import GRPOConfig
from rlhf.plan.hours import expected
from rlhf.plan.layout import example_layout
from rlhf.plan.memory import GIB, engine_memory, learner_memory, total
from rlhf.plan.model import model_shape
from rlhf.plan.report import plan_text

ROOT = Path(__file__).parents[2]
SIZING = runpy.run_path(str(ROOT / "tools/sizing.py"))
MODELS: dict[str, dict[str, Any]] = SIZING["MODELS"]

P8, P70 = 8_030_261_248, 70_553_706_496
LLAMA_8B, LLAMA_70B = MODELS["Llama 3.1 8B"], MODELS["Llama 3.1 70B"]

# 128 prompts x 16 samples of 1,024 + 3,072 tokens, microbatches of 8,192, a reference, checkpointing, cards of 79 GiB.
# What does not depend on the number of learners, bytes:
#   activations   8,192 tokens x (one input of 2 H bytes for each layer + what one layer keeps
#                 + keys and values, 2 x 2 x 8 heads x 128 bytes, three times more for sequences that begin alike)
#   head          2,048 x 16,384 logits x (2 + 3 x 4)  +  8,192 x H x (2 x 2 + 8)  +  2 V H  +  16,384 x H x 4
#   overhead      2 GiB, assumed
ACTIVATIONS_8B = 8_192 * (32 * 2 * 4_096 + 200_704 + 3 * 4_096)
HEAD_8B = 2_048 * 16_384 * 14 + 8_192 * 4_096 * 12 + 2 * 128_256 * 4_096 + 16_384 * 4_096 * 4
FIXED_8B = ACTIVATIONS_8B + HEAD_8B + 2 * GIB
ACTIVATIONS_70B = 8_192 * (80 * 2 * 8_192 + 397_312 + 3 * 4_096)
HEAD_70B = 2_048 * 16_384 * 14 + 8_192 * 8_192 * 12 + 2 * 128_256 * 8_192 + 16_384 * 8_192 * 4
FIXED_70B = ACTIVATIONS_70B + HEAD_70B + 2 * GIB


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


@pytest.mark.parametrize(("gpus", "learners"), [(16, 8), (32, 16), (64, 32), (128, 64)])
def test_8b_on_16_to_128_gpus_by_hand(make: Any, gpus: int, learners: int) -> None:
    config = make(LLAMA_8B, f"cluster.learners={learners}", f"cluster.engines={gpus - learners}")
    shape = model_shape(LLAMA_8B)
    # ZeRO 2: weights and reference whole, 2 + 2 bytes; master 4, moments 8, gradients 4 and their copy 4 divided
    by_hand = (2 + 2) * P8 + (4 + 8 + 4 + 4) * P8 / learners + 2 * 500_000_000 + FIXED_8B
    assert total(learner_memory(shape, config)) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand / GIB == pytest.approx({8: 57.21, 16: 47.86, 32: 43.19, 64: 40.85}[learners], abs=0.01)
    engine = engine_memory(shape, config)
    per_token = 2 * 32 * 8 * 128 * 2  # keys and values, layers, heads, their size, bytes
    assert engine.kv_tokens == int((0.85 * 79 * GIB - 2 * P8 - 3 * GIB) // per_token) == 402_984
    nodes = example_layout(config.roles(), config.cluster)
    assert len(nodes) == gpus // 8
    assert nodes[learners // 8 - 1] == [f"learner {rank}" for rank in range(learners - 8, learners)]
    assert nodes[-1] == [f"engine {engine}" for engine in range(gpus - learners - 8, gpus - learners)]


@pytest.mark.parametrize(("gpus", "learners"), [(16, 8), (32, 16), (64, 32), (128, 64)])
def test_70b_on_16_to_128_gpus_by_hand(make: Any, gpus: int, learners: int) -> None:
    engines = (gpus - learners) // 4
    layout = [f"cluster.learners={learners}", f"cluster.engines={engines}", "cluster.tensor_parallel=4"]
    config = make(LLAMA_70B, *layout, "learner.zero_stage=3")
    shape = model_shape(LLAMA_70B)
    # ZeRO 3 divides all: weights 2, master 4, moments 8, reference 2, gradients 4, their copy 4; 1 B weights gathered
    by_hand = (2 + 4 + 8 + 2 + 4 + 4) * P70 / learners + 2 * 500_000_000 + 2 * 10**9 + FIXED_70B
    assert total(learner_memory(shape, config)) == pytest.approx(by_hand, rel=1e-12)
    assert by_hand / GIB == pytest.approx({8: 218.69, 16: 120.13, 32: 70.84, 64: 46.20}[learners], abs=0.05)
    text = " ".join(plan_text(config).split())
    assert ("memory: a learner needs about" in text) == (learners <= 16)
    if learners <= 16:
        assert "learner.offload_optimizer=true" in text
        # master, moments and float32 gradients leave; what is reduced stays in the model's type: 2 + 2 + 2 bytes
        offloaded = make(LLAMA_70B, *layout, "learner.zero_stage=3", "learner.offload_optimizer=true")
        by_hand = (2 + 2 + 2) * P70 / learners + 2 * 500_000_000 + 2 * 10**9 + FIXED_70B
        assert total(learner_memory(shape, offloaded)) == pytest.approx(by_hand, rel=1e-12)
        assert "memory: a learner needs" not in " ".join(plan_text(offloaded).split())
    engine = engine_memory(shape, config)
    per_token = 2 * 80 * 2 * 128 * 2  # two of the 8 heads on each of 4 GPUs
    assert engine.kv_tokens == int((0.85 * 79 * GIB - 2 * P70 / 4 - 3 * GIB) // per_token) == 410_201
    nodes = example_layout(config.roles(), config.cluster)
    assert len(nodes) == gpus // 8
    assert nodes[-1] == [f"engine {engines - 2}"] * 4 + [f"engine {engines - 1}"] * 4


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B], ids=["8B", "70B"])
def test_a_plan_of_128_gpus_takes_less_than_a_second(make: Any, tmp_path: Path, model: dict[str, Any]) -> None:
    make(model)
    command = [sys.executable, "-m", "rlhf.grpo", "--config", str(tmp_path / "run.yaml"), "--plan"]
    command += ["cluster.learners=64", "cluster.engines=16", "cluster.tensor_parallel=4", "learner.zero_stage=3"]
    assert cpu_seconds(command) < 1.0


def test_a_critic_and_a_reward_model_that_do_not_fit_are_named(make: Any, tmp_path: Path) -> None:
    make(LLAMA_8B)
    fits, large = tmp_path / "model", tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(LLAMA_70B))
    overrides = ["cluster.learners=16", f"reward_model.path={large}", f"critic.path={fits}"]
    text = " ".join(plan_text(load_config(PPOConfig, [str(tmp_path / "run.yaml")], overrides)).split())
    assert "a reward model needs about" in text
    assert "a critic needs about" not in text
    # weights and moments of both, 12 bytes a parameter; a critic has one number a token instead of logits
    size = 12 * (P8 + P8 - 128_256 * 4_096 + 4_096) / GIB
    assert f"{size:.1f} GiB (float32 weights and moments of all trained models); " in text
    overrides = ["cluster.learners=16", "algo.ref_update=average", f"critic.path={large}"]
    text = " ".join(plan_text(load_config(PPOConfig, [str(tmp_path / "run.yaml")], overrides)).split())
    assert "a critic needs about" in text
    assert "a changing reference" in text


# --- hours ---

SPEEDS = ["plan.engine_tokens_per_second=2500", "plan.learner_tokens_per_second=4000", "plan.prompt_tokens=200"]
SIZES = ["cluster.learners=8", "cluster.engines=8", "plan.response_tokens=800", "learner.minibatches_per_epoch=2"]


def test_the_hours_of_a_run_by_hand(make: Any) -> None:
    hours = expected(make(LLAMA_8B, *SPEEDS, *SIZES))
    assert hours is not None
    assert (hours.tokens, hours.sampled) == (2_048 * 1_000, 2_048 * 800)
    assert hours.sampling_s == 1_638_400 / (8 * 2_500) == 81.92
    assert hours.update_s == 2_048_000 / (8 * 4_000) == 64.0
    assert hours.logprobs_s == pytest.approx(2 * 64 / 3)  # old and reference policy, forward alone
    assert hours.step_s == pytest.approx(81.92 + 64 + 128 / 3)
    assert hours.hours == pytest.approx(200 * hours.step_s / 3600)
    assert hours.gpu_hours == pytest.approx(16 * hours.hours)


def test_with_a_lag_sampling_and_training_run_side_by_side(make: Any) -> None:
    hours = expected(make(LLAMA_8B, *SPEEDS, *SIZES, "rollout.max_policy_lag=1"))
    assert hours is not None
    assert hours.step_s == pytest.approx(64 + 128 / 3)  # longer than the 81.92 s of sampling


def test_the_time_of_ppo_is_the_critics_where_it_takes_more_passes(make: Any, tmp_path: Path) -> None:
    make(LLAMA_8B)
    times = ["learner.minibatches_per_epoch=1", "algo.kl_coef=0", "critic.epochs_per_step=3"]
    hours = expected(load_config(PPOConfig, [str(tmp_path / "run.yaml")], [*SPEEDS, *SIZES[:3], *times]))
    assert hours is not None
    assert (hours.passes, hours.epochs) == (1, 3)  # the values of the critic, and its passes
    assert hours.update_s == 3 * 64.0
    assert hours.logprobs_s == pytest.approx(64 / 3)


def test_without_both_speeds_there_are_no_hours(make: Any) -> None:
    assert expected(make(LLAMA_8B, *SPEEDS[1:])) is None
    assert "Time, expected" not in plan_text(make(LLAMA_8B, *SPEEDS[1:]))


def test_hours_are_printed_with_their_arithmetic(make: Any) -> None:
    text = plan_text(make(LLAMA_8B, *SPEEDS, *SIZES))
    assert "1,638,400 / (8 engines x 2,500) = 81.9 s" in text
    assert "200 steps = 10.5 hours, 409,600,000 tokens, 168 GPU-hours" in text
    assert max(map(len, text.splitlines())) <= 100


# --- the table ---


def test_the_sizing_table_of_the_docs_is_what_the_plan_says() -> None:
    page = (ROOT / "docs/clusters.md").read_text()
    rows = [
        line for line in page.splitlines() if line.startswith(("| model | GPUs", *(f"| {name} |" for name in MODELS)))
    ]
    assert rows == [line for line in SIZING["table"]() if not line.startswith("|---")]


def test_the_program_prints_the_table() -> None:
    command = [sys.executable, ROOT / "tools/sizing.py"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == list(SIZING["table"]())
