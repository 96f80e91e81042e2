"""The gold answer that responses are compared with, extracted from a data set's answer column.

GSM8K   ... She makes 9 * 2 = $18 every day.\n#### 18         -> 18
MATH    ... so the sum is $\boxed{\frac{1}{2}}$.              -> \frac{1}{2}
text    p - q                                                 -> p - q
"""

from __future__ import annotations

import json
import math
from typing import Any

from rlhf.answers.extract import gold_answer
from rlhf.config.data import AnswerFormat


def extract_answer(value: Any, answer_format: AnswerFormat) -> str:
    """The gold answer in one cell of the answer column; for a list of acceptable answers, the list as JSON.

    Raises:
        ValueError: there is no answer, it is neither text nor a number, or it lacks the marker of the format. The
            message does not name the row.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple) and value:
        return json.dumps([extract_answer(item, answer_format) for item in value], ensure_ascii=False)
    text = _as_text(value)
    answer = gold_answer(text, answer_format)
    if answer is None:
        marker = "'#### ' and an answer on the last line" if answer_format == "gsm8k" else "complete '\\boxed{...}'"
        raise ValueError(f"has no {marker}: {_shortened(text)!r}")
    if not answer.strip():
        raise ValueError(f"has an empty answer: {_shortened(text)!r}")
    return answer.strip()


def _as_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise ValueError("is missing")
    if not isinstance(value, str | int | float):
        raise ValueError(f"is a {type(value).__name__}, not text or a number: {_shortened(str(value))}")
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if not text:
        raise ValueError("is empty")
    return text


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"...{text[-77:]}"
