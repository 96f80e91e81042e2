"""The scripts of recipes that make data, choose prompts or compare runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

RECIPES = Path(__file__).parent.parent / "recipes"


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_teacher_is_shown_right_work(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", [{"question": "What is 347 + 285?", "answer": "632"}])
    runpy.run_path(str(RECIPES / "07-teacher/make_data.py"))["main"](str(train), str(tmp_path / "data/right.jsonl"))
    ((question, work),) = [row["messages"] for row in read_rows(tmp_path / "data/right.jsonl")]
    assert question == {"role": "user", "content": "What is 347 + 285?"}
    assert work == {"role": "assistant", "content": "12 13 06 \\boxed{632}"}


def test_every_fourth_prompt_is_slow_and_none_is_lost(tmp_path: Path) -> None:
    rows = [{"question": str(number), "answer": "0"} for number in range(8)]
    train = write_rows(tmp_path / "train.jsonl", rows)
    runpy.run_path(str(RECIPES / "09-slow-prompts/make_data.py"))["main"](str(train), str(tmp_path / "data"))
    slow, fast = (read_rows(tmp_path / f"data/{name}.jsonl") for name in ("slow", "fast"))
    assert [row["question"] for row in slow] == ["0", "4"]
    assert [row["question"] for row in fast] == ["1", "2", "3", "5", "6", "7"]
    assert {row["wait_s"] for row in slow} == {3.0}
    assert {row["wait_s"] for row in fast} == {0.0}


def test_the_table_has_what_a_step_took_who_waited_and_the_share_of_slow_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [{"step": 1, "time/step": 3.0, "time/learner_idle": 2.0}, {"step": 2, "time/step": 1.0}]
    evaluations = [{"step": step, "eval/test/avg@1": step / 4} for step in (0, 2)]
    write_rows(tmp_path / "lag-2/metrics.jsonl", [*steps, *evaluations])
    prompts = ["slow/1", "fast/1", "fast/2", "fast/3"]
    write_rows(tmp_path / "lag-2/rollouts/step-000001.jsonl", [{"prompt_id": prompt} for prompt in prompts])
    runpy.run_path(str(RECIPES / "09-slow-prompts/compare.py"))["main"](str(tmp_path / "lag-2"))
    assert capsys.readouterr().out.splitlines()[1].split() == ["lag-2", "2.0", "1.0", "0.0", "0.25", "0.50"]


@pytest.mark.parametrize(("question", "carries"), [("111 + 222", 0), ("348 + 285", 2), ("999 + 111", 3)])
def test_a_kind_of_sums_is_its_number_of_carries(question: str, carries: int) -> None:
    loop = runpy.run_path(str(RECIPES / "10-own-loop/loop.py"))
    prompt = SimpleNamespace(messages=[{"role": "user", "content": f"What is {question}?"}])
    assert loop["kind_of"](prompt) == f"{carries} carries"
