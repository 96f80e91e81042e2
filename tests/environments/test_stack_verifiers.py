"""Three steps on the real stack from one line that names a taskset of verifiers: one turn, and with tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from packages import python_with
from waiting import STACK_WAIT_S

from rlhf.quickstart import write_quickstart

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.registry]

AGREEMENT = 1e-4  # float32: mean difference of log-probs of engine and learner, over every sampled token
FIXTURES = Path(__file__).parent.parent / "fixtures"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that imitates conversations of which some ask a calculator for products."""
    folder = tmp_path_factory.mktemp("products") / "quickstart"
    write_quickstart(folder, train_rows=256, test_rows=8, tools=True)
    return folder / "model"


def rollouts_of(run: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_taskset_trains_three_steps_from_one_line(tmp_path: Path, model: Path, has_tools: bool) -> None:
    python = python_with("verifiers>=0.4,<0.5")
    args = {"count": 40, "eval": 8, "task": {"tools": ["calculator"] if has_tools else []}}
    config: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "run"), "steps": 3, "seed": 1, "max_useless_steps": None},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"eval": {"path": "environment"}, "max_prompt_tokens": 128},
        "environment": {"name": "verifiers", "id": "products-v1", "args": args, "python": str(python)},
        "rollout": {
            "prompts_per_step": 8, "samples_per_prompt": 8, "max_response_tokens": 32, "max_rollout_tokens": 96,
            "max_turns": 3,
        },
        "learner": {"max_tokens_per_microbatch": 4096, "optimizer": {"lr": 1e-4}},
        "evaluation": {"every": 3},
        "cluster": {"device": "cpu"},
        "logging": {"wandb": {"mode": "disabled"}},
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.grpo", "--config", str(tmp_path / "config.yaml")],
        cwd=FIXTURES, env={**os.environ, "PYTHONPATH": str(FIXTURES.parents[1])},
        capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in logged if "time/step" in row]
    assert len(steps) == 3
    for row in steps:
        assert abs(row["policy/engine_kl"]) < AGREEMENT
        assert row["account/failed"] == 0
    assert steps[-1]["account/sampled"] == steps[-1]["account/trained"] + sum(
        steps[-1][f"account/{lost}"] for lost in ("filtered", "stale", "failed", "waiting")
    )
    evaluations = [row for row in logged if "eval/environment/avg@1" in row]
    assert [0 <= row["eval/environment/part/environment/right"] <= 1 for row in evaluations] == [True, True]

    rollouts = [row for step in (1, 2, 3) for row in rollouts_of(tmp_path / "run", step)]
    tasks = Counter(row["facts"]["task"] for row in rollouts)
    assert set(tasks.values()) == {8}  # the members of a group have one task, and no task comes twice in an epoch
    assert len(tasks) == 24
    held_out = {f"{317 + number}x{999 - 7 * number}" for number in range(8)}
    assert not tasks.keys() & held_out
    for row in rollouts:
        parts = row["reward_parts"]
        assert parts["environment"] == parts["environment/right"] - parts["environment/length"] / 1024
    answers = [turn["content"] for row in rollouts for turn in row["turns"] if turn["role"] == "tool"]
    assert any(answer.isdigit() for answer in answers) == bool(answers) == has_tools
    assert any(row["reward_parts"]["environment/right"] for row in rollouts) == has_tools
