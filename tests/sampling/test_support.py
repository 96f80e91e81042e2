"""The support of each sampled token stays with it: cut, between the turns of a rollout, in a batch and its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import group_of, make_config, rollout_of

from rlhf.algo.packing import pack
from rlhf.sampling.requests import Completion, engine_arguments
from rlhf.sampling.token_log import TokenLog
from rlhf.step.batch import make_batch
from rlhf.types import PackedTokens, Support, TokenSequence


def completion(*supports: list[int]) -> Completion:
    """Tokens that are the first of their supports; an empty one is the whole vocabulary, and its token is 9."""
    ids = np.array([support[0] if support else 9 for support in supports], np.int32)
    flat = np.array([token for support in supports for token in support])
    support = Support.from_sizes(flat, np.array([len(each) for each in supports]))
    return Completion(ids, np.zeros(len(ids), np.float32), "stop", (), support=support)


def listed(support: Support | None) -> list[list[int]]:
    assert support is not None
    assert (support.ids.dtype, support.offsets.dtype) == (np.int32, np.int64)
    return [support.ids[a:b].tolist() for a, b in zip(support.offsets[:-1], support.offsets[1:], strict=True)]


def sequence_of(*turns: Completion) -> TokenSequence:
    """A prompt of two tokens and these turns; after each, one token is said."""
    log = TokenLog(np.array([90, 91], np.int32))
    for turn in turns:
        log.add_sampled(turn)
        log.add_said(np.array([80], np.int32))
    return log.sequence()


def test_prompts_and_what_was_said_have_no_support_and_unrestricted_rollouts_cost_nothing() -> None:
    sequence = sequence_of(completion([1, 2], []), replace(completion([]), support=None), completion([4, 5, 6]))
    assert listed(sequence.support) == [[], [], [1, 2], [], [], [], [], [4, 5, 6], []]
    assert sequence_of(completion([], [])).support is None
    assert pack([np.array([1, 2])]).support is None


def test_rows_of_a_batch_take_their_supports_with_them_in_any_order() -> None:
    sequences = [sequence_of(completion([1, 2], [3])), sequence_of(completion([])), sequence_of(completion([5, 6, 7]))]
    rollouts = [replace(rollout_of([0, 1]), sequences=(sequence,)) for sequence in sequences]
    tokens = make_batch([group_of(rollouts)], mask_truncated=False).tokens
    rows = [[[], [], [1, 2], [3], []], [[]] * 4, [[], [], [5, 6, 7], []]]
    assert listed(tokens.support) == [*rows[0], *rows[1], *rows[2]]
    assert listed(tokens.take(np.array([2, 0])).support) == [*rows[2], *rows[0]]
    assert isinstance(tokens, PackedTokens)
    with pytest.raises(ValueError, match=r"row 0: 5 tokens, but 4 values in support"):
        pack([sequences[0].token_ids], supports=[Support.from_sizes(np.zeros(0), np.zeros(4))])


def test_an_engine_returns_supports_only_where_something_restricts_sampling(tmp_path: Path) -> None:
    gpu: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "cluster": {"device": "cuda"}}
    assert "return_sampling_mask" not in engine_arguments(make_config(tmp_path), seed=0)
    for rollout in ({"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.05}):
        arguments = engine_arguments(make_config(tmp_path, rollout=rollout, **gpu), seed=0)
        assert arguments["return_sampling_mask"] is True
        assert arguments["logprobs_mode"] == "processed_logprobs"
