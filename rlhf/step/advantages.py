"""Rewards of rollouts -> advantages of rollouts (GRPO and its family), or advantages and returns of tokens (PPO).

Both are computed on the driver for all rollouts of a step, so the result depends neither on the number of learners nor
on the token budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf.algo import advantages as adv
from rlhf.algo.kl import KLController, kl_per_token
from rlhf.algo.own_functions import ObjectiveError, own_advantages
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.config.reward import FLOAT32_MAX
from rlhf.config.sections import AlgoConfig
from rlhf.config.teacher import TeacherConfig
from rlhf.processes.code import load_function
from rlhf.step.batch import sum_over_responses
from rlhf.types import StepBatch

# --- rollouts ---


def penalize_kl(
    batch: StepBatch,
    rows_to_compute: np.ndarray,
    old_logprobs: np.ndarray | None,
    ref_logprobs: np.ndarray | None,
    algo: AlgoConfig,
) -> np.ndarray:
    """[R] rewards minus kl_coef times the KL to the reference, summed over the sampled tokens of the rollout.

    The log-probs [N] of rows outside `rows_to_compute` [B] bool are unknown. The reward of their rollouts becomes NaN,
    which keeps them out of the baseline.
    """
    assert old_logprobs is not None, "a KL in the reward needs both columns"
    assert ref_logprobs is not None
    old, ref = torch.from_numpy(old_logprobs), torch.from_numpy(ref_logprobs)
    kl = kl_per_token(old, ref, estimator=algo.kl_estimator).numpy()
    unknown = batch.per_rollout(np.where(rows_to_compute, 0, 1)) > 0
    rewards = np.where(unknown, np.nan, batch.rewards - algo.kl_coef * sum_over_responses(batch, kl))
    return np.where(np.abs(rewards) <= FLOAT32_MAX, rewards, np.nan)


def step_advantages(
    batch: StepBatch,
    rewards: np.ndarray,
    kind: str | Callable[..., Any],
    normalize_over: str = "responses",
    metrics: dict[str, float] | None = None,
) -> np.ndarray:
    """[R] advantage of each rollout; 0 for unscorable ones. `kind` is a value of `algo.advantage`, or a function.

    A function of the user gets the rewards [R'] and groups [R'] of the scorable rollouts only.

    Args:
        rewards: [R], with or without the KL penalty; NaN is unscorable. Equal rewards are recognized by
            `batch.rewards`, which have no penalty.
        normalize_over: whether the statistics of REINFORCE++ count responses or tokens, as `algo.normalize_over`.
        metrics: gets those that a function of the user returns.
    """
    if callable(kind) or ":" in kind:
        function = kind if callable(kind) else load_function(kind)
        scorable = ~np.isnan(rewards)
        advantages = np.zeros_like(rewards)
        if scorable.any():
            groups, counts = batch.groups[scorable], batch.per_rollout(batch.response_lengths)[scorable]
            given, numbers, sampled = map(torch.from_numpy, (rewards[scorable], groups, counts))
            rows = [batch.prompt_rows[group] for group in groups]
            try:
                own, logged = own_advantages(function, given, numbers, rows, sampled)
            except ObjectiveError as error:
                if callable(kind):
                    raise
                raise RuntimeError(f"algo.advantage={kind}: {error}. Correct it, and go on with --resume.") from None
            advantages[scorable] = own.numpy()
            if metrics is not None:
                metrics.update({f"own/advantage/{name}": value for name, value in logged.items()})
        return advantages
    lengths = torch.from_numpy(batch.per_rollout(batch.response_lengths)) if normalize_over == "tokens" else None
    groups = torch.from_numpy(batch.groups)
    before_kl = torch.from_numpy(batch.rewards)
    return adv.advantages_by_name(
        kind, torch.from_numpy(rewards), groups, rewards_before_kl=before_kl, lengths=lengths
    ).numpy()


# --- tokens ---


def add_teacher_advantages(
    batch: StepBatch,
    advantages: np.ndarray,
    old_logprobs: np.ndarray,
    teacher_logprobs: np.ndarray,
    taught: np.ndarray,
    teacher: TeacherConfig,
) -> tuple[np.ndarray, dict[str, float]]:
    """Add the teachers' advantages to the advantages of the reward: [N] float32, and metrics.

    Args:
        advantages: [N], from the reward; 0 where teachers replace it.
        old_logprobs, teacher_logprobs: [N].
        taught: [B] bool, trained rows that have a teacher. The advantages of other rows are unchanged.
    """
    mask = batch.tokens.response_mask & np.repeat(taught, batch.tokens.lengths)
    old, teacher_values = torch.from_numpy(old_logprobs), torch.from_numpy(teacher_logprobs)
    judged = adv.distillation_advantages(old, teacher_values, coef=teacher.coef).numpy()
    kl = (old_logprobs - teacher_logprobs)[mask]
    metrics = {"policy/teacher_kl": float(kl.mean(dtype=np.float64))} if len(kl) else {}
    return np.where(mask, advantages + judged, advantages).astype(np.float32), metrics


@dataclass(frozen=True)
class Credit:
    """Targets of a step's updates, [N] float32 and 0 outside trained responses, and metrics to log."""

    advantages: np.ndarray
    returns: np.ndarray
    metrics: dict[str, float]


def make_kl_controller(algo: PPOAlgoConfig, restored_coef: float | None) -> KLController:
    """The controller of kl_coef. An adaptive one continues from the coefficient of the checkpoint, if there is one."""
    if algo.kl_controller == "fixed":
        return KLController(algo.kl_coef)
    return KLController(restored_coef or algo.kl_coef, target=algo.kl_target, horizon=algo.kl_horizon)


def response_kl(batch: StepBatch, old_logprobs: np.ndarray, ref_logprobs: np.ndarray) -> float:
    """Mean over trained rollouts of log pi - log pi_ref (k1), summed over their sampled tokens, in nats.

    It is the input of the controller. The columns have shape [N]; at least one rollout must be trained.
    """
    return float(np.mean(sum_over_responses(batch, old_logprobs - ref_logprobs)[batch.trained]))


def mean_over_responses(batch: StepBatch, column: np.ndarray) -> np.ndarray:
    """[R] mean of a token column [N] over the sampled tokens of each rollout; 0 if there are none."""
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
    """Advantages and returns of all tokens of the trained rollouts.

        reward of the rollout, clipped, at the last token of each of its sequences
        - kl_coef x KL at each token
        -> whitened over the step, if asked
        -> GAE with the critic's values; the value after the last token is 0
        -> advantages whitened over the step, if asked; returns are not

    Each sequence is an episode of its own: GAE does not continue from one sequence to the next.

    Args:
        values: [N], the critic's values before the first update of the step.
        old_logprobs, ref_logprobs: [N]; used only if kl_coef is above 0.
        kl_coef: the controller's coefficient; 0 if the KL is not part of the reward (algo.kl_place).
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
