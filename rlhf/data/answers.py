"""Ground truth: the answer that a response is graded against, taken out of a data set's answer column.

    GSM8K   ... She makes 9 * 2 = $18 every day.\n#### 18         -> 18
    MATH    ... so the sum is $\boxed{\frac{1}{2}}$.              -> \frac{1}{2}
    text    p - q                                                 -> p - q

The grader's own extractor takes the string out, since it grades against what that finds; it is given as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlhf.config.data import AnswerFormat

GoldAnswer = Callable[[str, AnswerFormat], str | None]  # a cell's text and its form -> the answer, None without one


def extract_answer(value: Any, answer_format: AnswerFormat, gold_answer: GoldAnswer) -> str:
    """The ground truth in one cell of the answer column.

    Args:
        gold_answer: the grader's extractor: what it grades against is what is trained on.

    Raises:
        ValueError: the reason, without naming the row: no answer at all, not text or a number, or no such marker in it.
    """
    text = _as_text(value)
    answer = gold_answer(text, answer_format)
    if answer is None:
        marker = "'#### ' and an answer on the last line" if answer_format == "gsm8k" else "complete '\\boxed{...}'"
        raise ValueError(f"has no {marker}: {_shortened(text)!r}")
    if not answer.strip():
        raise ValueError(f"has nothing where its answer should be: {_shortened(text)!r}")
    return answer.strip()


def _as_text(value: Any) -> str:
    match value:
        case None:
            raise ValueError("is missing")
        case str():
            text = value.strip()
        case bool():
            text = str(value)
        case int():
            text = str(value)
        case float() if math.isnan(value):
            raise ValueError("is missing")
        case float() if math.isfinite(value) and value == int(value):
            text = str(int(value))
        case float():
            text = str(value)
        case _:
            raise ValueError(f"is a {type(value).__name__}, not text or a number: {_shortened(str(value))}")
    if not text:
        raise ValueError("is empty")
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"...{text[-77:]}"
