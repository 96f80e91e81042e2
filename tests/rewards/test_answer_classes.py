"""Which answers of a group say the same, as each part of the reward compares them."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf.rewards.registry import run


def classes(part: str, *answers: str, **options: Any) -> list[float | None]:
    job = {"name": "answer_classes", "part": part, "options": options, "answers": answers}
    return [one.value for one in run(job, {}).group]


@pytest.mark.parametrize(
    ("part", "answers", "firsts"),
    [
        ("math", [r"\frac{1}{2}", "0.5", r"\dfrac12", "2"], [0, 0, 0, 3]),
        ("math", ["3+4", "7", "8", "7.0", "5+2"], [0, 0, 2, 0, 0]),  # also where strict mode wants it worked out
        ("math", [r"50\%", "0.5", "5 cm", "5", r"x=5"], [0, 0, 2, 2, 2]),
        ("math", ["2", "x^2", r"2x", "2*x", "x^{2}", "2"], [0, 1, 2, 2, 1, 0]),
        ("math", [r"\text{yes}", "yes", "no", "(1, 2)", "(1,2)"], [0, 0, 2, 3, 3]),
        ("math", [r"\frac{1}{", "1", r"\frac{1}{"], [0, 1, 0]),  # cannot be read: as it is spelled
        ("gsm8k", ["1200", "1200.0", "12"], [0, 0, 2]),
        ("exact", ["New  York", "new york", "York", "a{b"], [0, 0, 2, 3]),
        ("multiple_choice", ["A", "B"], [0, 1]),
        ("f1", ["the cat", "cat", "the dog"], [0, 0, 2]),
    ],
)
def test_an_answer_is_of_the_class_of_the_first_that_it_equals(
    part: str, answers: list[str], firsts: list[int]
) -> None:
    assert classes(part, *answers) == firsts


def test_the_options_of_the_part_hold() -> None:
    assert classes("exact", "a", "A", ignore_case=False) == [0, 1]
    assert classes("math", "100", "101", tolerance={"relative": 0.05}) == [0, 0]


def test_an_answer_that_asks_for_much_work_costs_only_itself() -> None:
    hard = r"\sum_{a=1}^{2000}\sum_{b=1}^{2000}\frac{1}{a+b}"
    assert classes("math", "1", hard, "2", "1.0") == [0, 1, 2, 0]
