"""The order of the prompts over a resume: none is lost and none comes twice. What is told of them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlhf.data.load import LoadedPrompts
from rlhf.run.prompts import PromptTickets, source_lines
from rlhf.run.state import RunState
from rlhf.types import Prompt


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
    assert resumed.waiting() == [4, 6]  # a checkpoint that is written now has them too
    assert drawn(resumed, 7) == [order[4], order[6], *order[7:]]
    assert resumed.waiting() == []
    assert resumed.stream.drawn == 12


def test_rows_that_are_left_out_are_told_by_source() -> None:
    loaded = LoadedPrompts({"a": [], "b": []}, {"a": 2, "b": 0}, {}, {"b": ["row 1"]}, {"b": Counter({"something": 3})})
    assert [*source_lines("data.eval", loaded, 8)] == [
        "data.eval a: 0 prompts, 2 left out as longer than 8 tokens",
        "data.eval b: 0 prompts, 1 left out as bad rows, the first: row 1",
        "data.eval b: in 3 prompts something",
    ]
