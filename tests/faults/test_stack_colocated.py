"""Whole runs in which engines and learners take turns, with a policy lag: on a CPU, as they would on shared GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import shared_cpu
from faulty_run import Fault, run_with_faults
from processes import outliving
from test_stack_grpo import CANARY_BOUND, check_account, read_steps, write_config
from test_stack_programs import TALK, rollouts_of, write_program
from waiting import STACK_WAIT_S

pytestmark = pytest.mark.stack

STEPS = 3
SHARED: dict[str, Any] = {"device": "cpu", "placement": "colocated"}
WITHOUT_PAUSE = TALK.replace("time.sleep(turn and 1.5)", "pass")  # so a turn is open whenever the engines sleep
COROUTINE = """
async def play(row, generate):
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(3):
        turn = await generate(messages)
        if turn.finish_reason != "stop":
            break
        messages += [turn, {"role": "user", "content": "go on"}]
    return float(len(str(messages)) % 5)
"""


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, shared_cpu.__file__, program, *map(str, arguments)], env=os.environ | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def check(folder: Path, *, lag: int, steps: int, rollouts_per_step: int = 32) -> list[dict[str, Any]]:
    """Every step and every prompt once, nothing discarded, engines that hold the weights."""
    logged = read_steps(folder)
    assert [row["step"] for row in logged] == list(range(1, steps + 1))
    check_account(logged)
    assert [row["account/trained"] for row in logged] == [rollouts_per_step * step for step in range(1, steps + 1)]
    assert {(row["account/stale"], row["account/failed"], row["account/filtered"]) for row in logged} == {(0, 0, 0)}
    assert all(row["sync/canary_difference"] < CANARY_BOUND for row in logged)
    assert max(row["rollout/lag/max"] for row in logged) in range(1, lag + 1)
    rollouts = rollouts_of(folder, steps)
    assert len({(row["prompt_id"], row["epoch"], row["sample"]) for row in rollouts}) == len(rollouts)
    assert len(rollouts) == rollouts_per_step * steps
    return logged


def test_programs_that_stream_and_coroutines_go_on_while_engines_sleep_and_every_rollout_is_trained(
    tmp_path: Path,
) -> None:
    config = write_program(
        tmp_path, WITHOUT_PAUSE, [{"environment": ("talk", "play")[row % 2]} for row in range(64)],
        run={"steps": STEPS}, environment={}, cluster=SHARED,
        rollout={
            "max_policy_lag": 1, "max_response_tokens": 300, "max_rollout_tokens": 1500, "prompts_per_step": 4,
            "samples_per_prompt": 2,
        },
        learner={"minibatches_per_epoch": 1, "max_tokens_per_microbatch": 8192},
    )  # fmt: skip
    (tmp_path / "mine.py").write_text(COROUTINE)
    changed = json.loads(config.read_text())
    program = {"name": "program", "command": changed["environment"].pop("command"), "timeout_s": 300}
    del changed["environment"]["name"]
    changed["environment"]["by_name"] = {"talk": program, "play": {"name": f"{tmp_path}/mine.py:play"}}
    config.write_text(json.dumps(changed))
    done = run("grpo", "--config", config)
    assert done.returncode == 0, done.stderr[-3000:]
    logged = check(tmp_path / "run", lag=1, steps=STEPS, rollouts_per_step=8)
    assert sum(row["rollout/interrupted"] for row in logged) > 0
    assert sum(row["rollout/recomputed_tokens"] for row in logged) > 0
    rollouts = rollouts_of(tmp_path / "run", STEPS)
    assert {row["status"] for row in rollouts} == {"ok"}


@pytest.mark.faults
@pytest.mark.parametrize(("program", "lora"), [("ppo", "null"), ("grpo", "{rank: 8}")])
def test_ppo_and_adapters_with_a_lag_on_shared_gpus(
    tiny_model_dir: Path, tmp_path: Path, program: str, lora: str
) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, cluster=SHARED, rollout={"max_policy_lag": 2}, evaluation={"every": 1}
    )
    done = run(program, "--config", config, "run.steps=5", f"model.lora={lora}")
    assert done.returncode == 0, done.stderr[-3000:]
    check(tmp_path / "run", lag=2, steps=5)


@pytest.mark.faults
@pytest.mark.parametrize("at", ["update", ".wake_up", ".send_weights"])  # asleep, waking, and between the two wakes
def test_a_run_that_is_killed_in_any_part_of_a_sleep_is_resumed_without_a_gap(
    tiny_model_dir: Path, tmp_path: Path, at: str
) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, cluster=SHARED, rollout={"max_policy_lag": 2}, run={"steps": 6},
        checkpoint={"every": 1}, evaluation={"at_start": False, "at_end": False},
    )  # fmt: skip
    killed = run_with_faults(config, [Fault(3, at, "send_signals", ("SIGKILL",))])
    assert killed.status == -signal.SIGKILL, killed.errors[-3000:]
    assert outliving(killed.processes) == []
    resumed = run_with_faults(config, [], "--resume")
    assert resumed.status == 0, resumed.errors[-3000:]
    check(tmp_path / "run", lag=2, steps=6)
