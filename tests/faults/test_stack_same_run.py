"""A deterministic run, killed and resumed, equals the uninterrupted one: texts, metrics and weights, bit for bit."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_run import Fault, run_with_faults
from test_stack_grpo import read_log, run_grpo, write_config

pytestmark = [pytest.mark.stack, pytest.mark.faults]

# Of the clock and of memory, and what a process gathers since its start; every other metric is the same.
MEASURED = re.compile(r"time(/.*)?|memory/.*|.*_per_second|.*seconds|learner/mfu|policy/engine_kl_excess")


def write(folder: Path, data: Path) -> Path:
    folder.mkdir()
    path = write_config(
        folder, data, run={"steps": 4, "deterministic": True}, checkpoint={"every": 1, "keep": 9},
        evaluation={"every": 2, "at_start": False}, logging={"wandb": {"mode": "disabled"}, "token_values": True},
    )  # fmt: skip
    config = json.loads(path.read_text())
    config["reward"].append({"name": "format", "pattern": "(?s).*[aeiou].*"})  # of random letters a third has it
    path.write_text(json.dumps(config))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{name: x for name, x in row.items() if not MEASURED.fullmatch(name)} for row in read_log(run)]


def check_same(run: Path, other: Path) -> None:
    for step in range(1, 5):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run / name).read_text() == (other / name).read_text(), name
    for row, other_row in zip(metrics(run), metrics(other), strict=True):
        assert row == other_row
    last = "checkpoints/step-000004"
    files = sorted(path.relative_to(run) for path in (run / last).rglob("*.safetensors"))
    assert len(files) >= 4  # weights, two moments, generators
    for file in (*files, "model/model.safetensors"):
        assert (run / file).read_bytes() == (other / file).read_bytes(), file


def test_a_run_that_was_killed_and_resumed_with_more_engines_is_the_same_run(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    uninterrupted = run_grpo("--config", write(tmp_path / "uninterrupted", tiny_model_dir))
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-3000:]
    config = write(tmp_path / "killed", tiny_model_dir)
    killed = run_with_faults(config, [Fault(3, "update", "send_signals", ("SIGKILL",))])
    assert killed.status == -signal.SIGKILL, killed.errors[-3000:]
    resumed = run_grpo("--config", config, "--resume", "cluster.engines=2")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    check_same(tmp_path / "killed" / "run", tmp_path / "uninterrupted" / "run")
