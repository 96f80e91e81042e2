"""NaN and inf in what engines and learners computed: found where it would be trained on, and nowhere else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from worlds import make_groups, random_column

from rlhf.log.reductions import UpdateOutcome
from rlhf.run.useless_steps import skipped_updates_warnings
from rlhf.step.batch import make_batch, non_finite_rollouts
from rlhf.types import StepBatch


@pytest.fixture
def batch() -> StepBatch:
    groups = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0)
    return make_batch(groups, mask_truncated=False)


def test_only_sampled_tokens_of_computed_rows_count(batch: StepBatch) -> None:
    old, ref = random_column(batch, 1), random_column(batch, 2)
    everything = np.ones(8, bool)
    assert non_finite_rollouts(batch, everything, old_logprobs=old, ref_logprobs=None) == {}
    starts, ends = batch.tokens.cu_seqlens[:-1], batch.tokens.cu_seqlens[1:]
    old[starts[1]] = np.nan  # a prompt's token
    assert non_finite_rollouts(batch, everything, old_logprobs=old) == {}
    old[ends[1] - 1], old[ends[6] - 1], ref[ends[6] - 1] = np.nan, -np.inf, np.inf
    rows = non_finite_rollouts(batch, everything, old_logprobs=old, ref_logprobs=ref)
    assert {name: list(found) for name, found in rows.items()} == {"old_logprobs": [1, 6], "ref_logprobs": [6]}
    without_6 = np.arange(8) != 6
    assert list(non_finite_rollouts(batch, without_6, old_logprobs=old, ref_logprobs=ref)) == ["old_logprobs"]


def test_a_nan_of_an_engine_is_found_too(batch: StepBatch) -> None:
    logprobs = batch.tokens.rollout_logprobs.copy()
    logprobs[-1] = np.nan
    broken = dataclasses.replace(batch, tokens=dataclasses.replace(batch.tokens, rollout_logprobs=logprobs))
    assert list(non_finite_rollouts(broken, np.ones(8, bool))["rollout_logprobs"]) == [7]


def test_a_warning_counts_the_skipped_updates_and_names_the_rollouts() -> None:
    taken, skipped = UpdateOutcome("learner", True, {}), UpdateOutcome("learner", False, {})
    assert skipped_updates_warnings(1, [UpdateOutcome("critic", True, {}), taken], {}) == []
    (many,) = skipped_updates_warnings(2, [taken, skipped], {})
    assert many == "step 2: 1 of 2 optimizer steps were skipped: NaN or inf in a gradient"
    (named,) = skipped_updates_warnings(3, [skipped], {"values": np.arange(7), "ref_logprobs": np.array([4])})
    assert named.endswith("NaN or inf in values of 7 rollouts (0, 1, 2, 3, 4, ...) and ref_logprobs of 1 rollouts (4)")
