"""What a user's function may return, and in which form TRL's signature gets prompts and completions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlhf.rewards.grade import Grade
from rlhf.rewards.registry import call_user_function

USER = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"})


def graded(returned: Any) -> Grade:
    job = {"response": "r", "answer": "", "columns": {}, "metadata": {}, "options": {}}
    return call_user_function(lambda response, **_: returned, job)


@pytest.mark.parametrize(
    "returned",
    [
        {"score": 1.0, "acc": True, "pred": "42"},  # verl's math_dapo
        {"score": np.float32(1), "acc": 1, "pred": "42", "level": None, "tests": [1, 0], "note": "fine"},
    ],
)
def test_a_mapping_has_a_score_further_numbers_and_the_answer_as_pred(returned: dict[str, Any]) -> None:
    grade = graded(returned)
    assert (grade.value, grade.status, grade.extracted, grade.metrics) == (1.0, "ok", "42", {"acc": 1.0})


def test_the_name_of_a_number_can_be_written() -> None:
    assert graded({"score": 1, "half \ud83d": 2}).metrics == {"half \\ud83d": 2.0}


def test_a_value_that_is_no_number_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert graded({"score": 0, "feedback": "wrong"}).value == 0.0
    assert capsys.readouterr().out.count("'feedback'") == 1


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ({"score": "42"}, "returned score='42', no finite number"),
        ({"score": [1, 0]}, "returned score=[1, 0], no finite number"),
        ({"score": 1, "acc": float("nan")}, "returned acc=nan, no finite number"),
        ({"score": float("inf")}, "returned score=inf, no finite number"),
        ({"reward": 1}, "returned a mapping with ['reward'], without score"),
        ({"score": 1, "n": 10**400}, "returned a number too large for a float"),
        ({"score": 10**5000}, "returned a number too large for a float"),
        ("1", "returned str, no finite number"),
        (float("nan"), "returned nan, no finite number"),
        ({1}, "returned set, no finite number"),
    ],
)
def test_what_cannot_be_a_reward_is_named_with_its_key(returned: Any, problem: str) -> None:
    grade = graded(returned)
    assert (grade.value, grade.status) == (None, "failed")
    assert grade.detail.endswith(problem)


def given(*, prompt_is_text: bool, messages: Any = USER, **about: Any) -> dict[str, Any]:
    """What a function in TRL's signature gets for a group of two."""
    seen: dict[str, Any] = {}

    def function(prompts: Any, completions: Any, answer: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions)
        return [float(right in text) for right, text in zip(answer, completions, strict=True)]

    metadata = [{"messages": messages, "prompt_is_text": prompt_is_text, **about}] * 2
    job = {"responses": ["it is 4", "5"], "answer": "4", "columns": {"answer": "4"}, "metadata": metadata}
    return {"values": [one.value for one in call_user_function(function, job).group], **seen}


def test_a_function_of_trl_gets_texts_where_the_row_has_a_text_as_in_trl() -> None:
    """`answer in completion` is about a text; in a list of messages no text is ever found."""
    seen = given(prompt_is_text=True)
    assert (seen["prompts"], seen["completions"]) == (["2+2?"] * 2, ["it is 4", "5"])
    assert seen["values"] == [1.0, 0.0]


def test_a_function_of_trl_gets_messages_where_the_row_or_an_environment_has_them() -> None:
    seen = given(prompt_is_text=False)
    assert seen["prompts"] == [USER, USER]
    assert seen["completions"][1] == [{"role": "assistant", "content": "5"}]
    turns = ({"role": "assistant", "content": "so 4"},)
    assert given(prompt_is_text=True, turns=turns)["completions"] == [[*turns], [*turns]]
    assert given(prompt_is_text=True, turns=())["completions"][1] == [{"role": "assistant", "content": "5"}]
