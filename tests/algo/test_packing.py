"""Minibatches, microbatches and packed rows (rlhf/algo/packing.py)."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import pack_rows, rollout_of

from rlhf.algo.packing import (
    FILLER_TOKENS,
    bundle_samples,
    bundle_sizes,
    draw_minibatches,
    filler,
    pack,
    pack_microbatches,
    sequence_cost,
    shared_beginnings,
)
from rlhf.algo.sizes import WHOLE_TOKENS
from rlhf.types import PackedTokens, Rollout

# --- minibatches ---


def test_minibatches_are_a_seeded_partition_into_nearly_equal_parts():
    parts = draw_minibatches(10, minibatches=3, seed=1, step=5, epoch=0)
    assert [len(part) for part in parts] == [4, 3, 3]
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    again = draw_minibatches(10, minibatches=3, seed=1, step=5, epoch=0)
    assert all((a == b).all() for a, b in zip(parts, again, strict=True))


def test_each_seed_step_and_epoch_has_its_own_order():
    orders = {
        tuple(draw_minibatches(50, minibatches=1, seed=seed, step=step, epoch=epoch)[0].tolist())
        for seed in (0, 1)
        for step in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 8


# --- microbatches ---


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    max_tokens=st.integers(100, 400),
    ranks=st.integers(1, 5),
)
def test_every_sequence_once_no_budget_exceeded_and_equal_counts_a_rank(lengths, max_tokens, ranks):
    sizes = np.array(lengths, dtype=np.int64)
    plan = pack_microbatches(sizes, max_tokens=max_tokens, shards=ranks)
    assert len(plan) == ranks
    assert len({len(microbatches) for microbatches in plan}) == 1
    assert len(plan[0]) >= 1
    microbatches = [microbatch for rank in plan for microbatch in rank]
    assert sorted(index for microbatch in microbatches for index in microbatch) == list(range(len(sizes)))
    assert all(sizes[microbatch].sum() <= max_tokens for microbatch in microbatches)
    assert plan == pack_microbatches(sizes, max_tokens=max_tokens, shards=ranks)


def test_best_fit_puts_a_sequence_into_the_tightest_room():
    # 70 and 60 open a bin each, 40 fits only beside 60, 30 only beside 70: two full bins, no third.
    plan = pack_microbatches(np.array([30, 60, 40, 70]), max_tokens=100, shards=1)
    assert sorted(plan[0]) == [[0, 3], [1, 2]]


def test_too_few_sequences_leave_fillers_as_empty_lists():
    plan = pack_microbatches(np.array([5]), max_tokens=10, shards=3)
    assert sorted(plan) == [[[]], [[]], [[0]]]
    assert pack_microbatches(np.array([], dtype=np.int64), max_tokens=10, shards=2) == [[[]], [[]]]


def test_slack_is_shared_instead_of_one_full_and_one_nearly_empty_microbatch():
    plan = pack_microbatches(np.full(11, 10), max_tokens=100, shards=2)
    assert sorted(len(rank[0]) for rank in plan) == [5, 6]


def test_ranks_get_equal_cost_in_every_round():
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 4096).astype(int) + 50, 1, 8192)
    plan = pack_microbatches(lengths, max_tokens=8192, shards=8)
    costs = np.array([[sequence_cost(lengths[microbatch]).sum() for microbatch in rank] for rank in plan])
    waiting = 1 - costs.sum() / (8 * costs.max(axis=0).sum())
    assert waiting < 0.03
    assert costs.sum(axis=1).max() / costs.sum(axis=1).mean() < 1.02


def test_one_sequence_over_the_budget_is_an_error_that_names_length_and_key():
    with pytest.raises(ValueError, match=r"learner\.max_tokens_per_microbatch=100: .*\b101 tokens\b"):
        pack_microbatches(np.array([3, 101]), max_tokens=100, shards=1)


@pytest.mark.parametrize("max_tokens", [4096, 16384])
def test_long_tailed_lengths_need_at_most_one_percent_more_than_the_bound(max_tokens):
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1, 20_000).astype(int) + 100, 1, max_tokens)
    (microbatches,) = pack_microbatches(lengths, max_tokens=max_tokens, shards=1)
    assert len(microbatches) <= 1.01 * math.ceil(lengths.sum() / max_tokens)


def test_packing_two_thousand_sequences_takes_milliseconds():
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1, 2048).astype(int), 1, 16384)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        pack_microbatches(lengths, max_tokens=16384, shards=8)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.05


# --- samples of one prompt ---


@given(
    samples=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=60),
    max_tokens=st.integers(100, 400),
    ranks=st.integers(1, 4),
)
def test_a_microbatch_of_bundles_computes_no_more_than_its_budget_and_holds_no_more_than_four_of_it(
    samples, max_tokens, ranks
):
    prompt_lengths = np.array([1 + 17 * prompt for prompt, _ in samples], np.int64)
    rollouts = [family_member(prompt, 1 + 17 * prompt, response) for prompt, response in samples]
    lengths = np.array([len(r.sequences[0].token_ids) for r in rollouts], np.int64)
    prompts = [prompt for prompt, _ in samples]
    bundles = bundle_samples(lengths, prompts, prompt_lengths, max_tokens=max_tokens, shards=ranks)
    assert sorted(index for members in bundles for index in members) == list(range(len(samples)))
    assert all(len({prompts[index] for index in members}) == 1 for members in bundles)
    sizes, costs = bundle_sizes(bundles, lengths, prompt_lengths)
    plan = pack_microbatches(sizes, max_tokens=max_tokens, shards=ranks, costs=costs)
    for microbatch in (members for rank in plan for members in rank if members):
        packed = pack_rows(rollouts, [index for bundle in microbatch for index in bundles[bundle]])
        empty = sum(not packed.response_mask[a:b].any() for a, b in itertools.pairwise(packed.cu_seqlens))
        assert len(packed.token_ids) - shared_beginnings(packed).sum() - empty <= max_tokens
        assert len(packed.token_ids) <= WHOLE_TOKENS * max_tokens


def family_member(prompt: int, length: int, response: int) -> Rollout:
    """Of the prompt with this number and length, with a response that no other begins like."""
    own = np.random.default_rng([prompt, response]).integers(1000, 10**9, response)
    ids = np.concatenate([np.full(length, prompt), own]).astype(np.int32)
    return rollout_of(ids, np.arange(len(ids)) >= length)


def test_a_long_prompt_is_computed_once_or_twice_a_group_and_not_for_each_of_its_samples():
    prompts = np.repeat(np.arange(32), 8)
    for prompt, response, budget in ((2000, 100, 16384), (600, 100, 8192), (1024, 128, 4096)):
        lengths, prompt_lengths = np.full(256, prompt + response), np.full(256, prompt)
        bundles = bundle_samples(lengths, prompts.tolist(), prompt_lengths, max_tokens=budget, shards=2)
        assert len(bundles) <= 2 * 32
        sizes, _ = bundle_sizes(bundles, lengths, prompt_lengths)
        assert sizes.max() <= budget


def test_bundles_are_small_enough_for_every_rank_to_get_its_share():
    lengths, prompts = np.full(64, 100), [0] * 64
    bundles = bundle_samples(lengths, prompts, np.full(64, 20), max_tokens=100_000, shards=4)
    sizes, costs = bundle_sizes(bundles, lengths, np.full(64, 20))
    plan = pack_microbatches(sizes, max_tokens=100_000, shards=4, costs=costs)
    loads = [sum(int(sizes[i]) for microbatch in rank for i in microbatch) for rank in plan]
    assert max(loads) / min(loads) < 1.1


def row_of(*sequences: str) -> PackedTokens:
    return pack([np.array([ord(c) for c in sequence], np.int32) for sequence in sequences])


def test_a_shared_beginning_is_what_a_sequence_and_the_one_before_it_have_in_common():
    assert shared_beginnings(row_of("abcd", "abxy", "abx", "bab", "babab")).tolist() == [0, 2, 2, 0, 3]
    assert shared_beginnings(row_of("abc", "abc", "ab")).tolist() == [0, 2, 1]  # each keeps a token of its own
    assert shared_beginnings(filler()).tolist() == [0]


# --- packed rows ---


def test_pack_puts_sequences_one_after_another_with_their_columns():
    masks = [np.array([False, True]), np.array([False, True, False, True])]
    packed = pack([np.array([7, 8]), np.array([1, 2, 3, 4])], masks, [np.array([0, -0.5]), np.array([0, -1.5, 0, -2])])
    assert packed.token_ids.tolist() == [7, 8, 1, 2, 3, 4]
    assert packed.response_mask.tolist() == [False, True, False, True, False, True]
    assert packed.rollout_logprobs.tolist() == [0, -0.5, 0, -1.5, 0, -2]
    assert packed.cu_seqlens.tolist() == [0, 2, 6]
    columns = (packed.token_ids, packed.response_mask, packed.rollout_logprobs, packed.cu_seqlens)
    assert [column.dtype for column in columns] == [np.int32, np.bool_, np.float32, np.int64]


@pytest.mark.parametrize("column", ["response_mask", "rollout_logprobs"])
def test_columns_that_do_not_fit_their_own_row_are_refused_even_if_the_sums_fit(column: str) -> None:
    sequences = [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32), np.arange(4, dtype=np.int32)]
    columns = {name: [np.ones(len(ids), bool) for ids in sequences] for name in ("response_mask", "rollout_logprobs")}
    pack(sequences, *columns.values())
    columns[column][1:] = [np.ones(4, bool), np.ones(5, bool)]
    with pytest.raises(ValueError, match=rf"row 1: 5 tokens.*\b4\b.*\b{column}\b"):
        pack(sequences, *columns.values())


def test_bare_sequences_are_masked_from_their_second_token_on():
    packed = pack([np.array([7, 8]), np.array([1, 2, 3])])
    assert packed.response_mask.tolist() == [False, True, False, True, True]
    assert not packed.rollout_logprobs.any()


def test_a_filler_is_two_tokens_with_nothing_to_train():
    packed = filler()
    assert packed.cu_seqlens.tolist() == [0, FILLER_TOKENS] == [0, 2]
    assert len(packed.token_ids) == len(packed.rollout_logprobs) == 2
    assert not packed.response_mask.any()
