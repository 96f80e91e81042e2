"""The critic's gradient, like the policy's, does not depend on learners, budgets, packing or the ZeRO stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_groups, make_ppo_config, record_gradients, relative_error, rows_of_minibatch, run_world, save

from rlhf.config.ppo import PPOConfig
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import Minibatch, ValueTargets, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 3}
BUDGETS = (128, 4096)
STAGES = (0, 1, 2, 3)


def config_for(model: Path, *, learners: int, budget: int, stage: int, shared: int = 1) -> PPOConfig:
    return make_ppo_config(
        model,
        learner={"max_tokens_per_microbatch": budget, "minibatches_per_epoch": 2},
        critic={"zero_stage": stage, "value_clip": 0.5, "optimizer": {"lr": 1e-3}},
        cluster={"device": "cpu", "learners": learners, "sequence_parallel": shared},
    )


BATCH = make_batch(make_groups(**GROUPS), mask_truncated=False)
OLD_VALUES, RETURNS = np.random.default_rng(1).normal(size=(2, len(BATCH.tokens.token_ids))).astype(np.float32)
TARGETS = ValueTargets(OLD_VALUES, RETURNS)


def minibatches_of(config: PPOConfig) -> list[Minibatch]:
    return plan_epochs(BATCH, config, step=0)[0]


def collect_gradients(world: World, model: Path, budgets: tuple[int, ...]) -> Any:
    """(stage, budget) -> gradients of the first minibatch by name, on this rank, through the real DeepSpeed engine."""
    from rlhf.learner.critic import Critic

    by_case = {}
    for stage in STAGES:
        for budget in budgets:
            shared = world.sequence_parallel
            config = config_for(model, learners=world.size, budget=budget, stage=stage, shared=shared)
            critic = Critic(config, world)
            seen = record_gradients(critic)
            critic.start_step(BATCH.tokens, [minibatches_of(config)[:1]])
            critic.update(TARGETS)
            (by_case[stage, budget],) = seen
    return by_case


def save_critic(model: Path, folder: Path) -> Path:
    """The policy's transformer with a head that is not zero, so that every gradient is there at once."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(1)
    net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    net.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def plain_gradients(model: Path) -> dict[str, np.ndarray]:
    """The first minibatch by the formula, a sequence at a time: V of the state before each response token."""
    from transformers import AutoModelForSequenceClassification

    config = config_for(model, learners=1, budget=4096, stage=0)
    rollouts = [sample.rollout for group in make_groups(**GROUPS) for sample in group.samples]
    old, returns = (np.split(column, BATCH.tokens.cu_seqlens[1:-1]) for column in (OLD_VALUES, RETURNS))
    net = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    total, tokens = torch.zeros(()), 0
    for row in rows_of_minibatch(minibatches_of(config)[0]):
        (sequence,) = rollouts[row].sequences
        states = net.base_model(input_ids=torch.from_numpy(sequence.token_ids).long()[None]).last_hidden_state[0]
        mask = torch.from_numpy(sequence.response_mask)[1:]
        values = (states[:-1] @ net.score.weight[0])[mask]
        old_row, goal = (torch.from_numpy(x[row])[1:][mask] for x in (old, returns))
        clipped = old_row + (values - old_row).clamp(-0.5, 0.5)
        total = total + 0.5 * torch.maximum((values - goal) ** 2, (clipped - goal) ** 2).sum()
        tokens += int(mask.sum())
    (total / tokens).backward()
    return {name: p.grad.numpy() for name, p in net.named_parameters()}


def test_the_critics_gradient_is_the_plain_one_for_any_learners_budget_and_zero_stage_and_with_shared_rows(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = save_critic(tiny_model_dir / "model", tmp_path / "critic")
    expected = plain_gradients(model)
    assert all(np.abs(g).max() > 0 for g in expected.values())
    for learners, shared, budgets in ((1, 1, BUDGETS), (2, 1, BUDGETS), (2, 2, (64,))):
        by_rank = run_world(collect_gradients, learners, model, budgets, sequence_parallel=shared)
        for rank, by_case in enumerate(by_rank):
            assert len(by_case) == len(budgets) * len(STAGES)
            for case, gradients in by_case.items():
                assert relative_error(gradients, expected) < 2e-5, (learners, shared, rank, case)


def first_values(world: World, model: Path) -> np.ndarray:
    from rlhf.learner.critic import Critic

    config = config_for(model, learners=1, budget=4096, stage=2)
    critic = Critic(config, world)
    critic.start_step(BATCH.tokens, [minibatches_of(config)])
    return critic.values()[0]


def test_a_critic_from_a_reward_model_starts_with_its_head_over_the_recorded_std(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model = save_critic(tiny_model_dir / "model", tmp_path / "reward")
    (raw,) = run_world(first_values, 1, model)
    (model / "reward_normalization.json").write_text('{"mean": 3.0, "std": 4.0}')
    (scaled,) = run_world(first_values, 1, model)
    assert np.abs(raw).max() > 0.1
    np.testing.assert_allclose(scaled, raw / 4.0, rtol=1e-5, atol=1e-7)


def train_save_resume(world: World, model: Path, folder: Path) -> dict[str, Any]:
    from rlhf.learner.critic import Critic

    config = config_for(model, learners=1, budget=4096, stage=2)
    critic = Critic(config, world)
    critic.start_step(BATCH.tokens, [minibatches_of(config)])
    (before,) = critic.values()
    critic.update(TARGETS)
    folder.mkdir()
    save(critic, folder)
    critic.update(TARGETS)
    resumed = Critic(config, world)
    resumed.load(str(folder))
    resumed.start_step(BATCH.tokens, [minibatches_of(config)])
    metrics = resumed.update(TARGETS)[0].metrics
    return {
        "before": before,
        "whole": critic.values()[0],
        "resumed": resumed.values()[0],
        "steps": resumed.adam_steps,
        "metrics": list(metrics),
    }


def test_a_critic_from_a_language_model_starts_at_value_0_and_resumes_where_its_checkpoint_stood(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    (results,) = run_world(train_save_resume, 1, tiny_model_dir / "model", tmp_path / "checkpoint")
    assert np.all(results["before"] == 0.0)
    assert np.abs(results["whole"]).max() > 0
    np.testing.assert_allclose(results["resumed"], results["whole"], rtol=0, atol=1e-5)
    assert results["steps"] == 4
    assert {"critic/lr", "critic/grad_norm", "critic/loss", "critic/updates_taken"} <= set(results["metrics"])
