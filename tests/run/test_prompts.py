"""The order of the prompts over a resume: none is lost and none comes twice. What is told of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, rollout_of

from rlhf.config.data import CurriculumConfig
from rlhf.data.load import LoadedPrompts
from rlhf.data.read import count_trained_rows
from rlhf.run.prompts import PromptTickets, RunData, source_lines
from rlhf.run.state import RunState
from rlhf.types import Prompt, RolloutGroup, ScoredRollout


def test_a_resumed_run_repeats_outstanding_prompts_and_then_continues_the_order() -> None:
    prompts = [Prompt(f"p/{row}", 0, np.array([1], np.int32), (), "", "p") for row in range(5)]
    loaded = LoadedPrompts(prompts={"p": prompts}, dropped_too_long={"p": 0}, rows_per_epoch={"p": 5})

    def drawn(tickets: PromptTickets, count: int) -> list[tuple[int, str, int]]:
        return [(t.position, t.prompt.id, t.prompt.epoch) for t in (tickets.next() for _ in range(count))]

    order = drawn(PromptTickets(loaded, seed=3, restored=None), 12)
    assert len({prompt_id for _, prompt_id, _ in order[:5]}) == 5

    first = PromptTickets(loaded, seed=3, restored=None)
    drawn(first, 7)
    state = RunState(step=2, stream=first.stream.state(), outstanding=[4, 6])
    resumed = PromptTickets(loaded, seed=3, restored=state)
    assert [ticket.position for ticket in resumed.waiting] == [4, 6]  # a checkpoint that is written now has them too
    assert drawn(resumed, 7) == [order[4], order[6], *order[7:]]
    assert not resumed.waiting
    assert resumed.stream.drawn == 12


def test_equal_rows_of_an_environment_are_no_rows_that_are_shared() -> None:
    def data(*columns: dict[str, str]) -> RunData:
        rows = [Prompt(f"p/{i}", 0, np.array([1], np.int32), (), "", "p", each) for i, each in enumerate(columns)]
        train, evaluation = (LoadedPrompts({"p": some}, {}, {}) for some in (rows[:-2], rows[-2:]))
        return RunData(train, evaluation)

    def shared(data: RunData, **sections: Any) -> dict[str, int]:
        return count_trained_rows(*data.row_keys(make_config(Path("model"), **sections)))

    play, task_1, task_2 = {"prompt": "Play."}, {"prompt": "Play.", "task": "1"}, {"prompt": "Play.", "task": "2"}
    environment = {"environment": {"name": "games:Game"}}
    assert shared(data(play, play, play, play)) == {"eval/p": 2}  # the model is given the same
    assert shared(data(play, play, play, play), **environment) == {"eval/p": 0}  # another world for each
    assert shared(data(task_1, play, task_1, task_2), **environment) == {"eval/p": 1}
    assert shared(data({}, {}, {}), **environment) == {"eval/p": 0}  # prompts that it makes


def test_rows_that_are_left_out_are_told_by_source() -> None:
    loaded = LoadedPrompts({"a": [], "b": []}, {"a": 2, "b": 0}, {}, {"b": ["row 1"]}, {"b": Counter({"something": 3})})
    assert [*source_lines("data.eval", loaded, 8)] == [
        "data.eval a: 0 prompts, 2 left out as longer than 8 tokens",
        "data.eval b: 0 prompts, 1 left out as bad rows, the first: row 1",
        "data.eval b: in 3 prompts something",
    ]


def test_the_curriculum_counts_the_graded_samples_whose_metric_is_right() -> None:
    (prompt,) = prompts = [Prompt("p/0", 0, np.array([1], np.int32), (), "", "p")]
    loaded = LoadedPrompts(prompts={"p": prompts}, dropped_too_long={"p": 0}, rows_per_epoch={"p": 1})
    tickets = PromptTickets(
        loaded, seed=3, restored=None, curriculum=CurriculumConfig(), metric_of={"p": "exact"}.__getitem__
    )
    values = [1.0, 0.0, 1.0, None]
    samples = tuple(
        ScoredRollout(rollout_of([1]), "", "", 1.0, {"format": 1.0, "exact": value}, "ok") for value in values
    )
    tickets.record(tickets.next(), RolloutGroup(prompt, samples))
    assert tickets.stream.curriculum is not None
    assert tickets.stream.curriculum._rates.tolist() == [pytest.approx(2 / 3)]
