"""Groups of graded rollouts -> the flat batch of a step; sums and checks of its token columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhf.algo.own_functions import needs_rows
from rlhf.algo.packing import pack, shared_beginnings
from rlhf.processes.code import load_function
from rlhf.types import PromptRow, RolloutGroup, StepBatch


def make_batch(
    groups: Sequence[RolloutGroup], *, mask_truncated: bool, needs_reward: bool = True, policy_loss: str = ""
) -> StepBatch:
    """Flatten groups in their order: the rollouts of a group are neighbours, in the order of its samples.

    Args:
        mask_truncated: leave rollouts that did not stop by themselves out of the loss, like unscorable ones.
        needs_reward: False if teachers replace rewards. A rollout without a reward is then trained with reward 0,
            unless it was aborted.
        policy_loss: a loss of the user (`algo.policy_loss`) gets the rows of the data if it asks for them.
    """
    samples = [sample for group in groups for sample in group.samples]
    rollouts = [sample.rollout for sample in samples]
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    rewards = np.array([np.nan if sample.reward is None else sample.reward for sample in samples], np.float64)
    if not needs_reward:
        aborted = np.array([rollout.finish_reason == "abort" for rollout in rollouts], bool)
        rewards[np.isnan(rewards) & ~aborted] = 0.0
    scorable = ~np.isnan(rewards)
    stopped = np.array([rollout.finish_reason == "stop" for rollout in rollouts], bool)
    tokens = pack(
        [sequence.token_ids for sequence in sequences],
        [sequence.response_mask for sequence in sequences],
        [sequence.rollout_logprobs for sequence in sequences],
        [sequence.support for sequence in sequences],
        [sequence.experts for sequence in sequences],
    )
    if tokens.experts is not None:
        # Tokens that sequences share are computed once. Engines round a prompt differently in each request: the first
        # record is used for all, so that the result does not depend on which sequence comes first in a microbatch.
        starts = tokens.cu_seqlens[:-1].tolist()
        for before, start, count in zip(starts, starts[1:], shared_beginnings(tokens)[1:].tolist(), strict=False):
            tokens.experts[start : start + count] = tokens.experts[before : before + count]
    batch = StepBatch(
        tokens=tokens,
        rollouts=np.repeat(np.arange(len(rollouts)), [len(rollout.sequences) for rollout in rollouts]),
        prompt_lengths=np.array([sequence.prompt_length for sequence in sequences], np.int64),
        response_lengths=tokens.rollout_tokens,  # `pack` takes each sequence for a whole rollout
        groups=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        rewards=rewards,
        trained=scorable & stopped if mask_truncated else scorable,
        prompt_rows=tuple(PromptRow(group.prompt.source, group.prompt.columns) for group in groups),
    )
    rollout_tokens = batch.per_rollout(batch.response_lengths)[batch.rollouts]
    prompt_rows = None
    if ":" in policy_loss and needs_rows(load_function(policy_loss)):
        prompt_rows = tuple(batch.prompt_rows[group] for group in batch.groups[batch.rollouts])
    return replace(batch, tokens=replace(tokens, rollout_tokens=rollout_tokens, prompt_rows=prompt_rows))


def sum_over_responses(batch: StepBatch, column: np.ndarray) -> np.ndarray:
    """[R] float64: the sum of a token column [N] over the sampled tokens of each rollout."""
    mask, bounds = batch.tokens.response_mask, batch.tokens.cu_seqlens
    spans = [slice(start, end) for start, end in itertools.pairwise(bounds.tolist())]
    return batch.per_rollout(np.array([column[span][mask[span]].sum(dtype=np.float64) for span in spans]))


def broadcast_to_tokens(batch: StepBatch, values: np.ndarray) -> np.ndarray:
    """[N] float32: the value of each rollout [R], repeated at all tokens of all its rows."""
    return np.repeat(values.astype(np.float32)[batch.rollouts], batch.tokens.lengths)


def non_finite_rollouts(
    batch: StepBatch, rows_to_compute: np.ndarray, **columns: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Column name -> rollouts with NaN or inf at a sampled token. No update may use them; empty in a healthy run.

    Args:
        rows_to_compute: [B] bool, rows whose columns are known.
        columns: [N] each, or None. The engines' log-probs are always checked.
    """
    sampled = batch.tokens.response_mask & np.repeat(rows_to_compute, batch.tokens.lengths)
    known = {"rollout_logprobs": batch.tokens.rollout_logprobs, **columns}
    positions = {
        name: np.flatnonzero(sampled & ~np.isfinite(column)) for name, column in known.items() if column is not None
    }
    ends = batch.tokens.cu_seqlens[1:]
    rows = {name: np.searchsorted(ends, at, side="right") for name, at in positions.items() if len(at)}
    return {name: np.unique(batch.rollouts[named_rows]) for name, named_rows in rows.items()}
