"""Rollouts whose advantage is exactly 0 are not computed where nothing else gives them a gradient; nothing changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from worlds import make_config, make_groups, run_world

from rlhf.learner.attention import PACKED
from rlhf.learner.messages import Place
from rlhf.learner.model import DeviceTokens, PolicyModel
from rlhf.learner.update import PolicyObjective, policy_microbatch
from rlhf.step import batching
from rlhf.types import Minibatch, RolloutGroup

NOWHERE = Path("nowhere/model")
VOCABULARY = 61


def groups_with_equal_ones(equal: tuple[int, ...], *, groups: int = 5) -> list[RolloutGroup]:
    """Groups of 4 with random rewards, but the same reward throughout in some of them."""
    found = make_groups(groups=groups, samples=4, vocabulary=VOCABULARY, longest=30, seed=2)
    return [
        RolloutGroup(g.prompt, tuple(dataclasses.replace(s, reward=0.1) for s in g.samples)) if i in equal else g
        for i, g in enumerate(found)
    ]


def plan(groups: list[RolloutGroup], config: Any, *, skip: bool) -> tuple[list[Minibatch], np.ndarray, np.ndarray]:
    samples = batching.flatten(groups)
    trains = batching.trained_rows(samples, mask_truncated=False)
    advantages = batching.step_advantages(batching.penalized_rewards(samples, None, 0.0), groups, config.algo.advantage)
    works = batching.work_rows(trains, advantages, config) if skip else trains
    return batching.plan_epochs(samples, trains, config, step=0, works=works)[0], advantages, works


def rows_of(minibatch: Minibatch) -> set[int]:
    return {int(row) for rank in minibatch.microbatches for packed in rank for row in packed.rows if row >= 0}


def test_only_rollouts_with_an_advantage_are_packed_and_all_are_counted() -> None:
    config = make_config(NOWHERE, learner={"minibatches_per_epoch": 2})
    groups = groups_with_equal_ones((1, 3))
    full, _, _ = plan(groups, config, skip=False)
    lean, advantages, works = plan(groups, config, skip=True)
    assert works.tolist() == [i // 4 not in (1, 3) for i in range(20)]
    assert (advantages[~works] == 0).all()
    for one, other in zip(full, lean, strict=True):
        assert rows_of(other) == {row for row in rows_of(one) if works[row]}
        assert one.denominators == other.denominators


@pytest.mark.parametrize("algo", [{"kl_coef": 0.1, "kl_estimator": "k3"}, {"entropy_coef": 0.01}, {"log_kl": True}])
def test_with_a_kl_or_an_entropy_bonus_in_the_loss_or_a_kl_in_the_log_none_is_skipped(algo: Any) -> None:
    config = make_config(NOWHERE, algo=algo)
    _, advantages, works = plan(groups_with_equal_ones((1, 3)), config, skip=True)
    assert (advantages == 0).sum() == 8
    assert works.all()


def test_a_minibatch_without_any_advantage_keeps_a_filler_for_every_learner_so_that_it_still_steps() -> None:
    config = make_config(NOWHERE, cluster={"device": "cpu", "learners": 2})
    (minibatch,), _, works = plan(groups_with_equal_ones((0, 1, 2, 3, 4)), config, skip=True)
    assert not works.any()
    assert [len(rank) for rank in minibatch.microbatches] == [1, 1]
    assert rows_of(minibatch) == set()
    assert minibatch.denominators.sequences == 20


def gradients(model: PolicyModel, groups: list[RolloutGroup], config: Any, *, skip: bool) -> list[torch.Tensor]:
    """Of the whole step's loss, in float64."""
    minibatches, advantages, _ = plan(groups, config, skip=skip)
    rng = np.random.default_rng(7)
    old = {
        row: (s.rollout.rollout_logprobs + rng.normal(0, 0.3, len(s.rollout.token_ids))).astype(np.float32)
        for row, s in enumerate(batching.flatten(groups))
    }
    objective = PolicyObjective.of(config)
    model.zero_grad(set_to_none=True)
    for minibatch in minibatches:
        for packed in minibatch.microbatches[0]:
            tokens = DeviceTokens.of(packed, torch.device("cpu"))
            targets = batching.policy_targets(packed, advantages, old, {})
            loss, _ = policy_microbatch(model, tokens, targets, minibatch.denominators, objective)
            loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_gradient_is_the_same_to_the_last_digits_of_float64(policy_loss: str, aggregation: str, level: str) -> None:
    algo = {"policy_loss": policy_loss, "loss_aggregation": aggregation, "importance_level": level}
    config = make_config(
        NOWHERE,
        rollout={"max_policy_lag": 1},
        algo={**algo, "dual_clip": 3.0 if policy_loss == "ppo" else None},
        learner={"minibatches_per_epoch": 2, "max_tokens_per_microbatch": 128},
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    transformer = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1)).double()
    transformer.set_attn_implementation(PACKED)
    model = PolicyModel(transformer, temperature=1.0)
    groups = groups_with_equal_ones((0, 2, 3))
    full = gradients(model, groups, config, skip=False)
    lean = gradients(model, groups, config, skip=True)
    assert all(bool(g.abs().max() > 0) for g in full)
    for one, other in zip(full, lean, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def steps_without_and_with_advantages(place: Place, model: Path) -> list[tuple[float, float, bool]]:
    """Two updates through DeepSpeed, the first without a single advantage: gradient norm, updates taken, moved."""
    from rlhf.learner.worker import Learner

    config = make_config(
        model,
        learner={"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 512},
        cluster={"device": "cpu", "learners": place.world_size},
    )
    learner = Learner(config, place)
    found = []
    for equal in ((0, 1, 2, 3, 4), (1, 3)):
        groups = groups_with_equal_ones(equal)
        minibatches, advantages, works = plan(groups, config, skip=True)
        assert works.sum() == 4 * (5 - len(equal))
        old = {row: s.rollout.rollout_logprobs for row, s in enumerate(batching.flatten(groups))}
        before = [p.detach().clone() for p in learner.names.values()]
        (metrics,) = learner.update(batching.learner_minibatches(minibatches, advantages, old, {})[place.rank])
        moved = any(not torch.equal(one, p) for one, p in zip(before, learner.names.values(), strict=True))
        norm, taken = metrics["learner/grad_norm"].value(), metrics["learner/updates_taken"].value()
        found.append((norm, taken, moved))
    return found


@pytest.mark.stack
def test_a_minibatch_of_which_nothing_is_computed_still_takes_its_step_on_every_rank(tiny_model_dir: Path) -> None:
    for first, second in run_world(steps_without_and_with_advantages, 2, tiny_model_dir / "model"):
        assert first == (0.0, 1.0, False)  # no gradient and no momentum yet
        assert second[0] > 0
        assert second[1:] == (2.0, True)
