"""Any text can be parsed or compared in finite time, with no exception but the two of node.py."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.answers.clean import clean
from rlhf.answers.compare import compare
from rlhf.answers.extract import STEPS, extract
from rlhf.answers.node import UnsupportedError
from rlhf.answers.tree import parse

pytestmark = pytest.mark.slow

PIECES = r"""
    \frac \sqrt \boxed { } ( ) [ ] \{ \} , ; : = < > \le \in \cup ^ _ ! ' | + - * / 0 1 7 12 3.5 1,000 x y e i \pi
    \infty \pm \sin \log \sum \prod \text{cm} \text{and} \% \$ $ ^\circ \begin{pmatrix} \end{pmatrix} & \\ \overline{3}
    \ldots #### <answer> </answer> <think> </think> answer is or half-a-word \binom \left \right \bmod \lfloor \rfloor
"""
TEXTS = st.lists(st.sampled_from(PIECES.split()) | st.text(max_size=3), max_size=25).map(" ".join) | st.text(
    max_size=60
)


@settings(max_examples=300)
@given(TEXTS)
def test_any_text_can_be_searched_and_cleaned(text: str) -> None:
    stated = extract(text, list(STEPS))
    assert stated is None or stated.strip()
    clean(text)


@settings(max_examples=300)
@given(TEXTS)
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(UnsupportedError):
        parse(clean(text))


@settings(max_examples=300)
@given(TEXTS, TEXTS)
def test_any_two_texts_are_equal_different_or_undecided(answer: str, gold: str) -> None:
    assert compare(answer, gold) in (True, False, None)


@settings(max_examples=200)
@given(st.integers(-(10**30), 10**30), st.integers(1, 10**6))
def test_a_fraction_equals_itself_and_not_its_neighbour(numerator: int, denominator: int) -> None:
    gold = rf"\frac{{{numerator}}}{{{denominator}}}"
    assert compare(f"{2 * numerator}/{2 * denominator}", gold) is True
    assert compare(f"{numerator + 1}/{denominator}", gold) is False
