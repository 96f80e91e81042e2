"""The account of a step, and the layouts that the plan compares: seconds, what fits, and the stage of ZeRO."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.check import layouts, speed
from rlhf.check.hours import Scale, StepTime, step_time
from rlhf.check.layouts import AS_SET, KINDS, Layout, changed_keys, fastest_layout, search_until_fit, with_fewest_bytes
from rlhf.check.memory import memory_of_roles
from rlhf.check.model_shape import ModelShape, shape_at
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config

ROOT = Path(__file__).parents[2]
SMALL, LARGE = "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-32B"


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """2,048 rollouts of 1,024 + 3,072 tokens, on half of 8 GPUs each."""
    base = {
        "run": {"dir": "x", "steps": 200},
        "data": {"train": "x.jsonl", "max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 128, "samples_per_prompt": 16, "max_response_tokens": 3072},
        "learner": {"max_tokens_per_microbatch": 8192},
        "cluster": {"learners": 4, "engines": 4, "gpus_per_node": 8, "gpu_memory_gib": 79},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))

    def build(model: str, *overrides: str) -> tuple[GRPOConfig, ModelShape]:
        shape = shape_at(model)
        assert shape is not None
        return load_config(GRPOConfig, [str(tmp_path / "base.yaml")], [f"model.path={model}", *overrides]), shape

    return build


# --- the account ---


def accounts_of_the_docs() -> list[tuple[str, str, float]]:
    """Size, checkpointing and milliseconds of 16,384 tokens, as `benchmarks/roofline.py` computes them with kernels."""
    page = (ROOT / "docs/performance.md").read_text()
    lines = re.findall(r"^\| (\S+B) \| (\w+) \| kernels \|.* ([\d,]+) ms \| 0\.\d+ \|$", page, re.MULTILINE)
    return [(size, kind, float(ms.replace(",", ""))) for size, kind, ms in lines]


@pytest.mark.parametrize(("size", "kind", "milliseconds"), accounts_of_the_docs())
def test_the_formula_gives_what_running_the_model_on_the_meta_device_gives(
    make: Any, size: str, kind: str, milliseconds: float
) -> None:
    checkpointing = {"off": "false", "full": "true"}.get(kind, kind)
    lengths = ["plan.prompt_tokens=614", "plan.response_tokens=3482"]  # 85% of 4,096
    given = [f"model.gradient_checkpointing={checkpointing}", "learner.max_tokens_per_microbatch=16384", *lengths]
    config, shape = make(f"Qwen/Qwen2.5-{size}", *given)
    assert 16384e3 * speed.compute_s(shape, config) == pytest.approx(milliseconds, rel=0.02)


def test_the_page_has_accounts_of_three_sizes_and_each_checkpointing() -> None:
    kinds = {(size, kind) for size, kind, _ in accounts_of_the_docs()}
    assert kinds == {(size, kind) for size in ("1.5B", "7B", "32B") for kind in ("off", "selective", "full", "tiled")}


def test_a_decoding_step_reads_weights_and_cache_once(make: Any) -> None:
    config, shape = make(SMALL, "plan.prompt_tokens=100", "plan.response_tokens=200", "rollout.samples_per_prompt=2",
                         "rollout.prompts_per_step=4")  # fmt: skip
    # 2 sequences for each engine: 3.09 GB of weights, 200 tokens of 28 KiB twice, 8 logits of 152k and two floors
    seconds = (3.087e9 + 2 * 200 * 28_672 + 2 * 151_936 * 24) / 2.8e12 + 4e-3 + 2e-5
    prefill = 2 * shape.active_parameters * 100 / 2 / 680e12
    expected = 200 / (200 * seconds / 2 + prefill)
    assert speed.decode_tokens_per_second(shape, config) == pytest.approx(expected, rel=1e-3)


def test_the_bytes_between_learners_by_hand(make: Any) -> None:
    config, shape = make(SMALL, "plan.prompt_tokens=256", "plan.response_tokens=256", "algo.kl_coef=0.1")
    ((role, training),) = config.trained_roles()
    # 2,048 x 512 tokens in microbatches of 4 x 8,192: 32 for each learner; one update, and a pass of the reference
    gigabytes = shape.parameters * 2 / 1e9 * 3 / 4  # of one gather in bfloat16 among 4 learners
    sent = {}
    for stage in (0, 1, 2, 3):
        section = training.section.model_copy(update={"zero_stage": stage})
        bytes_sent = speed.communicated_bytes(role, replace(training, section=section), config, shape, 32)
        sent[stage] = bytes_sent / 1e9 / gigabytes
    assert speed.microbatches_per_update(config, training) == 32
    assert sent == pytest.approx({0: 2, 1: 3, 2: 2 * 32 + 1, 3: 3 * 32 + 32})
    alone, _ = make(SMALL, "cluster.learners=1")
    assert speed.communicated_bytes(*alone.trained_roles()[0], alone, shape, 32) == 0


def test_compute_and_memory_bandwidth_of_another_card_are_scaled_apart(make: Any) -> None:
    here, shape = make(SMALL)
    l40s, _ = make(SMALL, "cluster.gpu=L40S")
    memory, _ = make(SMALL, "cluster.gpu=L40S", "cluster.peak_tflops=989")
    products = 989 / 362 * speed.compute_s(shape, here)
    assert 0.9 * products < speed.compute_s(shape, l40s) < 1.3 * products
    assert speed.compute_s(shape, here) < speed.compute_s(shape, memory) < 3350 / 864 * speed.compute_s(shape, here)
    sampled = [speed.decode_tokens_per_second(shape, config) for config in (here, l40s)]
    assert 2 < sampled[0] / sampled[1] < 3350 / 864
    assert speed.link_bytes_per_second(l40s) == pytest.approx(300e9 * 64 / 900)  # PCIe
    assert speed.card_name(make(SMALL, "cluster.gpu_memory_gib=22")[0]) == "L4"


# --- layouts ---


def layouts_of(config: GRPOConfig, shape: ModelShape, gpus: int = 8) -> dict[str, Any]:
    return {kind: fastest_layout(config, shape, gpus, kind, Scale.of(config, shape)) for kind in KINDS}


def test_shared_gpus_halve_a_step_without_a_lag_where_sampling_and_training_take_as_long(make: Any) -> None:
    speeds = ["plan.engine_tokens_per_second=4000", "plan.learner_tokens_per_second=7000"]
    config, shape = make(SMALL, *speeds)
    found = layouts_of(config, shape)
    separate, lagging, shared, shared_lagging = (found[kind] for kind in KINDS)
    sampled, tokens = 2048 * 3072, 2048 * 4096  # at most 393 s and 300 s with four GPUs each
    assert separate.seconds == pytest.approx(min(sampled / 4e3 / n + tokens / 7e3 / (8 - n) for n in range(1, 8)))
    assert lagging.seconds == pytest.approx(min(max(sampled / 4e3 / n, tokens / 7e3 / (8 - n)) for n in range(1, 8)))
    assert shared.seconds == pytest.approx((sampled / 4e3 + tokens / 7e3) / 8, rel=0.02)  # and taking turns
    assert shared_lagging.seconds == pytest.approx(shared.seconds, rel=0.02)  # a measured speed has the tail in it
    assert (shared.config.cluster.learners, shared.config.cluster.engines) == (8, 8)
    own = step_time(config, shape)
    assert own is not None
    assert own.total == pytest.approx(sampled / 16e3 + tokens / 28e3)


@pytest.mark.parametrize("name", ["math", "one_gpu_24gb", "one_gpu_80gb"])
def test_the_configs_of_the_repository_have_the_best_layout_with_their_lag(name: str) -> None:
    config = load_config(GRPOConfig, [str(ROOT / f"configs/{name}.yaml")])
    shape = shape_at(config.model.path)
    assert shape is not None
    (search,) = search_until_fit(config, shape)
    best = search.best(config.rollout.max_policy_lag)
    assert best is not None
    assert changed_keys(config, best.config) == AS_SET
    if name != "math":
        assert isinstance(search.layouts["separate"], str)  # one GPU is shared


def test_with_a_lag_the_longest_response_has_the_time_of_two_steps() -> None:
    turn = StepTime(update=3.0, sending=0.0, host=0.0, sampling=10.0, tail=6.0, turns=0.5, shared=True)
    assert turn.total == 0.5 + 3 + 10
    assert replace(turn, lag=1, interrupted=0.25).total == 0.5 + 0.25 + 3 + 10 / 2
    assert replace(turn, lag=2).total == 0.5 + 3 + 4  # engines that are always full
    apart = replace(turn, turns=0.0, shared=False)
    assert apart.total == 3 + 10
    assert replace(apart, lag=1).total == (3 + 10) / 2  # and at least the larger of 4 and 3
    assert replace(apart, lag=3).total == 4


def test_a_lag_on_shared_gpus_takes_no_memory(make: Any) -> None:
    shared = [make(SMALL, "cluster.placement=colocated", f"rollout.max_policy_lag={lag}") for lag in (0, 1)]
    none, one = (memory_of_roles(config, shape) for config, shape in shared)
    assert [each.parts for each in none] == [each.parts for each in one]


def test_a_layout_that_the_config_contradicts_says_so(make: Any) -> None:
    config, shape = make(SMALL, "algo.importance_correction=none")
    assert "lagging rollouts need a correction" in layouts_of(config, shape)["separate, lag 1"]
    assert isinstance(layouts_of(config, shape)["colocated"], Layout)


@pytest.mark.parametrize(
    ("model", "gpus", "seconds"),  # of the kinds of layout, in docs/gpu.md
    [
        ("Qwen2.5-32B", 8, (221.4, 121.2, 126.8, 106.1)),
        ("Qwen2.5-32B", 16, (158.8, 85.1, 93.1, 78.6)),
        ("Qwen3-30B-A3B", 8, (77.3, 52.0, 47.6, 43.3)),
    ],
)
def test_large_models_fit_on_one_and_two_nodes(make: Any, model: str, gpus: int, seconds: tuple[float, ...]) -> None:
    config, shape = make(
        f"Qwen/{model}", "rollout.samples_per_prompt=8", "plan.prompt_tokens=200", "plan.response_tokens=1000",
        "cluster.threads_per_learner=12",
    )  # fmt: skip
    fitting = list(layouts_of(config, shape, gpus).values())
    assert [round(layout.seconds, 1) for layout in fitting] == list(seconds)
    assert [layout.config.learner.offload_optimizer for layout in fitting] == [gpus == 8] * 4


def test_where_nothing_fits_whole_nodes_are_tried_and_the_reason_is_named(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "NODES", (1, 2))  # 4 and 8 take seconds
    config, shape = make(LARGE, "cluster.learners=1", "cluster.engines=1", "cluster.gpu_memory_gib=8")
    searched = search_until_fit(config, shape)
    assert [search.gpus for search in searched] == [2, 8, 16]
    assert not any(search.best(0) for search in searched)
    assert re.match(r"a learner needs [\d.]+ of 8 GiB", searched[-1].layouts["separate"])


def test_the_stage_is_the_first_that_fits(make: Any) -> None:
    config, shape = make(SMALL, "learner.zero_stage=2", "model.gradient_checkpointing=true")
    assert with_fewest_bytes(config, shape)[0].learner.zero_stage == 1
    config, shape = make("Qwen/Qwen2.5-7B", "cluster.gpu_memory_gib=70", "model.gradient_checkpointing=true")
    assert with_fewest_bytes(config, shape)[0].learner.zero_stage == 2
