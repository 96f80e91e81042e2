"""A step through the learners of GRPO and PPO with the KL in the reward, against formulas for single sequences.

The policy is moved away from its reference first, so that the KL counts. The formulas use transformers and loops.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import (
    column_of_shard,
    make_config,
    make_groups,
    make_ppo_config,
    plan_epochs,
    random_column,
    record_gradients,
    rows_of_minibatch,
    run_world,
)

from rlhf.config.sections import AlgoConfig
from rlhf.step.advantages import assign_credit, penalize_kl, step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.types import Minibatch, PolicyTargets, StepBatch, World

pytestmark = pytest.mark.stack

GROUPS: dict[str, Any] = {"groups": 4, "samples": 4, "vocabulary": 250, "longest": 60, "seed": 3}
BETA, GAMMA, LAMBDA = 0.1, 0.99, 0.9
LEARNERS = 2


def config_for(model: Path, program: str) -> Any:
    algo = {"kl_coef": BETA, "kl_place": "reward", "kl_estimator": "k1", "importance_correction": "none"}
    make, more = (make_config, {}) if program == "grpo" else (make_ppo_config, {"gamma": GAMMA, "lam": LAMBDA})
    return make(
        model,
        algo={**algo, **more},
        learner={"max_tokens_per_microbatch": 300, "minibatches_per_epoch": 2, "optimizer": {"lr": 0.0}},
        cluster={"device": "cpu", "learners": LEARNERS},
    )


def advantages_of(config: Any, batch: StepBatch, old: np.ndarray, ref: np.ndarray, program: str) -> np.ndarray:
    """[N], as the program has them."""
    if program == "ppo":
        return assign_credit(batch, random_column(batch, 1), old, ref, kl_coef=BETA, algo=config.algo).advantages
    rewards = penalize_kl(batch, batch.trained_rows, old, ref, AlgoConfig(kl_estimator="k1", kl_coef=BETA))
    return broadcast_to_tokens(batch, step_advantages(batch, rewards, "grpo"))


def step_of_rank(world: World, model: Path, program: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Weights of the moved policy, and the gradients of the first of two minibatches, by name."""
    from rlhf.learner.policy import Learner

    config = config_for(model, program)
    batch = make_batch(make_groups(**GROUPS), mask_truncated=False)
    (minibatches,) = epochs = plan_epochs(batch, config, step=0)
    learner = Learner(config, world)
    seen = record_gradients(learner)
    learner.perturb_weights()
    weights = {name: tensor.numpy().copy() for name, tensor in learner}
    learner.start_step(batch.tokens, epochs)
    columns = []
    for numbers in learner.logprobs():
        column = torch.from_numpy(column_of_shard(batch, minibatches, world.rank, numbers))
        torch.distributed.all_reduce(column)
        columns.append(column.numpy())
    learner.update(PolicyTargets(advantages_of(config, batch, *columns, program), *columns))
    return weights, seen[0]


def response_logprobs(net: Any, batch: StepBatch) -> list[torch.Tensor]:
    """Of each row, log-probs of its response tokens."""
    logprobs = []
    for row in range(len(batch.rewards)):
        tokens = batch.tokens.take(np.array([row]))
        ids, mask = torch.from_numpy(tokens.token_ids).long(), torch.from_numpy(tokens.response_mask)
        log_softmax = torch.log_softmax(net(input_ids=ids[None]).logits[0, :-1], -1)
        logprobs.append(log_softmax.gather(-1, ids[1:, None])[:, 0][mask[1:]])
    return logprobs


def plain_grpo_advantages(batch: StepBatch, kl: list[np.ndarray]) -> list[np.ndarray]:
    """(r - mean) / std of each group, of rewards less beta times the KL of the response."""
    rewards = np.array([r - BETA * d.sum() for r, d in zip(batch.rewards, kl, strict=True)]).reshape(4, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    return [np.full(len(d), a) for a, d in zip(advantages.flat, kl, strict=True)]


def plain_ppo_advantages(batch: StepBatch, kl: list[np.ndarray]) -> list[np.ndarray]:
    """GAE by its recursion, less beta times the KL at each token, the score at the last; whitened over the step."""
    values = np.split(random_column(batch, 1).astype(np.float64), batch.tokens.cu_seqlens[1:-1])
    masks = np.split(batch.tokens.response_mask, batch.tokens.cu_seqlens[1:-1])
    advantages = []
    for row, penalty in enumerate(kl):
        value = np.append(values[row][masks[row]], 0.0)
        rewards = -BETA * penalty
        rewards[-1] += batch.rewards[row]
        estimate = np.zeros(len(rewards) + 1)
        for t in reversed(range(len(rewards))):
            estimate[t] = rewards[t] + GAMMA * value[t + 1] - value[t] + GAMMA * LAMBDA * estimate[t + 1]
        advantages.append(estimate[:-1])
    every = np.concatenate(advantages)
    return [(a - every.mean()) / every.std() for a in advantages]


def plain_gradients(model: Path, weights: dict[str, np.ndarray], program: str) -> dict[str, np.ndarray]:
    from transformers import AutoModelForCausalLM

    batch = make_batch(make_groups(**GROUPS), mask_truncated=False)
    minibatch: Minibatch = plan_epochs(batch, config_for(model, program), step=0)[0][0]
    reference, net = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    net.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    with torch.no_grad():
        ref = response_logprobs(reference, batch)
    logprobs = response_logprobs(net, batch)
    kl = [(pi.detach() - pi_ref).double().numpy() for pi, pi_ref in zip(logprobs, ref, strict=True)]
    assert np.mean([np.abs(d).mean() for d in kl]) > 0.05
    advantages = (plain_grpo_advantages if program == "grpo" else plain_ppo_advantages)(batch, kl)
    rows = rows_of_minibatch(minibatch)
    loss = sum((-torch.from_numpy(advantages[row]) * logprobs[row]).sum() for row in rows)  # the ratio is 1
    (loss / sum(len(logprobs[row]) for row in rows)).backward()
    return {name: p.grad.numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_with_the_kl_in_the_reward_a_step_of_two_learners_has_the_plain_gradient(
    tiny_model_dir: Path, program: str
) -> None:
    model = tiny_model_dir / "model"
    (weights, first), (_, second) = run_world(step_of_rank, LEARNERS, model, program)
    expected = plain_gradients(model, weights, program)
    size = sum(float((g**2).sum()) for g in expected.values()) ** 0.5
    for gradients in (first, second):
        assert gradients.keys() == expected.keys()
        error = sum(float(((gradients[n] - expected[n]) ** 2).sum()) for n in expected) ** 0.5
        assert error < 2e-5 * size
