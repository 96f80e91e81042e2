"""The task of `make real-model`: its answers, its form, and that training never sees a test problem."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config

ROOT = Path(__file__).parent.parent
TASK = runpy.run_path(str(ROOT / "recipes/08-lora-smollm2/make_data.py"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("task")
    TASK["write_task"](folder, 0)
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()}


def numbers_of(row: dict[str, Any]) -> frozenset[int]:
    return frozenset(map(int, re.findall(r"\d+", row["messages"][-1]["content"])))


def test_a_row_is_two_solved_examples_and_a_question() -> None:
    row = TASK["row"]((12, 98, 45, 60))
    assert row["answer"] == "98"
    assert [turn["content"] for turn in row["messages"]] == [
        "Answer with one number.",
        "Which is the largest: 34, 71, 12, 55?",
        "71",
        "Which is the largest: 83, 20, 96, 47?",
        "96",
        "Which is the largest: 12, 98, 45, 60?",
    ]


def test_every_answer_is_the_largest_of_four_different_numbers(files: dict[str, list[dict[str, Any]]]) -> None:
    for row in files["train"] + files["test"]:
        assert len(numbers_of(row)) == 4
        assert row["answer"] == str(max(numbers_of(row)))


def test_the_256_test_problems_are_no_training_problems_in_another_order(
    files: dict[str, list[dict[str, Any]]],
) -> None:
    train, test = ({numbers_of(row) for row in files[name]} for name in ("train", "test"))
    assert (len(train), len(test)) == (4096, 256)
    assert not train & test


def test_a_seed_makes_the_same_problems_again_and_another_seed_others() -> None:
    make = TASK["make_problems"]
    assert make(20, 1) == make(20, 1)
    assert not set(make(20, 1)) & set(make(20, 2))


def test_the_run_of_the_config_repeats_no_problem() -> None:
    config = load_config(GRPOConfig, [str(ROOT / "configs/real_model_cpu.yaml")])
    assert config.run.steps * config.rollout.prompts_per_step <= TASK["TRAIN_ROWS"]
