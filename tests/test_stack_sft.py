"""Supervised fine-tuning on the real stack: what it writes, and that a run which was stopped goes on as it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented import check_documented
from test_stack_grpo import read_log
from waiting import STACK_WAIT_S, eventually

from rlhf.quickstart import make_demonstrations, make_problems, write_rows
from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.stack

STEPS = 80


def write_config(folder: Path, model: Path) -> Path:
    demonstrations = make_demonstrations(make_problems(50, seed=0), 420, seed=0)
    write_rows(folder / "train.jsonl", demonstrations[:400])
    write_rows(folder / "eval.jsonl", demonstrations[400:])
    config: dict[str, Any] = {
        "run": {"dir": "DIR", "steps": STEPS},
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_tokens": 64},
        "learner": {"sequences_per_update": 6, "optimizer": {"lr": 1e-3}, "schedule": {"name": "cosine"}},
        "evaluation": {"every": STEPS // 2},
        "logging": {"wandb": {"mode": "offline"}},
        "cluster": {"device": "cpu", "learners": 2, "sequence_parallel": 2},
    }
    file = folder / "sft.yaml"
    file.write_text(json.dumps(config))
    return file


def command(config: Path, run: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "rlhf.sft", "--config", str(config), f"run.dir={run}", *arguments]


@pytest.mark.parametrize("interrupted", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_run_learns_and_one_that_sigterm_has_ended_goes_on_with_the_same_steps(
    tiny_model_dir: Path, tmp_path: Path, interrupted: bool
) -> None:
    config = write_config(tmp_path, tiny_model_dir / "model")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(config, whole), check=True, stdout=subprocess.DEVNULL, timeout=STACK_WAIT_S)
    rows = read_log(whole)
    check_documented(rows, logged={"examples", "rows"})
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == STEPS
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])

    if not interrupted:
        return
    program = subprocess.Popen(command(config, parts), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def has_logged() -> bool:
        assert program.poll() is None, program.communicate()[1][-3000:]
        return (parts / "metrics.jsonl").exists() and len(read_log(parts)) > 5

    assert eventually(has_logged, STACK_WAIT_S)
    program.terminate()
    _, stderr = program.communicate(timeout=STACK_WAIT_S)
    assert program.returncode == 128 + signal.SIGTERM, stderr[-3000:]
    state = RunFolder.read_state(RunFolder(parts, resume=True).restored or tmp_path)
    assert 0 < state.step < STEPS
    assert state.program == "sft"
    resumed = command(config, parts, "--resume")
    subprocess.run(resumed, check=True, stdout=subprocess.DEVNULL, timeout=STACK_WAIT_S)

    after = [row for row in read_log(parts) if "train/loss" in row]
    assert [row["step"] for row in after] == list(range(1, STEPS + 1))
    assert [row["train/loss"] for row in after] == losses
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]
    assert len(list((parts / "wandb").glob("offline-run-*"))) == 2  # parts of one run
