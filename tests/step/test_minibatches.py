"""The minibatches of a step: which rollouts they hold, what they count, and what they do not depend on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from worlds import group_of, make_config, make_groups, rollout_of, rows_of_minibatch

from rlhf.algo.packing import shared_beginnings
from rlhf.config.roles import Training
from rlhf.config.sections import TrainedConfig
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import RolloutGroup

NOWHERE = Path("nowhere/model")
GROUPS = make_groups(groups=6, samples=4, vocabulary=99, longest=40, seed=1)
BATCH = make_batch(GROUPS, mask_truncated=False)


def rows_of_minibatches(learners: int, budget: int) -> list[list[int]]:
    """Rows of each minibatch of the first epoch."""
    config = make_config(
        NOWHERE,
        learner={"max_tokens_per_microbatch": budget, "minibatches_per_epoch": 3},
        cluster={"device": "cpu", "learners": learners},
    )
    (epoch,) = plan_epochs(BATCH, config, step=4)
    return [rows_of_minibatch(minibatch) for minibatch in epoch]


def test_which_rollouts_share_a_minibatch_depends_neither_on_learners_nor_on_the_budget() -> None:
    expected = rows_of_minibatches(1, 10_000)
    assert sorted(row for rows in expected for row in rows) == list(range(24))
    assert rows_of_minibatches(2, 128) == rows_of_minibatches(8, 200) == expected


def test_epochs_draw_other_minibatches_of_the_same_rollouts() -> None:
    config = make_config(NOWHERE, learner={"epochs_per_step": 2, "minibatches_per_epoch": 2})
    first, second = plan_epochs(BATCH, config, step=0)
    assert rows_of_minibatch(first[0]) != rows_of_minibatch(second[0])


def test_denominators_count_response_tokens_of_trained_rollouts_only() -> None:
    rollouts = [sample.rollout for group in GROUPS[:2] for sample in group.samples]
    batch = make_batch([group_of(rollouts, [1.0, None, *[0.0] * 6])], mask_truncated=False)
    ((minibatch,),) = plan_epochs(batch, make_config(NOWHERE), step=0)
    trained = [0, 2, 3, 4, 5, 6, 7]
    assert rows_of_minibatch(minibatch) == trained
    assert minibatch.denominators.tokens == sum(rollouts[row].response_length for row in trained)
    assert minibatch.denominators.rollouts == 7


def test_a_critic_draws_passes_of_its_own_over_the_same_rollouts() -> None:
    training = Training(TrainedConfig(), epochs_per_step=3, minibatches_per_epoch=4, steps=1)
    epochs = plan_epochs(BATCH, make_config(NOWHERE), step=0, training=training)
    assert [len(epoch) for epoch in epochs] == [4, 4, 4]
    for epoch in epochs:
        assert sorted(row for minibatch in epoch for row in rows_of_minibatch(minibatch)) == list(range(24))
        assert sum(minibatch.denominators.tokens for minibatch in epoch) == BATCH.tokens.response_mask.sum()


def siblings(rng: np.random.Generator) -> RolloutGroup:
    """16 samples of a prompt of 40 tokens, with 0 to 6 tokens of response."""
    start = rng.integers(0, 99, 40)
    rollouts = []
    for _ in range(16):
        ids = np.concatenate([start, rng.integers(0, 99, rng.integers(0, 7))]).astype(np.int32)
        rollouts.append(rollout_of(ids, np.arange(len(ids)) >= 40))
    return group_of(rollouts)


@pytest.mark.parametrize(("learners", "budget"), [(1, 10_000), (1, 700), (3, 300)])
def test_samples_of_a_prompt_are_computed_next_to_each_other_and_no_budget_is_exceeded(
    learners: int, budget: int
) -> None:
    config = make_config(
        NOWHERE, learner={"max_tokens_per_microbatch": budget}, cluster={"device": "cpu", "learners": learners}
    )
    rng = np.random.default_rng(0)
    batch = make_batch([siblings(rng) for _ in range(6)], mask_truncated=False)
    ((minibatch,),) = plan_epochs(batch, config, step=0)
    assert rows_of_minibatch(minibatch) == list(range(96))
    microbatches = [rows for rank in minibatch.microbatches for rows in rank if len(rows)]
    computed = []
    for rows in microbatches:
        packed = batch.tokens.take(rows)
        computed.append(len(packed.token_ids) - int(shared_beginnings(packed).sum()))
        prompts = batch.groups[rows].tolist()
        assert sum(a != b for a, b in itertools.pairwise(prompts)) == len(set(prompts)) - 1
    assert max(computed) <= budget
    alone = len(batch.tokens.token_ids)
    assert sum(computed) < alone / {10_000: 7, 700: 4, 300: 3}[budget]
