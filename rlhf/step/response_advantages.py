"""Rewards of responses -> advantages of responses (GRPO and its family), with or without a KL penalty in the reward."""

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
    """[B] rewards minus kl_coef times the KL to the reference, summed over the response.

    The penalty of rows that were not computed is unknown: their reward becomes NaN, which keeps it out of the baseline.

    Args:
        rows_to_compute: [B] bool, rows whose log-probs [N] are known.
    """
    assert old_logprobs is not None, "a KL in the reward needs both columns"
    assert ref_logprobs is not None
    old, ref = torch.from_numpy(old_logprobs), torch.from_numpy(ref_logprobs)
    kl = kl_per_token(old, ref, estimator=algo.kl_estimator).numpy()
    rows = np.flatnonzero(rows_to_compute)
    rewards = np.where(rows_to_compute, batch.rewards, np.nan)
    rewards[rows] -= algo.kl_coef * sum_over_responses(batch, kl, rows)
    return np.where(np.isfinite(rewards), rewards, np.nan)


def step_advantages(batch: StepBatch, rewards: np.ndarray, kind: str, normalize_over: str = "responses") -> np.ndarray:
    """[B] advantage of each response; 0 for unscorable ones. The kinds are those of `algo.advantage`.

    Args:
        rewards: [B], of the batch, with or without the KL penalty; NaN is unscorable.
        normalize_over: what the statistics of REINFORCE++ count, responses or tokens, as `algo.normalize_over`.
    """
    lengths = torch.from_numpy(batch.response_lengths) if normalize_over == "tokens" else None
    groups = torch.from_numpy(batch.groups)
    return advantages_of_kind(kind, torch.from_numpy(rewards), groups, lengths=lengths).numpy()
