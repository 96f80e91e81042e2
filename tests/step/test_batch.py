"""Graded groups -> the flat batch of a step, and from rewards of responses to their advantages."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from worlds import group_of, make_groups, rollout_of

from rlhf.config.sections import AlgoConfig
from rlhf.rollout.worker import penalize_non_stop
from rlhf.step.advantages import penalize_kl, step_advantages
from rlhf.step.batch import (
    broadcast_to_tokens,
    make_batch,
    sum_over_responses,
)
from rlhf.types import Rollout, ScoredRollout, StepBatch

GROUPS = make_groups(groups=2, samples=4, vocabulary=99, longest=40, seed=1)
ROLLOUTS = [sample.rollout for sample in GROUPS[0].samples]


def cut_off(rollout: Rollout) -> Rollout:
    return dataclasses.replace(rollout, finish_reason="length")


def batch_with(rewards: list[float | None]) -> StepBatch:
    """One group of four with these rewards."""
    return make_batch([group_of(ROLLOUTS, rewards)], mask_truncated=False)


def test_the_rows_of_a_batch_are_the_samples_group_after_group_and_its_columns_their_tokens() -> None:
    batch = make_batch(GROUPS, mask_truncated=False)
    samples = [sample for group in GROUPS for sample in group.samples]
    assert batch.groups.tolist() == [0] * 4 + [1] * 4
    assert batch.rewards.tolist() == [sample.reward for sample in samples]
    assert batch.response_lengths.tolist() == [sample.rollout.response_length for sample in samples]
    for row, sample in enumerate(samples):
        (sequence,) = sample.rollout.sequences
        assert batch.prompt_lengths[row] == sequence.prompt_length
        span = slice(batch.tokens.cu_seqlens[row], batch.tokens.cu_seqlens[row + 1])
        for name in ("token_ids", "response_mask", "rollout_logprobs"):
            np.testing.assert_array_equal(getattr(batch.tokens, name)[span], getattr(sequence, name))


def test_a_sum_over_responses_leaves_out_what_was_not_sampled_and_a_value_per_row_stands_at_all_its_tokens() -> None:
    masks = ([0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 1, 1])  # a response with a hole, one without a token, a whole one
    holes = [rollout_of(range(4), mask) for mask in masks]
    batch = make_batch([group_of(holes)], mask_truncated=False)
    column = np.array([np.nan, 1, np.inf, 2, 9, 9, 9, 9, np.nan, 4, 5, 6], np.float32)
    assert sum_over_responses(batch, column).tolist() == [3, 0, 15]
    assert batch.response_lengths.tolist() == [2, 0, 3]
    assert batch.prompt_lengths.tolist() == [1, 4, 1]  # all of it where nothing was sampled
    assert broadcast_to_tokens(batch, np.array([0.5, 1.5, 2.5])).tolist() == [0.5] * 4 + [1.5] * 4 + [2.5] * 4


def test_mask_truncated_leaves_responses_that_did_not_stop_out_of_the_loss_and_groups_keep_their_rows() -> None:
    group = group_of([*ROLLOUTS[:2], cut_off(ROLLOUTS[2]), ROLLOUTS[3]])
    masked = make_batch([group], mask_truncated=True)
    assert masked.trained.tolist() == [True, True, False, True]
    assert masked.groups.tolist() == [0] * 4
    assert make_batch([group], mask_truncated=False).trained.all()


def test_the_non_stop_reward_replaces_the_reward_of_a_cut_off_response_only() -> None:
    stopped: ScoredRollout = GROUPS[0].samples[0]
    cut = dataclasses.replace(stopped, rollout=cut_off(stopped.rollout), reward=1.0)
    assert penalize_non_stop(cut, 0.0).reward == 0.0
    assert penalize_non_stop(stopped, -5.0).reward == stopped.reward
    assert penalize_non_stop(dataclasses.replace(cut, reward=None), 0.0).reward is None


def with_penalty(batch: StepBatch, computed: np.ndarray) -> np.ndarray:
    """Rewards minus 0.1 times the KL, where log pi - log pi_ref is 0.5 at every token."""
    old = np.full(len(batch.tokens.token_ids), -1.0, np.float32)
    return penalize_kl(batch, computed, old, old - 0.5, AlgoConfig(kl_estimator="k1", kl_coef=0.1))


def test_a_kl_in_the_reward_is_summed_over_the_response_and_subtracted_before_the_baseline() -> None:
    batch = batch_with([1.0] * 4)
    rewards = with_penalty(batch, batch.trained)
    assert rewards == pytest.approx([1.0 - 0.05 * rollout.response_length for rollout in ROLLOUTS])
    advantages = step_advantages(batch, rewards, "dr_grpo")
    assert advantages == pytest.approx(rewards - rewards.mean())  # the shortest response has the largest advantage


def test_equal_rewards_get_beta_times_the_centred_kl_also_where_the_advantage_divides_by_the_groups_std() -> None:
    batch = batch_with([1.0] * 4)
    penalized = with_penalty(batch, batch.trained)
    assert step_advantages(batch, penalized, "grpo") == pytest.approx(penalized - penalized.mean())


def test_an_unscorable_response_is_not_trained_gets_no_advantage_and_leaves_the_baseline() -> None:
    batch = batch_with([1.0, None, 0.0, 0.0])
    assert batch.trained.tolist() == [True, False, True, True]
    advantages = step_advantages(batch, batch.rewards, "dr_grpo")
    assert advantages == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])
