"""Rollouts whose advantage is exactly 0 are not computed where nothing else gives them a gradient; nothing changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from worlds import make_config, make_groups, rows_of_minibatch, run_world

from rlhf.algo.packing import FILLER_TOKENS, filler
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel
from rlhf.learner.update import policy_microbatch
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs, rows_with_gradient
from rlhf.types import Minibatch, PolicyTargets, RolloutGroup, StepBatch, World

NOWHERE = Path("nowhere/model")
VOCABULARY = 61


def groups_with_equal_ones(equal: tuple[int, ...], *, groups: int = 5) -> list[RolloutGroup]:
    """Groups of 4 with random rewards, but the same reward throughout in some of them."""
    random_groups = make_groups(groups=groups, samples=4, vocabulary=VOCABULARY, longest=30, seed=2)
    return [
        RolloutGroup(g.prompt, tuple(dataclasses.replace(s, reward=0.1) for s in g.samples)) if i in equal else g
        for i, g in enumerate(random_groups)
    ]


@dataclasses.dataclass(frozen=True)
class Plan:
    batch: StepBatch
    minibatches: list[Minibatch]
    advantages: np.ndarray
    computed: np.ndarray

    def targets(self, old_logprobs: np.ndarray | None) -> PolicyTargets:
        return PolicyTargets(broadcast_to_tokens(self.batch, self.advantages), old_logprobs, None)


def plan(groups: list[RolloutGroup], config: Any, *, skip: bool) -> Plan:
    batch = make_batch(groups, mask_truncated=False)
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    computed = rows_with_gradient(batch, advantages, config) if skip else batch.trained_rows
    return Plan(batch, plan_epochs(batch, config, step=0, rows_to_compute=computed)[0], advantages, computed)


def test_only_rollouts_with_an_advantage_are_packed_and_all_are_counted() -> None:
    config = make_config(NOWHERE, learner={"minibatches_per_epoch": 2})
    groups = groups_with_equal_ones((1, 3))
    full = plan(groups, config, skip=False)
    lean = plan(groups, config, skip=True)
    assert lean.computed.tolist() == [i // 4 not in (1, 3) for i in range(20)]
    assert (lean.advantages[~lean.computed] == 0).all()
    for with_all, with_some in zip(full.minibatches, lean.minibatches, strict=True):
        assert rows_of_minibatch(with_some) == [row for row in rows_of_minibatch(with_all) if lean.computed[row]]
        assert with_some.denominators == with_all.denominators


@pytest.mark.parametrize(
    "sections",
    [
        {"algo": {"kl_coef": 0.1, "kl_estimator": "k3"}},
        {"algo": {"entropy_coef": 0.01}},
        {"algo": {"log_kl": True}},
        {"learner": {"router_balance_coef": 0.01}},
    ],
)
def test_with_another_term_in_the_loss_or_a_kl_in_the_log_none_is_skipped(sections: Any) -> None:
    config = make_config(NOWHERE, **sections)
    planned = plan(groups_with_equal_ones((1, 3)), config, skip=True)
    assert (planned.advantages == 0).sum() == 8
    assert planned.computed.all()


def test_a_minibatch_without_any_advantage_keeps_a_filler_for_every_learner_so_that_it_still_steps() -> None:
    config = make_config(NOWHERE, cluster={"device": "cpu", "learners": 2})
    planned = plan(groups_with_equal_ones((0, 1, 2, 3, 4)), config, skip=True)
    (minibatch,) = planned.minibatches
    assert not planned.computed.any()
    assert [len(rank) for rank in minibatch.microbatches] == [1, 1]
    assert rows_of_minibatch(minibatch) == []
    assert minibatch.denominators.rollouts == 20


def gradients(model: PolicyModel, groups: list[RolloutGroup], config: Any, *, skip: bool) -> list[torch.Tensor]:
    """Of the whole step's loss, in float64."""
    planned = plan(groups, config, skip=skip)
    tokens = planned.batch.tokens
    noise = np.random.default_rng(7).normal(0, 0.3, len(tokens.token_ids))
    targets = planned.targets((tokens.rollout_logprobs + noise).astype(np.float32))
    model.zero_grad(set_to_none=True)
    for minibatch in planned.minibatches:
        for rows in minibatch.microbatches[0]:
            packed = DeviceTokens.of(tokens.take(rows) if len(rows) else filler(), torch.device("cpu"))
            own = targets.take(tokens.token_indices(rows) if len(rows) else np.zeros(FILLER_TOKENS, np.int64))
            loss, _ = policy_microbatch(model, packed, own, minibatch.denominators, config)
            loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo", "sapo", "dppo_tv"])
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
    for of_all, of_some in zip(full, lean, strict=True):
        torch.testing.assert_close(of_all, of_some, rtol=1e-9, atol=1e-14)


def steps_without_and_with_advantages(world: World, model: Path) -> list[tuple[float, float, bool]]:
    """Two updates through DeepSpeed, the first without a single advantage: gradient norm, updates taken, moved."""
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        learner={"optimizer": {"lr": 1e-3}, "max_tokens_per_microbatch": 512},
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    steps = []
    for equal in ((0, 1, 2, 3, 4), (1, 3)):
        planned = plan(groups_with_equal_ones(equal), config, skip=True)
        assert planned.computed.sum() == 4 * (5 - len(equal))
        before = [p.detach().clone() for p in learner.trained.values()]
        learner.start_step(planned.batch.tokens, [planned.minibatches])
        metrics = learner.update(planned.targets(None))[0].metrics
        moved = any(not torch.equal(old, p) for old, p in zip(before, learner.trained.values(), strict=True))
        steps.append((metrics["learner/grad_norm"].value(), metrics["learner/updates_taken"].value(), moved))
    return steps


@pytest.mark.stack
def test_a_minibatch_of_which_nothing_is_computed_still_takes_its_step_on_every_rank(tiny_model_dir: Path) -> None:
    for first, second in run_world(steps_without_and_with_advantages, 2, tiny_model_dir / "model"):
        assert first == (0.0, 1.0, False)  # no gradient and no momentum yet
        assert second[0] > 0
        assert second[1:] == (2.0, True)
