"""A class with one tool and a reward function, in the contract and the signature of TRL, for both trainers."""

from __future__ import annotations

import re
from typing import Any

from rlhf.environments.calculator import compute

BOXED = re.compile(r"\\boxed\{(-?\d+)\}")


class Calculator:
    """Counts the calls of its rollout."""

    def reset(self, **_: Any) -> None:
        self.calls = 0

    def calculator(self, expression: str) -> str:
        """
        Compute the value of an arithmetic expression.

        Args:
            expression: Such as 12 * (3 + 4).
        """
        self.calls += 1
        return compute(expression)


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 for the right number in the box of the last message."""
    found = [BOXED.findall(completion[-1]["content"] or "") for completion in completions]
    return [float(bool(numbers) and numbers[-1] == gold) for numbers, gold in zip(found, answer, strict=True)]
