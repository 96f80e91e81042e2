"""Processes of a run that die or are stopped: the run goes on from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Process, below, outliving, running
from test_stack_grpo import check_account, read_steps, seen_prompts, wait_for_step, write_config
from waiting import STACK_WAIT_S, eventually

pytestmark = [pytest.mark.stack, pytest.mark.faults]


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-??????")), default=0)


def test_a_run_survives_engines_and_learners_that_are_killed_or_stopped(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 100000}, cluster={"learners": 2}, checkpoint={"every": 1}
    )
    run, output = tmp_path / "run", tmp_path / "output"
    with output.open("w") as file:
        program = subprocess.Popen(
            [sys.executable, "-m", "rlhf.grpo", "--config", str(config)],
            stdout=file, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    seen: set[Process] = set()

    def strike(name: str, number: signal.Signals, *, index: int = 0) -> None:
        """Wait for a checkpoint that is new, hit a process, and wait until the run has started again."""
        before, restarts = newest_checkpoint(run), output.read_text().count("(run.max_restarts)")
        assert eventually(lambda: newest_checkpoint(run) > before or program.poll() is not None, STACK_WAIT_S)
        alive = running(below({program.pid}))
        seen.update(alive)
        victims = sorted((process for process, command in alive.items() if name in command), key=lambda p: p.pid)
        os.kill(victims[index].pid, number)

        def restarted() -> bool:
            assert program.poll() is None, program.communicate()[1][-3000:]
            return output.read_text().count("(run.max_restarts)") > restarts

        assert eventually(restarted, STACK_WAIT_S), f"{number.name} to {name} was not noticed"

    wait_for_step(run, 1, program)
    strike("VLLM::Worker", signal.SIGKILL)
    strike("VLLM::EngineCore", signal.SIGSTOP)
    strike("ray::HostedActor", signal.SIGKILL, index=1)
    strike("ray::HostedActor", signal.SIGSTOP)
    before = newest_checkpoint(run)
    assert eventually(lambda: newest_checkpoint(run) > before or program.poll() is not None, STACK_WAIT_S)
    seen.update(below({program.pid}))
    program.terminate()
    _, stderr = program.communicate(timeout=STACK_WAIT_S)
    assert program.returncode == 128 + signal.SIGTERM, stderr[-3000:]
    assert "Traceback" not in stderr
    assert outliving(seen) == []
    steps = read_steps(run)
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    check_account(steps)
    prompts = seen_prompts(run, tuple(range(1, len(steps) + 1)))
    assert len(set(prompts[:256])) == min(256, len(prompts))  # of an epoch of 256, each was trained on once
