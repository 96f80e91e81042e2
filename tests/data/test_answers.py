"""Ground truth out of the answer columns of GSM8K, MATH and plain data sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.answers.extract import alternatives, gold_answer
from rlhf.config.data import AnswerFormat
from rlhf.config.reward import MathOptions
from rlhf.data.answers import extract_answer
from rlhf.rewards.math import math_reward


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("He makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"),
        ("so\n#### 1,080\n", "1080"),
        ("#### -2,125,000.50 ", "-2125000.50"),
        ("#### 1,2", "1,2"),  # a pair, not a number
        ("####5", "5"),
        ("first\n#### 3\nthen\n#### 4", "4"),
        ("#### $12,000", "$12000"),
    ],
)
def test_gsm8k_answers_follow_the_last_marker_without_separators_of_thousands(solution: str, answer: str) -> None:
    assert gold_answer(solution, "gsm8k") == answer
    assert gold_answer(solution) == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"so the sum is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} and then $\boxed{x^{2^{n}}+1}$", r"x^{2^{n}}+1"),
        (r"the set is $\boxed{\{1, 2\}}$", r"\{1, 2\}"),
        (r"$\boxed{\left\{ x \right.}$ done}", r"\left\{ x \right."),
        (r"which is $\boxed 5$ in all", "5"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed {8}", "8"),
        (r"that is $\boxed\frac{3}{4}$ of it", r"\frac{3}{4}"),
        (r"roots are $\boxed{1}$ and $\boxed{2}$.", "1, 2"),
        (r"\boxed{1} is a root, and there are no others than \boxed{2}", "2"),
    ],
)
def test_math_answers_are_in_the_last_box_with_balanced_braces(solution: str, answer: str) -> None:
    assert gold_answer(solution, "boxed") == answer
    assert gold_answer(solution) == answer


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("p - q", "p - q"),
        (" 72\n", "72"),
        (72, "72"),
        (72.0, "72"),
        (0.5, "0.5"),
        (0, "0"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\left( 3, \frac{\pi}{2} \right)"),
        ("## heading", "## heading"),
    ],
)
def test_an_answer_without_a_marker_is_all_of_its_column(cell: object, answer: str) -> None:
    assert extract_answer(cell, "auto") == answer


def test_a_list_of_acceptable_answers_stays_a_list() -> None:
    loaded = extract_answer([r"so \boxed{1/2}", 0.5], "auto")
    assert alternatives(loaded) == ["1/2", "0.5"]
    assert alternatives("[1, 2]") == ["[1, 2]"]


def test_a_format_that_is_named_is_the_only_one_that_is_looked_for() -> None:
    both = "\\boxed{5}\n#### 6"
    assert gold_answer(both, "gsm8k") == "6"
    assert gold_answer(both, "boxed") == "5"
    assert gold_answer(both, "text") == both


@pytest.mark.parametrize(
    ("cell", "answer_format", "reason"),
    [
        (None, "auto", "is missing"),
        (float("nan"), "auto", "is missing"),
        ("", "auto", "is empty"),
        (" \n", "text", "is empty"),
        ([], "auto", "is a list"),
        (["5", None], "auto", "is missing"),
        ("it is 5", "gsm8k", "has no '#### '"),
        ("it is 5", "boxed", "has no complete"),
        (r"it is \boxed{5", "auto", "has no complete"),
        (r"not \boxed{4} but \boxed{5", "auto", "has no complete"),
        (r"it is \boxed{ }", "auto", "has an empty answer"),
        ("it is\n####", "auto", "has an empty answer"),
    ],
)
def test_a_cell_without_an_answer_says_why(cell: object, answer_format: AnswerFormat, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        extract_answer(cell, answer_format)


@pytest.mark.parametrize(
    "solution",
    [r"roots are \boxed{1} and \boxed{2}", "9 * 2\n#### 18", "#### 1,080", r"it is $\boxed{\frac{1}{2}}$", "p - q"],
)
def test_training_and_grading_a_file_know_the_same_gold_answer(solution: str) -> None:
    def graded(response: str, gold: str) -> float | None:
        return math_reward(response, gold, MathOptions()).value

    loaded = extract_answer(solution, "auto")
    assert gold_answer(loaded) == loaded
    for response in (rf"\boxed{{{loaded}}}", r"\boxed{2}", r"\boxed{1}"):
        assert graded(response, loaded) == graded(response, solution)
    assert graded(rf"\boxed{{{loaded}}}", loaded) == 1.0


BALANCED = st.recursive(
    st.text("ab+\\ ,1", max_size=4).filter(lambda text: not text.endswith("\\")),
    lambda inner: st.tuples(inner, inner).map(lambda pair: f"{pair[0]}{{{pair[1]}}}"),
)


@given(before=st.text("xyz$ {}", max_size=8), content=BALANCED, after=st.text("xyz$ .{}", max_size=8))
def test_any_balanced_content_of_a_box_comes_out_whole(before: str, content: str, after: str) -> None:
    assert gold_answer(f"{before}\\boxed{{{content}}}{after}", "boxed") == content.strip()
