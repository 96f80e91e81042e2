"""Finds NaN and inf in the numbers that engines and learners computed for a step: no update may use them."""

from __future__ import annotations

import numpy as np

from rlhf.types import StepBatch


def non_finite_rollouts(
    batch: StepBatch, rows_to_compute: np.ndarray, **columns: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Column name -> rollouts with NaN or inf at a sampled token; {} if there are none, as in a healthy run.

    Args:
        rows_to_compute: [B] bool, rows whose columns are known.
        columns: [N] each, of the step; None is left out. The engines' log-probs are always checked.
    """
    sampled = batch.tokens.response_mask & np.repeat(rows_to_compute, batch.tokens.lengths)
    known = {"rollout_logprobs": batch.tokens.rollout_logprobs, **columns}
    positions = {
        name: np.flatnonzero(sampled & ~np.isfinite(column)) for name, column in known.items() if column is not None
    }
    ends = batch.tokens.cu_seqlens[1:]
    rows = {name: np.searchsorted(ends, at, side="right") for name, at in positions.items() if len(at)}
    return {name: np.unique(batch.rollouts[found]) for name, found in rows.items()}
