"""Whole steps of two learners that share each row: passes, gradients and metrics are those of one learner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import make_family, write_family
from worlds import (
    column_of_shard,
    make_config,
    make_groups,
    plan_first_epoch,
    record_gradients,
    relative_error,
    run_world,
)

from rlhf.config.program import with_values
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, StepBatch, Support, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 3, "samples": 3, "vocabulary": 250, "longest": 40, "seed": 3}
LORA = {"rank": 4, "targets": ["gate_proj", "down_proj"]}  # the first layer's attention has no gradient
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA, full checkpointing, supports": ("qwen3", {"model": {"lora": LORA, "gradient_checkpointing": True}}),
    "selective checkpointing, a deterministic run, ZeRO-3": (
        "qwen3",
        {"model": {"gradient_checkpointing": "selective"}, "learner": {"zero_stage": 3}},
    ),
    "balanced experts, a moving reference, an offloaded optimizer": (
        "qwen3_moe",
        {"learner": {"router_balance_coef": 0.1, "offload_optimizer": True}, "algo": {"ref_update": "average"}},
    ),
    "replayed experts, full checkpointing": ("qwen3_moe", {"model": {"gradient_checkpointing": True}}),
    "a wrapped text model, teacher over the vocabulary, tiled checkpointing": (
        "qwen3_vl",
        {
            "model": {"gradient_checkpointing": "tiled"},
            "algo": {"teacher": {"path": "teacher", "over": "vocabulary"}},
        },
    ),
    "bfloat16": ("qwen3", {"model": {"dtype": "bfloat16"}}),
}
ROUNDING, IN_BFLOAT16 = 2e-5, 2e-2


def config_for(case: str, folder: Path, world: World) -> Any:
    family, sections = CASES[case]
    sections = {name: dict(values) for name, values in sections.items()}
    if teacher := sections.get("algo", {}).get("teacher"):
        sections["algo"]["teacher"] = teacher | {"path": str(folder / teacher["path"])}
    learner = {"max_tokens_per_microbatch": 160 // world.size, "epochs_per_step": 2, "optimizer": {"lr": 1e-2}}
    config = make_config(
        folder / family,
        **sections
        | {
            "algo": {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.01} | sections.get("algo", {}),
            "learner": learner | sections.get("learner", {}),
            "cluster": {"learners": world.size, "sequence_parallel": world.sequence_parallel},
        },
    )
    if case.startswith("replayed"):  # no config of a run says this on CPU, where no engine returns experts
        config = with_values(config, learner={"router_replay": "rollout"})
    return config


def recorded(case: str, batch: StepBatch) -> StepBatch:
    """The batch with records of its engine where the case has some."""
    tokens, rng = batch.tokens, np.random.default_rng(0)
    if case.startswith("replayed"):
        drawn = np.tile(np.arange(4, dtype=np.uint8), (len(tokens.token_ids), 4, 1))
        tokens = replace(tokens, experts=rng.permuted(drawn, axis=2)[..., :2])
    if case.endswith("supports"):
        kept = [
            np.union1d(rng.integers(0, 250, 20), [token]) if sampled else np.zeros(0, np.int64)
            for token, sampled in zip(tokens.token_ids, tokens.response_mask, strict=True)
        ]
        tokens = replace(tokens, support=Support.from_sizes(np.concatenate(kept), np.array(list(map(len, kept)))))
    return replace(batch, tokens=tokens)


def steps(world: World, folder: Path) -> dict[str, Any]:
    """Case -> columns of the passes, gradients of both updates, and their metrics, on this rank."""
    from rlhf.learner import tiles
    from rlhf.learner.policy import Learner

    tiles.MLP_TILE = {"cpu": 16}
    results = {}
    for case in CASES:
        config = config_for(case, folder, world)
        learner = Learner(config, replace(world, deterministic="deterministic" in case))
        gradients = record_gradients(learner)
        batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
        batch = recorded(case, batch)
        learner.start_step(batch.tokens, [minibatches] * 2)
        columns = [column_of_shard(batch, minibatches, world.shard, numbers) for numbers in learner.logprobs()]
        outcomes = learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), *columns))
        metrics = [{name: metric.value() for name, metric in x.metrics.items()} for x in outcomes]
        results[case] = columns, gradients, metrics
    return results


def test_with_every_option_a_step_is_that_of_one_learner(tmp_path: Path) -> None:
    for family in {family for family, _ in CASES.values()}:
        write_family(family, tmp_path / family)
    make_family("qwen3", num_hidden_layers=1).save_pretrained(tmp_path / "teacher")
    (alone,) = run_world(steps, 1, tmp_path)
    for results in run_world(steps, 2, tmp_path, sequence_parallel=2):
        for case, (columns, gradients, metrics) in results.items():
            bound = IN_BFLOAT16 if case == "bfloat16" else ROUNDING
            expected_columns, expected_gradients, expected_metrics = alone[case]
            np.testing.assert_allclose(columns, expected_columns, rtol=0, atol=bound, err_msg=case)
            assert relative_error(gradients[0], expected_gradients[0]) < bound, case
            first = metrics[0]
            assert first["policy/ratio"] == first["policy/ratio_max"] == 1.0, case
            assert first["policy/kl_k1"] == first["policy/kl_k2"] == first["policy/kl_old"] == 0.0, case
            assert metrics[1]["policy/ratio_max"] > 1.001, case
            for ours, theirs in zip(metrics, expected_metrics, strict=True):
                assert ours.keys() == theirs.keys(), case
                measured = {name for name in ours if name.endswith("seconds") or "histogram" in name}
                for name in ours.keys() - measured:
                    if not np.isnan(theirs[name]):
                        assert ours[name] == pytest.approx(theirs[name], rel=10 * bound, abs=bound), (case, name)
