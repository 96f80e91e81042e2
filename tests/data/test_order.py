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

from rlhf.config.data import CurriculumConfig
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


def with_curriculum(data: dict[str, list[Prompt]], **settings: Any) -> PromptStream:
    return PromptStream(data, seed=4, curriculum=CurriculumConfig(**settings))


def train(stream: PromptStream, count: int, solved: Callable[[str], float]) -> list[Prompt]:
    """Draw and grade prompts one after the other."""
    assert stream.curriculum is not None
    taken = []
    for _ in range(count):
        position = stream.drawn
        taken += stream.take(1)
        stream.curriculum.record(position, solved(taken[-1].id))
    return taken


def half_of_a_is_solved(prompt: str) -> float:
    source, row = prompt.split("/")
    return 1.0 if source == "a" and int(row) <= 20 else 0.5


def test_the_first_pass_is_that_without_a_curriculum_then_solved_prompts_come_less_and_others_again() -> None:
    data = {"a": prompts("a", 40)}
    stream, plain = with_curriculum(data), PromptStream(data, seed=4)
    assert ids(train(stream, 40, half_of_a_is_solved)) == ids(plain.take(40))
    later = train(stream, 400, half_of_a_is_solved)
    times = Counter(ids(later))
    solved = sum(times[f"a/{row}"] for row in range(1, 21))
    assert 0.05 * 400 < solved < 0.25 * 400  # a quarter of a half is drawn all the same
    assert sum(times.values()) == 400
    assert len({(prompt.id, prompt.epoch) for prompt in later}) == 400  # the noise of a rollout comes from the two
    assert stream.curriculum is not None
    metrics = stream.curriculum.metrics()
    assert metrics["data/curriculum/too_easy_fraction"] == 0.5
    assert metrics["data/curriculum/too_hard_fraction"] == 0
    assert metrics["data/curriculum/replaced"] == 200 - solved


def test_prompts_come_the_more_often_the_more_their_responses_may_differ() -> None:
    rates = {"easy": 0.875, "half": 0.5, "hard": 0.25}
    stream = with_curriculum({"a": prompts("a", 120)}, max_pass_rate=0.9)

    def solved(prompt: str) -> float:
        return rates[list(rates)[int(prompt.split("/")[1]) % 3]]

    train(stream, 120, solved)
    times = Counter(solved(prompt.id) for prompt in train(stream, 3000, solved))
    # Kept with 4 r (1 - r), which is 0.44, 1 and 0.75; the replacements are shared in the same proportion.
    replaced = 1000 * ((1 - 0.4375) + (1 - 0.75))
    for rate, count in times.items():
        useful = 4 * rate * (1 - rate)
        assert count == pytest.approx(1000 * useful + replaced * useful / (0.4375 + 1 + 0.75), rel=0.1)


def test_a_prompt_never_replaces_itself() -> None:
    stream = with_curriculum({"a": prompts("a", 40)})
    train(stream, 400, lambda prompt: 0.05 if prompt == "a/1" else 1.0)
    assert stream.curriculum is not None
    replaced = stream.curriculum.metrics()["data/curriculum/replaced"]
    again = stream.curriculum.metrics()["data/curriculum/too_easy_fraction"]
    assert 0 < replaced < 0.25 * 360  # only a/1 can take a place, at most once in five draws
    assert again > 0.9


def test_shares_by_source_hold_whatever_is_solved() -> None:
    stream = with_curriculum({"a": prompts("a", 40), "b": prompts("b", 20)}, warmup_epochs=0)
    for _ in range(5):
        epoch = train(stream, 60, half_of_a_is_solved)
        assert Counter(prompt.source for prompt in epoch) == {"a": 40, "b": 20}


def test_no_prompt_fills_a_step_where_few_are_left_and_solved_ones_come_where_none_is() -> None:
    stream = with_curriculum({"a": prompts("a", 80)})
    train(stream, 80, lambda prompt: float(prompt != "a/1"))
    drawn = ids(train(stream, 80, lambda prompt: 0.5 if prompt == "a/1" else 1.0))
    assert 2 <= drawn.count("a/1") <= 9
    assert len(set(drawn)) > 60
    stream = with_curriculum({"a": prompts("a", 8)})
    assert len(set(ids(train(stream, 16, lambda _: 0.0))[8:])) == 8


@pytest.mark.slow
@given(before=st.integers(1, 60), seen=st.integers(0, 9))
def test_a_resumed_curriculum_goes_on_as_if_it_had_not_stopped(before: int, seen: int) -> None:
    """Also where prompts were drawn before the checkpoint and are graded after it."""
    data = {"a": prompts("a", 12), "b": prompts("b", 8)}
    whole = with_curriculum(data)
    train(whole, before, half_of_a_is_solved)
    outstanding = range(whole.drawn, whole.drawn + seen)
    waiting = whole.take(seen)
    state = json.loads(json.dumps(whole.state(outstanding)))
    resumed = with_curriculum(data)
    resumed.restore(state)
    resumed.drawn -= seen
    again = resumed.take(seen)
    for stream in (whole, resumed):
        assert stream.curriculum is not None
        for position, prompt in zip(outstanding, waiting, strict=True):
            stream.curriculum.record(position, half_of_a_is_solved(prompt.id))
    drawn = [[(p.id, p.epoch) for p in train(stream, 40, half_of_a_is_solved)] for stream in (whole, resumed)]
    assert [(p.id, p.epoch) for p in again] == [(p.id, p.epoch) for p in waiting]
    assert drawn[0] == drawn[1]


def test_an_older_group_that_ends_later_does_not_replace_the_newer_pass_rate() -> None:
    stream = with_curriculum({"a": prompts("a", 1)})
    stream.take(2)
    assert stream.curriculum is not None
    stream.curriculum.record(1, 1.0)
    stream.curriculum.record(0, 0.5)
    assert stream.curriculum.metrics()["data/curriculum/too_easy_fraction"] == 1
