"""Rewards of rollouts and the KL -> rewards, advantages and returns per token (PPO).

    reward of the rollout, clipped, at the last token of each of its sequences
    - kl_coef x KL at each token                          (algo.kl_place=reward)
    -> whitened over the step, if asked
    -> GAE with the critic's values; the value after the last token is 0
    -> advantages whitened over the step; returns are not

All of it runs on the driver over all rollouts of a step, so the result does not depend on the number of learners or
on the token budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.algo import advantages as adv
from rlhf.algo.kl import KLController, kl_per_token
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.step.batch import sum_over_responses
from rlhf.types import StepBatch


@dataclass(frozen=True)
class Credit:
    """Targets of a step's updates, both [N] float32 and 0 outside trained responses, and metrics to log."""

    advantages: np.ndarray
    returns: np.ndarray
    metrics: dict[str, float]


def make_controller(algo: PPOAlgoConfig, restored_coef: float | None) -> KLController:
    """The controller of kl_coef that the config asks for; an adaptive one goes on from the checkpoint's coefficient."""
    if algo.kl_controller == "fixed":
        return KLController(algo.kl_coef)
    return KLController(restored_coef or algo.kl_coef, target=algo.kl_target, horizon=algo.kl_horizon)


def response_kl(batch: StepBatch, old_logprobs: np.ndarray, ref_logprobs: np.ndarray) -> float:
    """Mean over trained rollouts of log pi - log pi_ref summed over all that was sampled (k1), in nats.

    It is the input of the controller.

    Args:
        old_logprobs, ref_logprobs: [N]; at least one rollout is trained.
    """
    return float(np.mean(sum_over_responses(batch, old_logprobs - ref_logprobs)[batch.trained]))


def mean_over_responses(batch: StepBatch, column: np.ndarray) -> np.ndarray:
    """[R] mean of a token column [N] over all that was sampled in each rollout; 0 where nothing was."""
    return sum_over_responses(batch, column) / np.maximum(batch.per_rollout(batch.response_lengths), 1)


def assign_credit(
    batch: StepBatch,
    values: np.ndarray,
    old_logprobs: np.ndarray | None,
    ref_logprobs: np.ndarray | None,
    *,
    kl_coef: float,
    algo: PPOAlgoConfig,
) -> Credit:
    """Token rewards, GAE and whitening over all rollouts that are trained on.

    Each sequence is an episode of its own: GAE does not go from one to the next, and the last token of each gets the
    reward of its rollout.

    Args:
        values: [N], the critic's values before the first update of the step.
        old_logprobs, ref_logprobs: [N]; used only if kl_coef is above 0.
        kl_coef: the controller's coefficient; 0 if the KL is not part of the reward.
    """
    rows = np.flatnonzero(batch.trained_rows)
    advantages, returns = np.zeros_like(values), np.zeros_like(values)
    if not batch.response_lengths[rows].any():
        return Credit(advantages, returns, {})
    index, tokens = batch.tokens.token_indices(rows), batch.tokens.take(rows)

    def column(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x[index]).double()

    mask, cu_seqlens = torch.from_numpy(tokens.response_mask), torch.from_numpy(tokens.cu_seqlens)
    scores = torch.from_numpy(batch.rewards[batch.rollouts[rows]])
    if algo.reward_clip is not None:
        scores = scores.clamp(-algo.reward_clip, algo.reward_clip)
    old_values = column(values)
    penalties = torch.zeros_like(old_values)
    if kl_coef > 0:
        assert old_logprobs is not None
        assert ref_logprobs is not None
        penalties = kl_coef * kl_per_token(
            column(old_logprobs), column(ref_logprobs), estimator=algo.kl_estimator, response_mask=mask
        )
    rewards = adv.token_rewards(scores, penalties, mask, cu_seqlens)
    if algo.whiten_rewards != "none":
        rewards = adv.whiten(rewards, mask, shift_mean=algo.whiten_rewards == "shift")
    estimate = adv.gae(rewards, old_values, mask, cu_seqlens, gamma=algo.gamma, lam=algo.lam)
    whitened = adv.whiten(estimate.advantages, mask) if algo.whiten_advantages else estimate.advantages
    advantages[index], returns[index] = whitened.float().numpy(), estimate.returns.float().numpy()
    metrics = {
        "critic/return": float(estimate.returns[mask].mean()),
        "critic/return_std": float(estimate.returns[mask].std(correction=0)),
        "policy/advantage_raw_std": float(estimate.advantages[mask].std(correction=0)),
        "reward/token_sum": float(rewards[mask].sum() / len(rows)),
    }
    # With lambda below 1 the returns contain the critic's own values, of which any critic would explain much.
    sampled = adv.gae(rewards, torch.zeros_like(rewards), mask, cu_seqlens, gamma=algo.gamma, lam=1.0)
    explained = adv.explained_variance(old_values, sampled.returns, mask)
    if np.isfinite(explained):
        metrics["critic/explained_variance"] = explained
    return Credit(advantages, returns, metrics)
