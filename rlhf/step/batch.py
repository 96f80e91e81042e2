"""Groups of graded rollouts -> the flat batch of a step, and helpers between its row columns and its token columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rlhf.algo.packing import pack
from rlhf.types import RolloutGroup, ScoredRollout, StepBatch


def make_batch(groups: Sequence[RolloutGroup], *, mask_truncated: bool) -> StepBatch:
    """Flatten groups in their order: the rows of a group are neighbours, in the order of its samples.

    Args:
        mask_truncated: responses that did not stop by themselves are left out of the loss, like unscorable ones.
    """
    samples = [sample for group in groups for sample in group.samples]
    rollouts = [sample.rollout for sample in samples]
    scorable = np.array([sample.reward is not None for sample in samples], bool)
    stopped = np.array([rollout.finish_reason == "stop" for rollout in rollouts], bool)
    return StepBatch(
        tokens=pack(
            [rollout.token_ids for rollout in rollouts],
            [rollout.response_mask for rollout in rollouts],
            [rollout.rollout_logprobs for rollout in rollouts],
        ),
        groups=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        prompt_lengths=np.array([rollout.prompt_length for rollout in rollouts], np.int64),
        response_lengths=np.array([rollout.response_length for rollout in rollouts], np.int64),
        rewards=np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float64),
        trained=scorable & stopped if mask_truncated else scorable,
    )


def penalize_non_stop(sample: ScoredRollout, reward: float | None, penalty: float = 0.0) -> ScoredRollout:
    """Replace (reject) or lower the reward of a response that did not stop; unscorable responses are unchanged.

    Args:
        reward: the new reward; None keeps the response's own.
        penalty: subtracted from it.
    """
    if sample.rollout.finish_reason == "stop" or sample.reward is None:
        return sample
    return dataclasses.replace(sample, reward=(sample.reward if reward is None else reward) - penalty)


def sum_over_responses(batch: StepBatch, column: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[len(rows)] float64: the sum of a token column [N] over the response of each of these rows."""
    mask, bounds = batch.tokens.response_mask, batch.tokens.cu_seqlens
    spans = [slice(bounds[row], bounds[row + 1]) for row in rows]
    return np.array([column[span][mask[span]].sum(dtype=np.float64) for span in spans])


def broadcast_to_tokens(batch: StepBatch, values: np.ndarray) -> np.ndarray:
    """[N] float32: the value of each row [B] at all of its tokens."""
    return np.repeat(values.astype(np.float32), batch.tokens.lengths)
