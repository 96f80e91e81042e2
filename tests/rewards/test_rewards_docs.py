"""docs/rewards.md is correct: its table of equalities is graded, and the names in it exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.config.reward import OPTIONS_OF_REWARD, STEPS_OF_MODE, MathOptions
from rlhf.rewards.grade import STATUSES
from rlhf.rewards.math import math_reward

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def table_after(mark: str) -> list[list[str]]:
    """Cells of the first table after the mark, without its head."""
    lines = iter(TEXT[TEXT.index(mark) :].splitlines()[1:])
    rows: list[str] = []
    for line in lines:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in rows[2:]]


EQUALITIES = table_after("<!-- equalities")


@pytest.mark.parametrize(("gold", "answer", "verdict"), [row[:3] for row in EQUALITIES])
def test_the_grader_agrees_with_the_table_of_equalities(gold: str, answer: str, verdict: str) -> None:
    assert verdict in ("right", "wrong")
    grade = math_reward(rf"\boxed{{{answer}}}", gold, MathOptions())
    assert grade.value == float(verdict == "right")


def test_every_reward_step_and_status_is_documented_and_no_other() -> None:
    assert {row[0] for row in table_after("sources, write a mapping")} >= set(OPTIONS_OF_REWARD)
    assert [row[0] for row in table_after("## Where the answer is looked for")] == list(STEPS_OF_MODE["lenient"])
    assert {row[0] for row in table_after("The pool needs Linux.")} == set(STATUSES)
