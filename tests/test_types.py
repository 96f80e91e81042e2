"""The flat columns of a step: taking rows of them, and where the tokens of rows stand."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from worlds import make_config, make_groups, plan_first_epoch

from rlhf.algo.packing import pack
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PackedTokens, PolicyTargets, ValueTargets

# Four sequences of 2, 3, 1 and 4 tokens; the id of a token is 10 times its row plus its position.
LENGTHS = (2, 3, 1, 4)


def four_sequences() -> PackedTokens:
    ids = [np.arange(length, dtype=np.int32) + 10 * row for row, length in enumerate(LENGTHS)]
    masks = [np.arange(length) >= 1 for length in LENGTHS]
    return pack(ids, masks, [-x.astype(np.float32) for x in ids])


def test_rows_are_taken_in_the_order_they_are_named_with_all_their_columns() -> None:
    taken = four_sequences().take(np.array([3, 0, 2]))
    assert taken.token_ids.tolist() == [30, 31, 32, 33, 0, 1, 20]
    assert taken.response_mask.tolist() == [False, True, True, True, False, True, False]
    assert taken.rollout_logprobs.tolist() == [-30, -31, -32, -33, 0, -1, -20]
    assert taken.cu_seqlens.tolist() == [0, 4, 6, 7]
    assert taken.lengths.tolist() == [4, 2, 1]


def test_taking_keeps_types_and_taking_from_what_was_taken_is_one_taking() -> None:
    whole = four_sequences()
    order = np.array([2, 3, 1, 0])
    twice = whole.take(order).take(np.array([1, 3]))
    once = whole.take(order[[1, 3]])
    for name in ("token_ids", "response_mask", "rollout_logprobs", "cu_seqlens"):
        assert getattr(twice, name).tolist() == getattr(once, name).tolist()
        assert getattr(once, name).dtype == getattr(whole, name).dtype


def test_taking_no_row_gives_no_token() -> None:
    nothing = np.zeros(0, np.int64)
    taken = four_sequences().take(nothing)
    assert taken.cu_seqlens.tolist() == [0]
    assert len(taken.token_ids) == len(taken.response_mask) == len(taken.rollout_logprobs) == len(taken.lengths) == 0
    assert four_sequences().token_indices(nothing).tolist() == []


def test_the_columns_of_a_microbatch_belong_to_the_tokens_of_its_rows() -> None:
    """As a learner slices them: every minibatch, every microbatch, tokens and targets by the same index."""
    config = make_config(Path("nowhere/model"), learner={"max_tokens_per_microbatch": 128, "minibatches_per_epoch": 2})
    batch, minibatches, _ = plan_first_epoch(
        config, make_groups(groups=6, samples=4, vocabulary=99, longest=40, seed=1)
    )
    own_row = broadcast_to_tokens(batch, np.arange(24))
    position = np.concatenate([np.arange(length) for length in batch.tokens.lengths]).astype(np.float32)
    policy, values = PolicyTargets(own_row, position, None), ValueTargets(position, own_row)
    for rows in (rows for minibatch in minibatches for rows in minibatch.microbatches[0]):
        packed, index = batch.tokens.take(rows), batch.tokens.token_indices(rows)
        np.testing.assert_array_equal(packed.token_ids, batch.tokens.token_ids[index])
        for targets, of_row, of_position in (
            (policy.take(index), "advantages", "old_logprobs"),
            (values.take(index), "returns", "old_values"),
        ):
            for row, (start, end) in zip(rows, itertools.pairwise(packed.cu_seqlens), strict=True):
                assert (getattr(targets, of_row)[start:end] == row).all()
                assert getattr(targets, of_position)[start:end].tolist() == list(range(end - start))
        assert policy.take(index).ref_logprobs is None
