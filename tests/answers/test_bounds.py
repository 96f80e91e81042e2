"""No text costs more than a fraction of a second."""

from __future__ import annotations

import time

import pytest

from rlhf.answers.compare import compare
from rlhf.answers.extract import STEPS, extract
from rlhf.answers.node import UndefinedError
from rlhf.answers.tree import parse
from rlhf.answers.value import evaluate, start_work


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        r"\sum_{a=1}^{2000}\sum_{b=1}^{2000}ab",
        r"\sum_{k=1}^{1999}\frac{1}{3^k+1}",
        "+".join([r"\binom{20000}{10000}"] * 400),
        "+".join([r"(3^{99999})^{1/7}"] * 500),
    ],
)
def test_a_value_that_costs_too_much_is_not_computed(text: str) -> None:
    start_work()
    with pytest.raises(UndefinedError, match="too much"):
        evaluate(parse(text), {})


@pytest.mark.slow
def test_each_comparison_has_its_own_bound() -> None:
    assert not compare(r"\sum_{a=1}^{2000}\sum_{b=1}^{2000}ab", "7")
    assert compare(r"\sum_{k=1}^{1000}k", "500500")


def test_a_megabyte_of_marks_costs_milliseconds() -> None:
    texts = [
        mark * (1_000_000 // len(mark))
        for mark in ("Answer: ", "**", "* ", "`", "$5 ", "####", "<answer>", "_1 ", "1,")
    ]
    started = time.process_time()
    for text in texts:
        extract(text, list(STEPS))
    assert (time.process_time() - started) / len(texts) < 0.25
