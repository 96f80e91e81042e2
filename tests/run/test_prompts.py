"""The order of the prompts over a resume: none is lost and none comes twice."""

from __future__ import annotations

import numpy as np

from rlhf.data.load import LoadedPrompts
from rlhf.run.prompts import PromptTickets
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
