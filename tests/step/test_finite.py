"""NaN and inf in what engines and learners computed: found where it would be trained on, and nowhere else."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from worlds import make_groups, random_column

from rlhf.log.reductions import UpdateOutcome
from rlhf.run.skipped_updates import MAX_KEPT, SkippedUpdates
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


def test_a_skipped_step_is_named_and_its_batch_kept_in_a_bounded_number_of_files(
    batch: StepBatch, tmp_path: Path
) -> None:
    warnings: list[str] = []
    skipped = SkippedUpdates(lambda: tmp_path / "skipped", warnings.append)
    taken, not_taken = UpdateOutcome("learner", True, {}), UpdateOutcome("learner", False, {})
    skipped.keep(1, batch, [UpdateOutcome("critic", True, {}), taken], {})
    assert warnings == []
    assert not (tmp_path / "skipped").exists()
    old = random_column(batch, 1)
    skipped.keep(2, batch, [taken, not_taken], {}, old_logprobs=old, ref_logprobs=None)
    assert "step 2: 1 of 2 optimizer steps were skipped" in warnings[0]
    kept = np.load(tmp_path / "skipped" / "step-000002.npz")
    by_token = {"token_ids", "response_mask", "rollout_logprobs", "old_logprobs"}
    assert set(kept) == by_token | {"cu_seqlens", "rollouts", "rollout_tokens", "rewards"}
    assert np.array_equal(kept["old_logprobs"], old)
    for step in range(3, 3 + MAX_KEPT):
        skipped.keep(step, batch, [not_taken], {"values": np.arange(7)})
    assert "values of 7 rollouts (0, 1, 2, 3, 4, ...)" in warnings[-1]
    assert len(list((tmp_path / "skipped").iterdir())) == MAX_KEPT


def test_a_batch_that_the_disk_does_not_take_costs_no_run(batch: StepBatch, tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "skipped").write_text("no folder")
    SkippedUpdates(lambda: tmp_path / "skipped", warnings.append).keep(
        2, batch, [UpdateOutcome("learner", False, {})], {}
    )
    assert warnings[0].endswith(f"({tmp_path / 'skipped'}: File exists)")
