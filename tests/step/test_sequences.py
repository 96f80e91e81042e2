"""Rollouts of several sequences: what is by row, what is by rollout, and that it does not matter where rows land.

group  rollout  reward  sampled tokens of its sequences
0      0         1      3, 1
0      1         0      2
1      2         0.5    2
1      3         2      1, 2
1      4        None    1, 1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from worlds import group_of, joined, make_config, random_column, rollout_of, rows_of_minibatch

from rlhf.algo.packing import FILLER_TOKENS, filler, shared_beginnings
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.config.sections import AlgoConfig
from rlhf.learner.policy_model import DeviceTokens, PolicyOutput
from rlhf.learner.update import policy_microbatch
from rlhf.log.reductions import to_values
from rlhf.rollout.buffer import Account
from rlhf.run.rollout_log import rollout_metrics
from rlhf.step.advantages import assign_credit, mean_over_responses, penalize_kl, response_kl, step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch, non_finite_rollouts, sum_over_responses
from rlhf.step.minibatches import plan_epochs, rows_with_gradient
from rlhf.types import Denominators, Minibatch, PolicyTargets, Rollout, StepBatch, VersionSpan

NOWHERE = Path("nowhere/model")
SAMPLED = ((3, 1), (2,), (2,), (1, 2), (1, 1))
LENGTHS = np.array([4, 2, 2, 3, 2])  # sampled tokens of the rollouts
PROMPT = 4
LONGEST = 4  # rollout.max_response_tokens
PLACES = [(1, 1000), (1, 8), (2, 16), (4, 8)]  # learners, max_tokens_per_microbatch


def rollout(number: int, *sampled: int) -> Rollout:
    """Its sequences begin differently, as after a context was rewritten, and a hole is before their last token."""
    sequences = []
    for which, count in enumerate(sampled):
        mask = np.arange(PROMPT + count + 1) >= PROMPT
        mask[-2] = False
        ids = np.arange(len(mask)) + 10 * number + 100 * which
        spans = (VersionSpan(PROMPT, len(ids) - 2, 5 - which), VersionSpan(len(ids) - 1, len(ids), 5 - which))
        sequences.append(rollout_of(ids, mask, -np.ones(len(ids)) * mask, spans, sample=number))
    return joined(*sequences)


ROLLOUTS = [rollout(number, *sampled) for number, sampled in enumerate(SAMPLED)]
GROUPS = [group_of(ROLLOUTS[:2], [1.0, 0.0]), group_of(ROLLOUTS[2:], [0.5, 2.0, None])]
BATCH = make_batch(GROUPS, mask_truncated=False)
ALL_ROWS = np.ones(8, bool)


def test_a_sequence_is_a_row_and_the_rows_of_a_rollout_are_neighbours() -> None:
    assert BATCH.rollouts.tolist() == [0, 0, 1, 2, 3, 3, 4, 4]
    assert BATCH.groups.tolist() == [0, 0, 1, 1, 1]
    assert BATCH.trained.tolist() == [True] * 4 + [False]
    assert BATCH.trained_rows.tolist() == [True] * 6 + [False] * 2
    assert BATCH.response_lengths.tolist() == [3, 1, 2, 2, 1, 2, 1, 1]
    assert BATCH.prompt_lengths.tolist() == [4, 5, 4, 4, 5, 4, 5, 5]  # the hole is before a single token
    assert BATCH.tokens.rollout_tokens.tolist() == LENGTHS[BATCH.rollouts].tolist()
    assert BATCH.tokens.take(np.array([1, 2])).rollout_tokens.tolist() == [4, 2]
    assert BATCH.per_rollout(BATCH.response_lengths).tolist() == LENGTHS.tolist()
    assert BATCH.rows_of(np.array([3, 0, 2])).tolist() == [4, 5, 0, 1, 3]
    tokens = [
        ids for each in ROLLOUTS for sequence in each.sequences for ids in sequence.token_ids[sequence.response_mask]
    ]
    assert BATCH.tokens.token_ids[BATCH.tokens.response_mask].tolist() == tokens
    assert np.concatenate([each.response_ids for each in ROLLOUTS]).tolist() == tokens
    assert [each.response_length for each in ROLLOUTS] == LENGTHS.tolist()


def test_a_value_of_a_rollout_stands_at_all_tokens_of_all_its_rows() -> None:
    column = broadcast_to_tokens(BATCH, np.arange(5))
    assert column.tolist() == np.repeat(BATCH.rollouts, BATCH.tokens.lengths).tolist()
    assert sum_over_responses(BATCH, column).tolist() == (np.arange(5) * LENGTHS).tolist()
    assert mean_over_responses(BATCH, column).tolist() == [0, 1, 2, 3, 4]


def test_the_statistics_of_a_group_count_rollouts() -> None:
    assert step_advantages(BATCH, BATCH.rewards, "dr_grpo").tolist() == [0.5, -0.5, -0.75, 0.75, 0.0]
    by_token = step_advantages(BATCH, BATCH.rewards, "reinforce_pp", "tokens")
    assert (by_token * LENGTHS).sum() == pytest.approx(0.0, abs=1e-6)
    assert (by_token**2 * LENGTHS).sum() == pytest.approx(LENGTHS[:4].sum(), rel=1e-5)


def test_the_account_counts_rollouts() -> None:
    cut = dataclasses.replace(ROLLOUTS[0], finish_reason="length")
    account = Account()
    account.add_step(make_batch([group_of([cut, *ROLLOUTS[1:4]], [1.0, 0.0, 0.5, None])], mask_truncated=True))
    assert (account.trained, account.filtered, account.failed) == (2, 1, 1)


def test_where_no_reward_trains_only_a_rollout_that_broke_off_needs_one() -> None:
    cut, broken = (dataclasses.replace(ROLLOUTS[0], finish_reason=reason) for reason in ("length", "abort"))
    group = group_of([cut, broken, *ROLLOUTS[1:3]], [None, None, None, 0.5])
    batch = make_batch([group], mask_truncated=True, needs_reward=False)
    assert batch.trained.tolist() == [False, False, True, True]
    account = Account()
    account.add_step(batch)
    assert (account.trained, account.filtered, account.failed) == (2, 1, 1)


def test_the_lag_of_a_rollout_is_that_of_the_oldest_token_of_all_its_sequences() -> None:
    assert [each.oldest_version for each in ROLLOUTS] == [4, 5, 5, 4, 4]
    metrics = rollout_metrics(GROUPS, np.zeros(5), version=6, asynchronous=True)
    assert to_values(metrics)["rollout/lag/mean"] == pytest.approx((2 + 1 + 1 + 2 + 2) / 5)
    assert metrics["rollout/tokens_at_lag/2"].value() == pytest.approx((1 + 2 + 1) / LENGTHS.sum())


def test_a_kl_is_summed_over_all_sequences_of_a_rollout_and_unknown_where_one_was_not_computed() -> None:
    old = np.full(len(BATCH.tokens.token_ids), -1.0, np.float32)
    ref = old - broadcast_to_tokens(BATCH, np.arange(1, 6))
    algo = AlgoConfig(kl_estimator="k1", kl_coef=0.1)
    rewards = penalize_kl(BATCH, ALL_ROWS, old, ref, algo)
    expected = BATCH.rewards - 0.1 * np.arange(1, 6) * LENGTHS
    assert rewards[:4] == pytest.approx(expected[:4])
    without_row_1 = penalize_kl(BATCH, np.arange(8) != 1, old, ref, algo)
    assert np.isnan(without_row_1).tolist() == [True, False, False, False, True]
    assert response_kl(BATCH, old, ref) == pytest.approx((1 * 4 + 2 * 2 + 3 * 2 + 4 * 3) / 4)


def test_what_is_not_finite_is_named_by_its_rollout() -> None:
    column = np.zeros(len(BATCH.tokens.token_ids), np.float32)
    column[BATCH.tokens.cu_seqlens[[2, 6]] - 1] = np.nan  # the last tokens of rows 1 and 5
    assert non_finite_rollouts(BATCH, ALL_ROWS, values=column)["values"].tolist() == [0, 3]


def test_each_sequence_is_an_episode_that_ends_with_the_reward_of_its_rollout() -> None:
    values = random_column(BATCH, 1)
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=0.5, lam=1.0)
    credit = assign_credit(BATCH, values, None, None, kl_coef=0.0, algo=algo)
    for row in range(6):
        at = BATCH.tokens.token_indices(np.array([row]))
        at = at[BATCH.tokens.response_mask[at]]
        returns = BATCH.rewards[BATCH.rollouts[row]] * 0.5 ** np.arange(len(at))[::-1]
        np.testing.assert_allclose(credit.returns[at], returns, rtol=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_a_minibatch_never_splits_a_rollout_and_is_drawn_from_rollouts(minibatches: int) -> None:
    for learners, budget in PLACES:
        ((*planned,),) = plan_epochs(BATCH, config_of("token_mean", learners, budget, minibatches), step=3)
        rows = [rows_of_minibatch(minibatch) for minibatch in planned]
        rollouts = [sorted({int(BATCH.rollouts[row]) for row in of_one}) for of_one in rows]
        assert sorted(number for of_one in rollouts for number in of_one) == [0, 1, 2, 3]
        for minibatch, own, numbers in zip(planned, rows, rollouts, strict=True):
            assert own == sorted(BATCH.rows_of(np.array(numbers, np.int64)).tolist())
            tokens, sequences = int(LENGTHS[numbers].sum()), len(own)
            assert minibatch.denominators == Denominators(tokens, rollouts=len(numbers), sequences=sequences)


def test_rollouts_without_an_advantage_leave_with_all_their_rows() -> None:
    computed = rows_with_gradient(BATCH, np.array([0.0, 1, 0, 2, 3]), config_of("token_mean", 1, 1000))
    assert computed.tolist() == [False, False, True, False, True, True, False, False]


# --- losses by hand, wherever the rows land ---


class Fixed(nn.Module):
    """A policy that says what it is told at the tokens `index` of a step."""

    def __init__(self, logprobs: Tensor, index: np.ndarray) -> None:
        super().__init__()
        self.logprobs, self.index = logprobs, torch.from_numpy(index)

    def forward(self, tokens: DeviceTokens, **_: Any) -> PolicyOutput:
        logprobs = torch.where(tokens.response_mask, self.logprobs[self.index], 0.0)
        return PolicyOutput(logprobs, torch.zeros(len(logprobs)), None)


def config_of(aggregation: str, learners: int, budget: int, minibatches: int = 1) -> Any:
    return make_config(
        NOWHERE,
        data={"train": "train.jsonl", "max_prompt_tokens": PROMPT},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": LONGEST},
        algo={"loss_aggregation": aggregation, "importance_correction": "none", "clip_low": 0.9, "clip_high": 9},
        learner={"max_tokens_per_microbatch": budget, "minibatches_per_epoch": minibatches},
        cluster={"device": "cpu", "learners": learners},
    )


def microbatches(minibatch: Minibatch) -> Iterator[np.ndarray]:
    return (rows for rank in minibatch.microbatches for rows in rank)


def loss_and_gradient(batch: StepBatch, config: Any, targets: PolicyTargets) -> tuple[float, np.ndarray]:
    """Summed over all microbatches of all ranks, fillers too, as the learners compute them; the gradient is [N]."""
    ((minibatch,),) = plan_epochs(batch, config, step=0)
    logprobs = torch.from_numpy(random_column(batch, 1) / 10).requires_grad_()
    total = torch.zeros(())
    for rows in microbatches(minibatch):
        packed = batch.tokens.take(rows) if len(rows) else filler()
        index = batch.tokens.token_indices(rows) if len(rows) else np.zeros(FILLER_TOKENS, np.int64)
        tokens = DeviceTokens.of(packed, torch.device("cpu"))
        total = total + policy_microbatch(
            Fixed(logprobs, index), tokens, targets.take(index), minibatch.denominators, config
        )[0]  # fmt: skip
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.numpy()


@pytest.mark.parametrize(("learners", "budget"), PLACES)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_losses_and_gradients_are_those_by_hand_wherever_the_sequences_of_a_rollout_land(
    aggregation: str, learners: int, budget: int
) -> None:
    advantages = step_advantages(BATCH, BATCH.rewards, "dr_grpo")
    new, old = random_column(BATCH, 1) / 10, random_column(BATCH, 2) / 10
    targets = PolicyTargets(broadcast_to_tokens(BATCH, advantages), old, None)
    loss, gradient = loss_and_gradient(BATCH, config_of(aggregation, learners, budget), targets)
    weight = {  # of a token of each rollout
        "token_mean": np.full(5, 1 / (4 + 2 + 2 + 3)),
        "sequence_mean": 1 / LENGTHS / 4,
        "constant": np.full(5, 1 / (4 * LONGEST)),
    }[aggregation]
    in_loss = BATCH.tokens.response_mask & np.repeat(BATCH.trained_rows, BATCH.tokens.lengths)
    # where no ratio is clipped, the loss -r A of a token is also its gradient
    expected = np.where(in_loss, -np.exp(new - old) * broadcast_to_tokens(BATCH, weight * advantages), 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert loss == pytest.approx(expected.sum(), rel=1e-5)


def test_these_places_put_the_sequences_of_a_rollout_into_other_microbatches_and_ranks_and_have_a_filler() -> None:
    plans = [plan_epochs(BATCH, config_of("token_mean", *place), step=0)[0][0] for place in PLACES]
    together, apart, on_two, with_filler = plans
    assert len(list(microbatches(together))) == 1
    assert not any({0, 1} <= set(rows) for rows in microbatches(apart))
    of_first, of_second = (set(BATCH.rollouts[np.concatenate(rank)]) for rank in on_two.microbatches)
    assert of_first & of_second
    assert not all(len(rows) for rows in microbatches(with_filler))
    assert filler().rollout_tokens.tolist() == [0]


def test_the_branches_of_a_rollout_are_computed_together_and_their_beginning_once() -> None:
    prompt, other = list(range(100, 140)), list(range(200, 240))
    masks = [[0] * 40 + [1] * 2, [0] * 43 + [1], [0] * 40 + [1]]
    group = group_of(
        [
            joined(
                rollout_of([*prompt, a, 2], masks[0], sample=a),
                rollout_of([*prompt, a, 7, 3], masks[1][1:], sample=a),  # goes on from the first turn
                rollout_of([*other, a], masks[2], sample=a),  # begins with nothing of it
            )
            for a in range(2)
        ]
    )
    batch = make_batch([group], mask_truncated=False)
    ((minibatch,),) = plan_epochs(batch, config_of("token_mean", 1, 100), step=0)
    together = [set(rows.tolist()) for rows in microbatches(minibatch)]
    assert any({0, 1, 3, 4} <= rows for rows in together)
    computed = [batch.tokens.take(rows) for rows in microbatches(minibatch)]
    taken = sum(len(packed.token_ids) - int(shared_beginnings(packed).sum()) for packed in computed)
    # each prompt once; in each rollout a and 2, then 7 and 3 after the a that is shared; then its own a
    assert taken == 40 + 2 * (2 + 2) + 40 + 2 * 1
