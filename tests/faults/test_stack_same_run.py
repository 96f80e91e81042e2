"""A deterministic run, killed and resumed, equals the uninterrupted one: texts, metrics and weights, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_run import Fault, run_with_faults
from processes import Process, outliving
from soak import groups_of_step
from test_stack_grpo import check_account, read_log, read_steps, run_grpo, write_config

pytestmark = [pytest.mark.stack, pytest.mark.faults]

# Of the clock and of memory, of which requests an engine had at the same time, and what a process gathers since its
# start; every other metric is the same.
MEASURED = re.compile(
    r"time(/.*)?|.*_per_second|.*seconds(/.*)?|learner/mfu|policy/engine_kl_excess|rollout/kv_cache_.*"
)

# What is killed: the words of a fault that does it.
KINDS: dict[str, tuple[str, ...]] = {
    "driver": ("send_signals", "SIGKILL"),
    "raylet": ("strike", "/raylet/raylet ", "SIGKILL"),
    "control service": ("strike", "/gcs/gcs_server ", "SIGKILL"),
    "learner": ("strike", "ray::HostedActor", "SIGKILL"),
    "engine actor": ("strike", "ray::HostedAsyncActor", "SIGKILL"),
    "its core": ("strike", "VLLM::EngineCore", "SIGKILL"),
    "keeper of the graders": ("strike", "rlhf.processes.keeper", "SIGKILL", "0"),
    # the warden of a grader, with which the grader ends; they are younger than their keeper
    "grader": ("strike", "rlhf.processes.keeper", "SIGKILL", "1"),
}
KILLS, KILLED_STEPS = 10, 40
# At each of them no response is being graded: the grade of one whose grader was killed would be another.
MOMENTS = ("sampling", "logprobs", "update", ".send_weights", "canary", "checkpoint")


def kills(seed: int) -> list[Fault]:
    """Every kind once, and two more, in any order, each in a step of its own."""
    draw = random.Random(seed)
    kinds = [*KINDS, *draw.choices(list(KINDS), k=KILLS - len(KINDS))]
    draw.shuffle(kinds)
    steps = sorted(draw.sample(range(2, KILLED_STEPS), KILLS))
    return [
        Fault(step, draw.choice(MOMENTS), KINDS[kind][0], KINDS[kind][1:])
        for step, kind in zip(steps, kinds, strict=True)
    ]


def write(folder: Path, data: Path, *, lora: dict[str, Any] | None = None, **run: Any) -> Path:
    folder.mkdir()
    path = write_config(
        folder, data, run={"steps": 4, "deterministic": True, **run}, checkpoint={"every": 1, "keep": 9},
        evaluation={"every": 2, "at_start": False}, logging={"wandb": {"mode": "disabled"}, "token_values": True},
    )  # fmt: skip
    config = json.loads(path.read_text())
    config["model"]["lora"] = lora
    config["reward"].append({"name": "format", "pattern": "(?s).*[aeiou].*"})  # of random letters a third has it
    path.write_text(json.dumps(config))
    return path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{name: x for name, x in row.items() if not MEASURED.fullmatch(name)} for row in read_log(run)]


def check_same(run: Path, other: Path, *, steps: int = 4) -> None:
    for step in range(1, steps + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (run / name).read_text() == (other / name).read_text(), name
    for row, other_row in zip(metrics(run), metrics(other), strict=True):
        assert row == other_row
    last = f"checkpoints/step-{steps:06d}"
    files = sorted(path.relative_to(run) for path in (run / last).rglob("*.safetensors"))
    assert len(files) >= 4  # weights, two moments, generators
    (model,) = (path.relative_to(run) for path in (run / "model").glob("*.safetensors"))
    for file in (*files, model):
        assert (run / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16}], ids=["all weights", "adapters"])
def test_a_run_that_was_killed_and_resumed_with_more_engines_is_the_same_run(
    tiny_model_dir: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    uninterrupted = run_grpo("--config", write(tmp_path / "uninterrupted", tiny_model_dir, lora=lora))
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-3000:]
    first, *_, last = read_steps(tmp_path / "uninterrupted" / "run")
    assert first["policy/kl_k3"] == 0.0 < last["policy/kl_k3"]
    config = write(tmp_path / "killed", tiny_model_dir, lora=lora)
    killed = run_with_faults(config, [Fault(3, "update", "send_signals", ("SIGKILL",))])
    assert killed.status == -signal.SIGKILL, killed.errors[-3000:]
    resumed = run_grpo("--config", config, "--resume", "cluster.engines=2")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    check_same(tmp_path / "killed" / "run", tmp_path / "uninterrupted" / "run")


def run_with_kills(config: Path, seed: int, record_property: Any) -> None:
    """Run to the end, with --resume after each death of the driver; everything planned has then been killed."""
    record_property("seed_of_the_kills", seed)
    planned = kills(seed)
    print(f"seed {seed}: {planned}")
    resume, processes = [], set[Process]()
    while True:
        ended = run_with_faults(config, planned, *resume)
        for row in ended.trace:
            step, at, do, words = row["fault"]
            planned.remove(Fault(step, at, do, tuple(words)))
        processes.update(ended.processes)
        if ended.status != -signal.SIGKILL:
            break
        resume = ["--resume"]
    assert ended.status == 0, ended.errors[-3000:]
    assert "Traceback" not in ended.errors
    assert planned == []
    assert outliving(processes) == []


SEED = int(os.environ.get("KILLS_SEED", "1"))


def test_a_run_in_which_ten_processes_of_all_kinds_were_killed_is_the_undisturbed_one(
    tiny_model_dir: Path, tmp_path: Path, record_property: Any
) -> None:
    undisturbed = run_grpo("--config", write(tmp_path / "undisturbed", tiny_model_dir, steps=KILLED_STEPS))
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    run_with_kills(write(tmp_path / "killed", tiny_model_dir, steps=KILLED_STEPS), SEED, record_property)
    check_same(tmp_path / "killed" / "run", tmp_path / "undisturbed" / "run", steps=KILLED_STEPS)


def test_after_ten_kills_in_a_run_with_a_policy_lag_every_rollout_is_accounted_for(
    tiny_model_dir: Path, tmp_path: Path, record_property: Any
) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": KILLED_STEPS}, rollout={"max_policy_lag": 2}, checkpoint={"every": 1},
        evaluation={"at_start": False, "at_end": False}, logging={"wandb": {"mode": "disabled"}},
    )  # fmt: skip
    run_with_kills(config, SEED, record_property)
    steps = read_steps(tmp_path / "run")
    numbers = tuple(range(1, KILLED_STEPS + 1))
    assert tuple(row["step"] for row in steps) == numbers
    check_account(steps)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    check_account([summary])
    assert summary["account/trained"] == 32 * KILLED_STEPS
    groups = [group for step in numbers for group in groups_of_step(tmp_path / "run", step)]
    assert len(groups) == len(set(groups)) == 8 * KILLED_STEPS
