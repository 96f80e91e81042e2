"""The paired comparison of two evaluations, against values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import rollout_of

from rlhf import evaluate
from rlhf.run.evaluation import compare, read_responses, sign_flip_p_value
from rlhf.types import Prompt, RolloutGroup, ScoredRollout


def rows(values: Sequence[Sequence[float | None]], *, first: int = 0, metric: str = "exact") -> list[dict[str, Any]]:
    """Graded responses: `values[i]` are those of problem i."""
    return [
        {"prompt_id": f"test/{first + i}", "prompt": f"What is {first + i}?", "metric": metric, "value": value}
        for i, of_problem in enumerate(values)
        for value in of_problem
    ]


def test_with_one_response_each_it_is_mcnemars_exact_test() -> None:
    """9 problems better and 2 worse: twice the chance of at most 2 heads in 11 throws, 2 (1 + 11 + 55) / 2048."""
    differences = np.array([1] * 9 + [-1] * 2 + [0] * 5)
    assert sign_flip_p_value(differences) == pytest.approx(134 / 2048, rel=1e-12)


def test_small_p_values_are_exact_too() -> None:
    differences = np.array([1] * 90 + [-1] * 10)
    expected = 2 * sum(comb(100, k) for k in range(11)) / 2**100
    assert sign_flip_p_value(differences) == pytest.approx(expected, rel=1e-9)


def test_with_several_responses_each_sign_of_each_difference_is_equally_likely() -> None:
    """3, 2 and -1 sum to 4. Of the 8 sums 6, 4, 2, 0 and their negatives, four are at least 4 from 0."""
    assert sign_flip_p_value(np.array([3, 2, -1, 0])) == pytest.approx(4 / 8)


def test_differences_that_are_no_whole_numbers_take_random_signs() -> None:
    """Of the 16 sums of +-1.5, 1.5, 1.5 and 0.5, those of 5 and -5 alone are as far from 0 as 5."""
    assert sign_flip_p_value(np.array([1.5, 1.5, 1.5, 0.5])) == pytest.approx(2 / 16, abs=0.01)
    assert sign_flip_p_value(np.array([0.5] * 40)) == pytest.approx(1 / 20_001)
    assert sign_flip_p_value(np.array([1.0] * 2 + [1e6])) == pytest.approx(0.25, abs=0.01)  # whole, and too large


@pytest.mark.parametrize("differences", [[], [0, 0], [1, -1], [2, -1, -1]])
def test_no_change_in_total_has_a_p_value_of_one(differences: list[int]) -> None:
    assert sign_flip_p_value(np.array(differences, int)) == pytest.approx(1.0)


def test_accuracies_and_the_problems_that_changed() -> None:
    before = rows([[True, False], [False, False], [True, True], [False, False]])
    after = rows([[True, True], [True, False], [False, True], [False, False]])
    found = compare(before, list(reversed(after)))
    assert (found.problems, found.before, found.after) == (4, 3 / 8, 4 / 8)
    assert (found.better, found.worse) == (2, 1)
    assert found.p_value == pytest.approx(1.0)  # sums of 1, 1 and -1: all eight are at least 1 from 0
    assert "accuracy 0.375 -> 0.500 on the same 4 problems: 2 better, 1 worse, 1 as before\np" in str(found)


def test_responses_that_nothing_graded_are_not_wrong_and_a_problem_without_others_is_left_out() -> None:
    before = rows([[1, None], [0, 0], [None, None], [1, 1]])
    found = compare(before, rows([[1, 0], [0, 1], [1, 1], [None, None]]))
    assert (found.problems, found.left_out, found.ungraded) == (2, 2, (3, 2))
    assert (found.before, found.after) == (1 / 2, 1 / 2)  # 1 and 0; 1/2 and 1/2
    assert (found.better, found.worse, found.p_value) == (1, 1, 1.0)
    assert "3 responses before, 2 after; 2 problems without a graded response in both" in str(found)
    nothing = compare(rows([[None]]), rows([[1]]))
    assert "accuracy: no problem has a graded response in both evaluations" in str(nothing)


def test_values_outside_of_0_to_1_are_compared_as_values_by_their_name() -> None:
    found = compare(
        rows([[1.25], [0.5], [0.5]], metric="own.py:score"), rows([[1.0], [1.25], [1.25]], metric="own.py:score")
    )
    assert (found.name, found.before, found.after) == ("own.py:score", 0.75, pytest.approx(3.5 / 3))
    assert (found.better, found.worse) == (2, 1)
    assert found.p_value == pytest.approx(4 / 8, abs=0.02)  # +-0.75, 0.75 and 0.25: 4 of 8 sums are 1.25 or more from 0
    assert compare(rows([[0.5]], metric="reward_model"), rows([[0.6]], metric="reward_model")).name == "reward_model"


@pytest.mark.parametrize(
    "after",
    [rows([[True]]), rows([[True], [True]], first=1), rows([[True, True], [True, True]]), []],
    ids=["fewer problems", "other problems", "more responses", "none"],
)
def test_evaluations_of_different_problems_are_not_compared(after: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"\b2 and \d\b.*\bevaluation\.samples_per_prompt\b"):
        compare(rows([[True], [False]]), after)


def test_responses_come_back_from_their_file(tmp_path: Path) -> None:
    graded = rows([[True], [False]])
    (tmp_path / "before.jsonl").write_text("".join(json.dumps(row) + "\n" for row in graded))
    assert read_responses(tmp_path / "before.jsonl", samples_per_prompt={1}, metrics={"exact"}) == graded
    with pytest.raises(ValueError, match=r"before\.jsonl: it has values of exact, but evaluation\.metric is math here"):
        read_responses(tmp_path / "before.jsonl", samples_per_prompt={1}, metrics={"math"})


@pytest.mark.parametrize(("text", "number"), [("", "no"), (json.dumps(rows([[True]])[0]) + "\n", "1")])
def test_a_file_with_another_number_of_responses_is_refused_before_the_evaluation(
    tmp_path: Path, text: str, number: str
) -> None:
    (tmp_path / "before.jsonl").write_text(text)
    with pytest.raises(ValueError, match=rf"before\.jsonl: .*\b{number} responses.*samples_per_prompt=4"):
        read_responses(tmp_path / "before.jsonl", samples_per_prompt={4}, metrics={"exact"})


@pytest.mark.parametrize("text", ['{"prompt_id": 1}\n', "not JSON\n", "[1]\n", None])
def test_a_file_without_graded_responses_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "before.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"before\.jsonl: .*--responses"):
        read_responses(file, samples_per_prompt={1}, metrics={"exact"})


def graded_group(name: str, grades: list[float]) -> RolloutGroup:
    prompt = Prompt(name, 0, np.zeros(1, np.int32), ({"role": "user", "content": "Which?"},), "7", "test")
    ids, mask = np.zeros(2, np.int32), np.array([False, True])
    rollouts = [rollout_of(ids, mask, prompt_id=name, sample=i) for i in range(len(grades))]
    return RolloutGroup(
        prompt,
        tuple(
            ScoredRollout(rollout, "7", "7", grade - 0.3, {"length": -0.3, "math": grade}, "ok")
            for rollout, grade in zip(rollouts, grades, strict=True)
        ),
    )


def test_the_program_compares_with_the_responses_that_it_wrote_before(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine is left out: `grades` stands for what it sampled. A length penalty makes no answer wrong."""
    grades = {"a": [0.0], "b": [0.0], "c": [1.0]}

    async def sampled(_config: object) -> dict[str, list[RolloutGroup]]:
        return {"test": [graded_group(name, of_prompt) for name, of_prompt in grades.items()]}

    monkeypatch.setattr(evaluate, "sample_and_grade", sampled)
    before = tmp_path / "before.jsonl"
    flags = ["--config", str(Path(__file__).parents[2] / "configs/quickstart.yaml")]
    flags = [f"model.path={tiny_model_dir / 'model'}", f"data.eval={tiny_model_dir / 'test.jsonl'}", *flags]
    flags.append(f"data.train={tiny_model_dir / 'train.jsonl'}")
    evaluate.main([*flags, "--responses", str(before)])
    assert [row["value"] for row in map(json.loads, before.read_text().splitlines())] == [0.0, 0.0, 1.0]
    grades |= {"a": [1.0], "b": [1.0]}
    capsys.readouterr()
    evaluate.main([*flags, "--compare-with", str(before)])
    output = capsys.readouterr().out
    assert "accuracy 0.333 -> 1.000 on the same 3 problems: 2 better, 0 worse, 1 as before" in output
    assert "p = 0.5 " in output
