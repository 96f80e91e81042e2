"""What the soak plans, and how it judges memory."""

from __future__ import annotations

from collections import Counter

import pytest
import soak


def test_kills_are_in_the_first_half_so_that_the_last_processes_live_long() -> None:
    planned = list(soak.kills(5, 2, 500))
    assert Counter(what for _, what in planned) == {soak.ENGINE: 5, soak.LEARNER: 2}
    steps = [step for step, _ in planned]
    assert steps == sorted(set(steps))
    assert 0 < steps[0] < steps[-1] <= 250


def test_memory_is_judged_after_the_first_steps_of_a_process_and_over_its_own_life() -> None:
    filling = [10.0 * step for step in range(soak.SETTLED)]
    assert soak.Life("", [*filling, *[500.0] * 30]).growth() == 0.0
    assert soak.Life("", [*filling, *[500.0] * 10, *[520.0, 560.0] * 10]).growth() == pytest.approx(0.08)
    assert soak.Life("", filling).growth() is None  # too short a life
