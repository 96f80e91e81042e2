"""Ground truth: the answer that a response is graded against, taken out of a data set's answer column.

    GSM8K   ... She makes 9 * 2 = $18 every day.\n#### 18         -> 18
    MATH    ... so the sum is $\boxed{\frac{1}{2}}$.              -> \frac{1}{2}
    text    p - q                                                 -> p - q

Only the string is taken out; whether two answers are equal is for the grader to say.
"""

from __future__ import annotations

import math
import re
from typing import Any

from rlhf.config.data import AnswerFormat

GSM8K_MARKER = re.compile(r"####[ \t]*([^\n#]*)\s*\Z")
GROUPED_NUMBER = re.compile(r"[-+]?\$?\d{1,3}(,\d{3})+(\.\d+)?")
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def extract_answer(value: Any, answer_format: AnswerFormat) -> str:
    """The ground truth in one cell of the answer column.

    Raises:
        ValueError: the reason, without naming the row: no answer at all, not text or a number, or no such marker in it.
    """
    text = _as_text(value)
    match answer_format:
        case "gsm8k":
            answer = gsm8k_answer(text)
        case "boxed":
            answer = boxed_answer(text)
        case "auto":
            answer = gsm8k_answer(text)
            if answer is None:
                answer = boxed_answer(text) if BOX.search(text) else text
        case "text" | "none":
            answer = text
    if answer is None:
        marker = "'#### ' and an answer on the last line" if answer_format == "gsm8k" else "complete '\\boxed{...}'"
        raise ValueError(f"has no {marker}: {_shortened(text)!r}")
    if not answer.strip():
        raise ValueError(f"has nothing where its answer should be: {_shortened(text)!r}")
    return answer.strip()


def gsm8k_answer(solution: str) -> str | None:
    """What follows `####` on the last line, without separators of thousands; None where there is none."""
    found = GSM8K_MARKER.search(solution)
    if not found:
        return None
    answer = found.group(1).strip()
    return answer.replace(",", "") if GROUPED_NUMBER.fullmatch(answer) else answer


def boxed_answer(solution: str) -> str | None:
    r"""Content of the last `\boxed{...}` with balanced braces (also `\fbox{...}` and `\boxed 5`); None without one."""
    boxes = list(BOX.finditer(solution))
    if not boxes:
        return None
    start = boxes[-1].end()
    if solution[start : start + 1] != "{":
        return re.split(r"[$\n]", solution[start:], maxsplit=1)[0].strip().removesuffix(".")
    depth = 0
    position = start
    while position < len(solution):
        match solution[position]:
            case "\\":
                position += 1  # an escaped brace is a character of the answer
            case "{":
                depth += 1
            case "}":
                depth -= 1
        if depth == 0:
            return solution[start + 1 : position]
        position += 1
    return None


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
