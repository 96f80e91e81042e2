"""Rewards of responses -> advantages of responses (GRPO and its family), with or without a KL penalty in the reward."""

from __future__ import annotations

import numpy as np
import torch

from rlhf.algo import advantages as adv
from rlhf.algo.kl import kl_per_token
from rlhf.step.batch import sum_over_responses
from rlhf.types import StepBatch


def penalize_kl(
    batch: StepBatch,
    computed: np.ndarray,
    *,
    old_logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
    estimator: str,
    kl_coef: float,
) -> np.ndarray:
    """[B] rewards minus kl_coef times the KL to the reference, summed over the response.

    The penalty of rows that are not computed is unknown: their reward becomes NaN, which keeps it out of the baseline.

    Args:
        computed: [B] bool, rows whose log-probs [N] are known.
    """
    kl = kl_per_token(torch.from_numpy(old_logprobs), torch.from_numpy(ref_logprobs), estimator=estimator).numpy()
    rows = np.flatnonzero(computed)
    rewards = np.where(computed, batch.rewards, np.nan)
    rewards[rows] -= kl_coef * sum_over_responses(batch, kl, rows)
    return rewards


def step_advantages(batch: StepBatch, rewards: np.ndarray, kind: str) -> np.ndarray:
    """[B] advantage of each response; 0 for unscorable ones. The kinds are those of `algo.advantage`.

    Args:
        rewards: [B], of the batch, with or without the KL penalty; NaN is unscorable.
    """
    tensor = torch.from_numpy(rewards)
    parts = tensor.split(np.bincount(batch.groups).tolist())
    match kind:
        case "grpo" | "dr_grpo":
            return torch.cat([adv.group_advantages(part, normalize_std=kind == "grpo") for part in parts]).numpy()
        case "rloo":
            return torch.cat([adv.rloo_advantages(part) for part in parts]).numpy()
        case "reinforce_pp":
            return adv.reinforce_plus_plus_advantages(tensor).numpy()
        case "reinforce_pp_baseline":
            return adv.reinforce_plus_plus_advantages(tensor, torch.from_numpy(batch.groups)).numpy()
    raise AssertionError(kind)
