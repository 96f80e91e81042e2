"""The order of the prompts: every epoch whole, the mix exact, resumed to the prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.order import PromptStream
from rlhf.types import Prompt


def prompts(source: str, count: int) -> list[Prompt]:
    return [
        Prompt(f"{source}/{row}", 0, np.arange(row, row + 3, dtype=np.int32), (), str(row), source)
        for row in range(1, count + 1)
    ]


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in taken]


@given(count=st.integers(1, 12), takes=st.lists(st.integers(0, 9), max_size=12), seed=st.integers(0, 9))
def test_every_epoch_holds_every_prompt_once_however_it_is_taken(count: int, takes: list[int], seed: int) -> None:
    stream = PromptStream({"a": prompts("a", count)}, seed=seed)
    taken = [prompt for size in takes for prompt in stream.take(size)]
    assert [prompt.epoch for prompt in taken] == [position // count for position in range(len(taken))]
    for epoch in range(len(taken) // count):
        whole = [prompt.id for prompt in taken if prompt.epoch == epoch]
        assert sorted(whole) == sorted(ids(prompts("a", count)))


def test_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    data = {"a": prompts("a", 50)}
    stream = PromptStream(data, seed=1)
    first, second = ids(stream.take(50)), ids(stream.take(50))
    assert len({tuple(order) for order in (first, second, ids(data["a"]))}) == 3
    assert ids(PromptStream(data, seed=1).take(50)) == first
    assert ids(PromptStream(data, seed=2).take(50)) != first


def test_the_order_is_the_same_on_every_machine() -> None:
    assert ids(PromptStream({"a": prompts("a", 6)}, seed=3).take(8)) == [f"a/{row}" for row in [6, 5, 4, 1, 3, 2, 6, 1]]


@given(before=st.integers(0, 40), after=st.integers(1, 25), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_a_resumed_stream_continues_with_the_next_prompt(before: int, after: int, sizes: tuple[int, int]) -> None:
    data = {"a": prompts("a", sizes[0]), "b": prompts("b", sizes[1])}
    stream = PromptStream(data, seed=5, rows_per_epoch={"a": 1})
    stream.take(before)
    state = json.loads(json.dumps(stream.state(), sort_keys=True))
    resumed = PromptStream(dict(reversed(data.items())), seed=5, rows_per_epoch={"a": 1})
    resumed.restore(state)
    assert resumed.drawn == before
    expected, actual = stream.take(after), resumed.take(after)
    assert [(p.id, p.epoch) for p in actual] == [(p.id, p.epoch) for p in expected]


def test_resuming_far_into_a_run_needs_no_replay() -> None:
    stream = PromptStream({"a": prompts("a", 10)}, seed=0)
    stream.restore({**stream.state(), "drawn": 10**9 + 3})
    assert [prompt.epoch for prompt in stream.take(8)] == [10**8] * 7 + [10**8 + 1]


def test_an_epoch_takes_the_rows_of_each_source_that_the_mix_asks_for_and_other_ones_in_the_next() -> None:
    stream = PromptStream({"a": prompts("a", 40), "b": prompts("b", 5)}, seed=0, rows_per_epoch={"a": 10})
    assert stream.epoch_size == 15
    epochs = [stream.take(15) for _ in range(20)]
    for epoch in epochs:
        assert Counter(prompt.source for prompt in epoch) == {"a": 10, "b": 5}
        assert len(set(ids(epoch))) == 15
    assert sorted(ids(epochs[0])) != sorted(ids(epochs[1]))
    assert len({prompt.id for epoch in epochs for prompt in epoch}) == 45
    assert len({tuple(prompt.source for prompt in epoch) for epoch in epochs}) > 1  # sources are interleaved


def test_progress_is_counted_in_passes_over_the_data() -> None:
    stream = PromptStream({"a": prompts("a", 4)}, seed=0)
    stream.take(6)
    assert stream.epochs == 1.5


def _one_row_less(data: dict[str, list[Prompt]]) -> None:
    data["a"].pop()


def _another_answer(data: dict[str, list[Prompt]]) -> None:
    data["a"][3] = replace(data["a"][3], answer="other")


def _another_token(data: dict[str, list[Prompt]]) -> None:
    data["a"][3] = replace(data["a"][3], token_ids=np.array([9, 9, 9], dtype=np.int32))


def _another_source(data: dict[str, list[Prompt]]) -> None:
    data["c"] = prompts("c", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_one_row_less, r"source a was \{'rows': 8, .* is \{'rows': 7, "),
        (_another_answer, "source a was .*'fingerprint': .* now"),
        (_another_token, "source a was .*'fingerprint': .* now"),
        (_another_source, r"source c was absent .* is \{'rows': 2"),
    ],
)
def test_data_that_changed_since_the_checkpoint_is_an_error(
    change: Callable[[dict[str, list[Prompt]]], None], message: str
) -> None:
    state = PromptStream({"a": prompts("a", 8), "b": prompts("b", 8)}, seed=0).state()
    data = {"a": prompts("a", 8), "b": prompts("b", 8)}
    change(data)
    with pytest.raises(ValueError, match=message):
        PromptStream(data, seed=0).restore(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, r"run\.seed=1: .*run\.seed=0\b"),
        ({"seed": 0, "rows_per_epoch": {"a": 2}}, r"source a .*'rows_per_epoch': 8.*'rows_per_epoch': 2"),
    ],
)
def test_another_seed_or_mix_is_an_error_on_resume(settings: dict[str, Any], message: str) -> None:
    data = {"a": prompts("a", 8)}
    state = PromptStream(data, seed=0).state()
    with pytest.raises(ValueError, match=message):
        PromptStream(data, **settings).restore(state)


# --- the curriculum ---
