"""The experts of each token stay with it: cut, between the turns of a rollout, in a batch and its rows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from worlds import group_of, make_config, rollout_of

from rlhf.algo.packing import pack
from rlhf.learner import tiny_model
from rlhf.rollout.purpose import training_purpose
from rlhf.rollout.worker import RolloutWorker
from rlhf.sampling.requests import Completion, SamplingSettings, check_experts, engine_arguments
from rlhf.sampling.token_log import TokenLog
from rlhf.step.batch import make_batch
from rlhf.types import Prompt

ON_GPU: dict[str, Any] = {"model": {"dtype": "bfloat16"}, "cluster": {"device": "cuda"}}
REPLAY: dict[str, Any] = {**ON_GPU, "learner": {"router_replay": "rollout"}}


def rows(*numbers: int) -> np.ndarray:
    """Experts n and n + 1 in both layers for each of these numbers."""
    return np.array([[[n, n + 1]] * 2 for n in numbers], np.uint8).reshape(-1, 2, 2)


def turn(tokens: int, *numbers: int) -> Completion:
    ids = np.arange(tokens, dtype=np.int32)
    return Completion(ids, np.zeros(tokens, np.float32), "stop", (), experts=rows(*numbers))


def numbers_of(experts: np.ndarray | None) -> list[int]:
    assert experts is not None
    assert (experts[..., 1] == experts[..., 0] + 1).all()
    return experts[:, 0, 0].tolist()


def test_each_turn_adds_the_experts_that_are_not_known_and_the_end_repeats_the_last_ones() -> None:
    log = TokenLog(np.array([90, 91], np.int32))
    assert log.sequence().experts is None
    log.add_sampled(turn(3, 1, 2, 3, 4))  # of two prompt tokens and two of three sampled ones
    assert log.recorded == 4
    assert numbers_of(log.sequence().experts) == [1, 2, 3, 4, 4]
    log.add_said(np.array([80], np.int32))
    whole, rest = (9, 9, 9, 9, 5, 6, 7), (5, 6, 7)
    for again in (whole, rest):  # an engine that returns all of the context, and one that returns what was asked for
        continued = TokenLog(np.array([90, 91], np.int32))
        continued.add_sampled(turn(3, 1, 2, 3, 4))
        continued.add_said(np.array([80], np.int32))
        continued.add_sampled(turn(2, *again))
        continued.add_said(np.array([80, 81], np.int32))
        assert numbers_of(continued.sequence().experts) == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7]


def test_each_turn_asks_for_the_experts_that_are_not_known() -> None:
    asked: list[int | None] = []

    async def generate(_: Any, settings: SamplingSettings, **__: Any) -> list[Completion]:
        asked.append(settings.experts_from)
        return [turn(1)]

    prompt = Prompt("p/0", 0, np.zeros(2, np.int32), (), "0", "p")
    for settings in (SamplingSettings(1.0, 5), SamplingSettings(1.0, 5, experts_from=0)):
        worker = RolloutWorker(make_config(Path("x")), tiny_model.make_tokenizer(), generate, cast(Any, None))
        continued = worker.next_turn_of(prompt, 0, settings)
        asyncio.run(continued(prompt.token_ids, max_tokens=3, turn=1, recorded=7))  # type: ignore[arg-type]
    assert asked == [None, 7]


def test_rows_of_a_batch_take_their_experts_with_them_in_any_order() -> None:
    sequences = []
    for prompt, numbers in (([90, 91, 92], (1, 2, 3)), ([90, 91, 93], (1, 7, 4)), ([90], (9,))):
        log = TokenLog(np.array(prompt, np.int32))
        if len(prompt) > 1:
            log.add_sampled(turn(1, *numbers))
        sequences.append(log.sequence())
    rollouts = [replace(rollout_of([0, 1]), sequences=(sequence,)) for sequence in sequences]
    tokens = make_batch([group_of(rollouts)], mask_truncated=False).tokens
    # the second prompt begins like the first: there it has its experts; the third has no record, and nothing sampled
    assert numbers_of(tokens.experts) == [1, 2, 3, 3, 1, 2, 4, 4, 0]
    assert numbers_of(tokens.take(np.array([2, 1])).experts) == [0, 1, 2, 4, 4]
    assert numbers_of(sequences[1].experts) == [1, 7, 4, 4]
    assert pack([np.array([1, 2])]).experts is None
    with pytest.raises(ValueError, match=r"row 0: 4 tokens, but 3 values in experts"):
        pack([sequences[0].token_ids], experts=[rows(1, 2, 3)])


def test_an_answer_with_the_experts_of_other_tokens_is_refused() -> None:
    assert numbers_of(check_experts(rows(1, 2, 3), 3)) == [1, 2, 3]
    for experts, said in ((None, "no experts"), (rows(1, 2), r"shape \(2, 2, 2\)"), (rows(1, 2, 3)[0], r"\(2, 2\)")):
        with pytest.raises(RuntimeError, match=rf"{said} for 3 tokens"):
            check_experts(experts, 3)


def test_engines_return_experts_only_for_training_and_only_where_they_are_replayed() -> None:
    assert "enable_return_routed_experts" not in engine_arguments(make_config(Path("x"), **ON_GPU), seed=0)
    config = make_config(Path("x"), **REPLAY, data={"train": "a", "eval": "b.jsonl"})
    arguments = engine_arguments(config, seed=0)
    assert arguments["enable_return_routed_experts"] is True
    assert arguments["enable_prefix_caching"] is True
    assert training_purpose(config, None).settings.experts_from == 0
    assert training_purpose(make_config(Path("x")), None).settings.experts_from is None
