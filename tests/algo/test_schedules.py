"""The learning rate is a function of the update and nothing else (rlhf/algo/schedules.py)."""

from __future__ import annotations

import ast
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.algo import schedules
from rlhf.algo.schedules import learning_rate


def curve(total: int, **options: object) -> list[float]:
    return [learning_rate(update, total_updates=total, **options) for update in range(1, total + 1)]  # type: ignore[arg-type]


def test_cosine_hand_numbers_with_warmup():
    # N = 6, w = 2: a ramp to lr, then p = 1/4, 1/2, 3/4, 1.
    rates = curve(6, lr=8.0, name="cosine", warmup_steps=2, min_lr=4.0)
    assert rates == pytest.approx([4, 8, 6 + math.sqrt(2), 6, 6 - math.sqrt(2), 4])


def test_linear_and_polynomial_hand_numbers():
    assert curve(4, lr=1.0, name="linear") == pytest.approx([0.75, 0.5, 0.25, 0])
    assert curve(4, lr=1.0, name="polynomial", power=2.0) == pytest.approx([0.5625, 0.25, 0.0625, 0])
    assert curve(4, lr=1.0, name="polynomial", min_lr=0.2) == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_constant_ignores_min_lr_and_keeps_its_warmup():
    assert curve(4, lr=1.0, min_lr=0.5) == [1, 1, 1, 1]
    assert curve(4, lr=1.0, warmup_steps=2) == [0.5, 1, 1, 1]


@given(
    total=st.integers(2, 500),
    warmup=st.integers(0, 499),
    lr=st.floats(1e-8, 1e-2),
    floor=st.floats(0, 1),
    name=st.sampled_from(["linear", "cosine", "polynomial"]),
)
def test_after_warmup_the_rate_never_rises_and_ends_at_min_lr(total, warmup, lr, floor, name):
    warmup = min(warmup, total - 1)
    rates = curve(total, lr=lr, name=name, warmup_steps=warmup, min_lr=floor * lr)
    assert all(a <= b for a, b in pairwise(rates[:warmup]))
    assert all(a >= b - 1e-12 * lr for a, b in pairwise(rates[max(warmup - 1, 0) :]))
    assert rates[-1] == pytest.approx(floor * lr, abs=1e-12 * lr)


def test_warmup_reaches_lr_exactly_at_its_last_update():
    for name in ("constant", "linear", "cosine", "polynomial"):
        assert learning_rate(7, total_updates=20, lr=3e-4, name=name, warmup_steps=7) == 3e-4


def test_more_cycles_make_the_cosine_rise_again():
    one_and_a_half = curve(300, lr=1.0, name="cosine", num_cycles=1.5)
    assert one_and_a_half[99] == pytest.approx(0, abs=1e-12)
    assert one_and_a_half[199] == pytest.approx(1)
    assert one_and_a_half[299] == pytest.approx(0, abs=1e-12)


def test_a_warmup_longer_than_the_run_is_a_ramp_that_never_ends():
    assert curve(3, lr=1.0, name="cosine", warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])


def test_the_module_imports_nothing_beyond_math():
    tree = ast.parse(Path(schedules.__file__).read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules == {"math", "__future__"}
