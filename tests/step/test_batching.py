"""From scored groups to minibatches and targets: what is trained, what is counted, and what depends on nothing."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.algo.packing import shared_beginnings
from rlhf.step import batching
from rlhf.types import Rollout, RolloutGroup, ScoredRollout

NOWHERE = Path("nowhere/model")
GROUPS = make_groups(groups=6, samples=4, vocabulary=99, longest=40, seed=1)


def with_rewards(group: RolloutGroup, rewards: list[float | None]) -> RolloutGroup:
    samples = [dataclasses.replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True)]
    return RolloutGroup(group.prompt, tuple(samples))


def all_rows(config_learners: int, budget: int) -> list[list[int]]:
    """Rows of each minibatch of the first epoch, sorted."""
    config = make_config(
        NOWHERE,
        learner={"max_tokens_per_microbatch": budget, "minibatches_per_epoch": 3},
        cluster={"device": "cpu", "learners": config_learners},
    )
    samples = batching.flatten(GROUPS)
    (epoch,) = batching.plan_epochs(samples, np.ones(len(samples), bool), config, step=4)
    return [
        sorted(int(row) for rank in m.microbatches for packed in rank for row in packed.rows if row >= 0) for m in epoch
    ]


def test_which_rollouts_share_a_minibatch_depends_neither_on_learners_nor_on_the_budget() -> None:
    expected = all_rows(1, 10_000)
    assert sorted(row for rows in expected for row in rows) == list(range(24))
    assert all_rows(2, 128) == all_rows(8, 200) == expected


def test_epochs_draw_other_minibatches_of_the_same_rollouts() -> None:
    config = make_config(NOWHERE, learner={"epochs_per_step": 2, "minibatches_per_epoch": 2})
    samples = batching.flatten(GROUPS)
    first, second = batching.plan_epochs(samples, np.ones(len(samples), bool), config, step=0)
    rows = [{int(r) for p in epoch[0].microbatches[0] for r in p.rows} for epoch in (first, second)]
    assert rows[0] != rows[1]


def test_denominators_count_response_tokens_of_trained_rollouts_only() -> None:
    config = make_config(NOWHERE)
    groups = [with_rewards(GROUPS[0], [1.0, None, 0.0, 0.0]), GROUPS[1]]
    samples = batching.flatten(groups)
    trains = batching.trained_rows(samples, mask_truncated=False)
    assert trains.tolist() == [True, False] + [True] * 6
    ((minibatch,),) = batching.plan_epochs(samples, trains, config, step=0)
    expected = sum(s.rollout.response_length for s, t in zip(samples, trains, strict=True) if t)
    assert minibatch.denominators.tokens == expected
    assert minibatch.denominators.sequences == 7


def test_mask_truncated_leaves_responses_that_did_not_stop_out_of_the_loss_and_groups_keep_their_rows() -> None:
    cut = dataclasses.replace(
        GROUPS[0].samples[2], rollout=dataclasses.replace(GROUPS[0].samples[2].rollout, finish_reason="length")
    )
    group = RolloutGroup(GROUPS[0].prompt, (*GROUPS[0].samples[:2], cut, GROUPS[0].samples[3]))
    assert batching.trained_rows(group.samples, mask_truncated=True).tolist() == [True, True, False, True]
    assert batching.trained_rows(group.samples, mask_truncated=False).all()


def test_a_critic_draws_passes_of_its_own_over_the_same_rollouts() -> None:
    samples = batching.flatten(GROUPS)
    everything = np.ones(len(samples), bool)
    planned = batching.plan_epochs(samples, everything, make_config(NOWHERE), step=0, epochs=3, minibatches=4)
    assert [len(epoch) for epoch in planned] == [4, 4, 4]
    for epoch in planned:
        rows = [row for m in epoch for rank in m.microbatches for packed in rank for row in packed.rows if row >= 0]
        assert sorted(rows) == list(range(len(samples)))
        tokens = sum(s.rollout.response_length for s in samples)
        assert sum(m.denominators.tokens for m in epoch) == tokens


def test_the_non_stop_reward_replaces_the_reward_of_a_cut_off_response_only() -> None:
    stopped: ScoredRollout = GROUPS[0].samples[0]
    cut = dataclasses.replace(stopped, rollout=dataclasses.replace(stopped.rollout, finish_reason="length"), reward=1.0)
    assert batching.penalize_non_stop(cut, 0.0).reward == 0.0
    assert batching.penalize_non_stop(stopped, -5.0).reward == stopped.reward
    assert batching.penalize_non_stop(dataclasses.replace(cut, reward=None), 0.0).reward is None


def test_a_kl_in_the_reward_is_summed_over_the_response_and_subtracted_before_the_baseline() -> None:
    group = with_rewards(GROUPS[0], [1.0, 1.0, 1.0, 1.0])
    samples = batching.flatten([group])
    kl = {row: np.full(len(s.rollout.token_ids), 0.5, np.float32) for row, s in enumerate(samples)}
    rewards = batching.penalized_rewards(samples, kl, 0.1)
    lengths = [s.rollout.response_length for s in samples]
    assert rewards == pytest.approx([1.0 - 0.05 * length for length in lengths])
    advantages = batching.step_advantages(rewards, [group], "dr_grpo")
    assert advantages == pytest.approx(rewards - rewards.mean())  # the shortest response has the largest advantage


def test_a_response_without_a_known_kl_leaves_the_baseline_when_the_kl_is_in_the_reward() -> None:
    group = with_rewards(GROUPS[0], [1.0, 1.0, 1.0, 1.0])
    samples = batching.flatten([group])
    kl = {row: np.zeros(len(samples[row].rollout.token_ids), np.float32) for row in (0, 1, 3)}
    rewards = batching.penalized_rewards(samples, kl, 0.1)
    assert np.isnan(rewards).tolist() == [False, False, True, False]


def test_an_unscorable_response_gets_no_advantage_and_leaves_the_baseline() -> None:
    group = with_rewards(GROUPS[0], [1.0, None, 0.0, 0.0])
    rewards = batching.penalized_rewards(batching.flatten([group]), None, 0.0)
    advantages = batching.step_advantages(rewards, [group], "dr_grpo")
    assert advantages == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3])


def test_targets_lie_where_the_tokens_of_their_rollout_lie() -> None:
    config = make_config(NOWHERE, learner={"max_tokens_per_microbatch": 128})
    samples = batching.flatten(GROUPS)
    ((minibatch,),) = batching.plan_epochs(samples, np.ones(len(samples), bool), config, step=0)
    old = {row: np.arange(len(s.rollout.token_ids), dtype=np.float32) + 1000 * row for row, s in enumerate(samples)}
    advantages = np.arange(len(samples), dtype=np.float64)
    for packed in minibatch.microbatches[0]:
        targets = batching.policy_targets(packed, advantages, old, {})
        assert not targets.ref_logprobs.any()
        for i, row in enumerate(packed.rows):
            span = slice(packed.cu_seqlens[i], packed.cu_seqlens[i + 1])
            mask = samples[row].rollout.response_mask
            assert (targets.old_logprobs[span] == np.where(mask, old[int(row)], 0)).all()
            assert (targets.advantages[span] == np.where(mask, float(row), 0)).all()


@pytest.mark.parametrize(("learners", "budget"), [(1, 10_000), (1, 700), (3, 300)])
def test_samples_of_a_prompt_are_computed_beside_each_other_and_no_budget_is_exceeded(
    learners: int, budget: int
) -> None:
    """16 samples of each of 6 prompts of 40 tokens, with 0 to 6 tokens of response."""
    config = make_config(
        NOWHERE, learner={"max_tokens_per_microbatch": budget}, cluster={"device": "cpu", "learners": learners}
    )
    rng = np.random.default_rng(0)
    samples = []
    for prompt in range(6):
        start = rng.integers(0, 99, 40)
        for sample in range(16):
            ids = np.concatenate([start, rng.integers(0, 99, rng.integers(0, 7))]).astype(np.int32)
            rollout = Rollout(
                f"p/{prompt}", 0, sample, ids, np.arange(len(ids)) >= 40, np.zeros(len(ids), np.float32), (), "stop"
            )
            samples.append(ScoredRollout(rollout, "", "", 1.0, {}, "ok"))
    ((minibatch,),) = batching.plan_epochs(samples, np.ones(len(samples), bool), config, step=0)
    rows = [packed for rank in minibatch.microbatches for packed in rank if packed.rows[0] >= 0]
    assert sorted(row for packed in rows for row in packed.rows.tolist()) == list(range(96))
    computed = [len(packed.token_ids) - int(shared_beginnings(packed).sum()) for packed in rows]
    assert max(computed) <= budget
    for packed in rows:
        prompts = [row // 16 for row in packed.rows.tolist()]
        assert sum(a != b for a, b in itertools.pairwise(prompts)) == len(set(prompts)) - 1
    alone = sum(len(s.rollout.token_ids) for s in samples)
    assert sum(computed) < alone / {10_000: 7, 700: 4, 300: 3}[budget]
