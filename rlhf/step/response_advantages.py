"""Rewards of rollouts -> advantages of rollouts (GRPO and its family), with or without a KL penalty in the reward."""

from __future__ import annotations

import numpy as np
import torch

from rlhf.algo.advantages import advantages_of_kind
from rlhf.algo.kl import kl_per_token
from rlhf.config.sections import AlgoConfig
from rlhf.step.batch import sum_over_responses
from rlhf.types import StepBatch


def penalize_kl(
    batch: StepBatch,
    rows_to_compute: np.ndarray,
    old_logprobs: np.ndarray | None,
    ref_logprobs: np.ndarray | None,
    algo: AlgoConfig,
) -> np.ndarray:
    """[R] rewards minus kl_coef times the KL to the reference, summed over all that was sampled in the rollout.

    The penalty of a rollout with a row that was not computed is unknown: its reward becomes NaN, which keeps it out of
    the baseline.

    Args:
        rows_to_compute: [B] bool, rows whose log-probs [N] are known.
    """
    assert old_logprobs is not None, "a KL in the reward needs both columns"
    assert ref_logprobs is not None
    old, ref = torch.from_numpy(old_logprobs), torch.from_numpy(ref_logprobs)
    kl = kl_per_token(old, ref, estimator=algo.kl_estimator).numpy()
    unknown = batch.per_rollout(np.where(rows_to_compute, 0, 1)) > 0
    rewards = np.where(unknown, np.nan, batch.rewards - algo.kl_coef * sum_over_responses(batch, kl))
    return np.where(np.isfinite(rewards), rewards, np.nan)


def step_advantages(batch: StepBatch, rewards: np.ndarray, kind: str, normalize_over: str = "responses") -> np.ndarray:
    """[R] advantage of each rollout; 0 for unscorable ones. The kinds are those of `algo.advantage`.

    Args:
        rewards: [R], of the batch, with or without the KL penalty; NaN is unscorable.
        normalize_over: what the statistics of REINFORCE++ count, responses or tokens, as `algo.normalize_over`.
    """
    lengths = torch.from_numpy(batch.per_rollout(batch.response_lengths)) if normalize_over == "tokens" else None
    groups = torch.from_numpy(batch.groups)
    return advantages_of_kind(kind, torch.from_numpy(rewards), groups, lengths=lengths).numpy()
