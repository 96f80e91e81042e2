"""Processes of a run that die or are stopped: engines are replaced, otherwise it goes on from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Process, below, outliving, running
from test_stack_grpo import CANARY_BOUND, check_account, read_steps, seen_prompts, write_config
from waiting import STACK_WAIT_S, eventually

pytestmark = [pytest.mark.stack, pytest.mark.faults]


REPLACED = "It is replaced, and its prompts are sampled by another engine."
RESTARTED = "(run.max_restarts) from the checkpoint of step"


class Run:
    """A run that goes on until it is told to end; its output is read while it runs."""

    def __init__(self, config: Path, run: Path, output: Path) -> None:
        self.run, self.output, self.seen = run, output, set[Process]()
        with output.open("w") as file:
            self.program = subprocess.Popen(
                [sys.executable, "-m", "rlhf.grpo", "--config", str(config)],
                stdout=file, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip

    def wait_for(self, holds: Callable[[], object], what: str) -> None:
        def held() -> object:
            assert self.program.poll() is None, self.program.communicate()[1][-3000:]
            return holds()

        assert eventually(held, STACK_WAIT_S), f"{what}: {self.output.read_text()[-3000:]}"

    def wait_for_progress(self) -> None:
        """Wait for two more checkpoints: one may have been under way."""
        before = self.checkpoint
        self.wait_for(lambda: self.checkpoint > before + 1, "no step was taken")

    @property
    def checkpoint(self) -> int:
        return max((int(path.name[5:]) for path in (self.run / "checkpoints").glob("step-??????")), default=0)

    def strike(self, name: str, number: signal.Signals, notice: str, *, index: int = 0) -> None:
        """Send a signal to a process, and wait until the output shows one more `notice`."""
        before = self.output.read_text().count(notice)
        alive = running(below({self.program.pid}))
        self.seen.update(alive)
        victims = sorted((process for process, command in alive.items() if name in command), key=lambda p: p.pid)
        os.kill(victims[index].pid, number)
        self.wait_for(
            lambda: self.output.read_text().count(notice) > before, f"{number.name} to {name} was not noticed"
        )

    def end(self) -> None:
        """SIGTERM; every step and every prompt was there once, and no process is left."""
        self.seen |= below({self.program.pid})
        self.program.terminate()
        _, stderr = self.program.communicate(timeout=STACK_WAIT_S)
        assert self.program.returncode == 128 + signal.SIGTERM, stderr[-3000:]
        assert "Traceback" not in stderr
        assert outliving(self.seen) == []
        steps = read_steps(self.run)
        numbers = tuple(range(1, len(steps) + 1))
        assert tuple(row["step"] for row in steps) == numbers
        assert all(row["sync/canary_difference"] < CANARY_BOUND for row in steps)
        check_account(steps)
        prompts = seen_prompts(self.run, numbers)
        assert len(set(prompts[:256])) == min(256, len(prompts))  # of an epoch of 256 rows


def test_lost_engines_are_replaced_while_the_run_goes_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 100000}, cluster={"engines": 2}, checkpoint={"every": 1}
    )
    run = Run(config, tmp_path / "run", tmp_path / "output")
    run.wait_for(lambda: run.checkpoint > 0, "no step was taken")
    run.strike("VLLM::Worker", signal.SIGKILL, REPLACED)
    run.wait_for_progress()
    run.strike("VLLM::EngineCore", signal.SIGSTOP, REPLACED)
    run.wait_for_progress()
    started = run.output.read_text().count(RESTARTED)
    run.end()
    assert started == 0


def test_a_run_goes_on_from_a_checkpoint_when_a_learner_was_killed_or_stopped(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 100000}, cluster={"learners": 2}, checkpoint={"every": 1}
    )
    run = Run(config, tmp_path / "run", tmp_path / "output")
    run.wait_for(lambda: run.checkpoint > 0, "no step was taken")
    run.strike("ray::HostedActor", signal.SIGKILL, RESTARTED, index=1)
    run.wait_for_progress()
    run.strike("ray::HostedActor", signal.SIGSTOP, RESTARTED)
    run.wait_for_progress()
    run.end()
