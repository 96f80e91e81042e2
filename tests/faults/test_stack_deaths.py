"""Processes of a run that die or are stopped: engines are replaced, otherwise it goes on from its newest checkpoint.

Each run takes several faults, one after another, and ends by itself.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from faulty_run import BETWEEN_S, Ended, Fault, run_with_faults
from processes import outliving
from test_stack_grpo import CANARY_BOUND, check_account, read_steps, seen_prompts, write_config
from waiting import STACK_WAIT_S

pytestmark = [pytest.mark.stack, pytest.mark.faults]

REPLACED = "It is replaced, and its prompts are sampled by another engine."
RESTARTED = "(run.max_restarts) from the checkpoint of step"
STARTED_AGAIN = "The run goes on without this engine; it is started again."
EITHER = (REPLACED, RESTARTED)  # an idle engine is missed by its health check, or by the next transfer


def hit(step: int, at: str, command: str, number: str, index: int = 0, hold_s: float = 0.0) -> Fault:
    return Fault(step, at, "strike", (command, number, str(index), str(hold_s)))


CORE, WORKER, ENGINE, LEARNER = "VLLM::EngineCore", "VLLM::Worker", "ray::HostedAsyncActor", "ray::HostedActor"
CONTROL, RAYLET = "/gcs/gcs_server ", "/raylet/raylet "
RUNS: dict[str, tuple[dict[str, int], dict[str, tuple[list[Fault], tuple[str, ...]]]]] = {
    "one engine": (
        {},
        {
            "killed while it samples": ([hit(2, ".generate", CORE, "SIGKILL")], (REPLACED,)),
            "killed while it is idle": ([hit(5, "update", CORE, "SIGKILL")], EITHER),
            "killed during a transfer": ([hit(8, ".send_weights", WORKER, "SIGKILL")], EITHER),
            "stopped during a transfer": ([hit(11, ".send_weights", WORKER, "SIGSTOP")], EITHER),
        },
    ),
    "one engine again": (
        {},
        {
            "stopped while it samples": ([hit(2, ".generate", CORE, "SIGSTOP")], (REPLACED,)),
            "the actor killed in an evaluation": ([hit(5, "evaluation", ENGINE, "SIGKILL")], (REPLACED,)),
            "stopped while it is idle": ([hit(8, "logprobs", WORKER, "SIGSTOP")], EITHER),
            "killed, and the next two while they start": (
                [hit(11, ".generate", CORE, "SIGKILL"), *[hit(11, ".build", CORE, "SIGKILL")] * 2],
                (RESTARTED,),
            ),
        },
    ),
    "two learners": (
        {"learners": 2},
        {
            "killed while the engine samples": ([hit(2, ".generate", LEARNER, "SIGKILL", 1)], (RESTARTED,)),
            "killed in an update": ([hit(5, ".update", LEARNER, "SIGKILL", 0)], (RESTARTED,)),
            "stopped in an update": ([hit(8, ".update", LEARNER, "SIGSTOP", 1)], (RESTARTED,)),
        },
    ),
    "Ray itself": (
        {},
        {
            "the control service killed while the engine samples": (
                [hit(2, ".generate", CONTROL, "SIGKILL", hold_s=BETWEEN_S)],
                (RESTARTED,),
            ),
            "the raylet killed while the learner updates": (
                [hit(5, ".update", RAYLET, "SIGKILL", hold_s=BETWEEN_S)],
                (RESTARTED,),
            ),
            "the raylet killed before its shared memory is used, which ends the driver": (
                [hit(8, "logprobs", RAYLET, "SIGKILL")],
                (RESTARTED,),
            ),
        },
    ),
    "two learners that share rows": (
        {"learners": 2, "sequence_parallel": 2},
        {
            "killed in a save": ([hit(2, ".save", LEARNER, "SIGKILL", 1)], (RESTARTED,)),
            "killed while it sends": ([hit(5, ".send_weights", LEARNER, "SIGKILL", 0)], (RESTARTED,)),
            "stopped in a log-prob pass": ([hit(8, ".logprobs", LEARNER, "SIGSTOP", 0)], (RESTARTED,)),
        },
    ),
}


def last_step(name: str) -> int:
    return max(fault.step for faults, _ in RUNS[name][1].values() for fault in faults) + 1


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[Ended, Path]]:
    """The runs so far, by name; `ended` adds one."""
    return {}


@pytest.fixture
def ended(
    name: str, runs: dict[str, tuple[Ended, Path]], tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Ended, Path]:
    if name not in runs:
        folder = tmp_path_factory.mktemp("deaths")
        cluster, cases = RUNS[name]
        config = write_config(
            folder, tiny_model_dir, run={"steps": last_step(name)}, cluster=cluster, checkpoint={"every": 1},
            evaluation={"every": 5, "at_start": False, "at_end": False},
        )  # fmt: skip
        runs[name] = run_with_faults(config, [f for faults, _ in cases.values() for f in faults]), folder / "run"
    return runs[name]


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, (_, cases) in RUNS.items() for case in cases])
def test_a_process_is_lost_and_the_run_goes_on(
    name: str, case: str, ended: tuple[Ended, Path], record_property: Any
) -> None:
    run, folder = ended
    faults, notices = RUNS[name][1][case]
    rows = [row for row in run.trace if row["fault"][0] == faults[0].step]
    assert [row["fault"] for row in rows] == json.loads(json.dumps(faults)), run.errors[-3000:]
    assert any(notice in run.around_step(faults[0].step) for notice in notices), run.output[-6000:]
    (recovered,) = [row["time"] for row in read_steps(folder) if row["step"] == faults[0].step + 1]
    recovery_s = recovered - rows[-1]["time"]
    record_property("recovery_s", round(recovery_s, 1))
    print(f"{name}, {case}: the step after it ended {recovery_s:.1f} s after the fault")


@pytest.mark.parametrize("name", RUNS)
def test_after_all_of_it_every_step_and_every_prompt_is_there_once(name: str, ended: tuple[Ended, Path]) -> None:
    run, folder = ended
    assert run.status == 0, run.errors[-3000:]
    assert "Traceback" not in run.errors
    assert outliving(run.processes) == []
    steps = read_steps(folder)
    numbers = tuple(range(1, last_step(name) + 1))
    assert tuple(row["step"] for row in steps) == numbers
    assert all(row["sync/canary_difference"] < CANARY_BOUND for row in steps)
    check_account(steps)
    assert len(set(seen_prompts(folder, numbers))) == 8 * len(numbers)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates_taken"], summary["updates_skipped"]) == (2 * len(numbers), 0)
    assert summary["account/sampled"] == summary["account/trained"] == 32 * len(numbers)


def test_a_run_goes_on_without_an_engine_until_the_second_one_in_its_place_has_joined(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(
        tmp_path, tiny_model_dir, run={"steps": 100000}, cluster={"engines": 2}, checkpoint={"every": 1}
    )
    faults = [
        hit(2, ".generate", CORE, "SIGSTOP"),
        hit(2, ".build", CORE, "SIGKILL", 1),  # of the new engine, while it starts
        Fault(2, "joined", "send_signals", ("SIGTERM",)),
    ]
    ended = run_with_faults(config, faults)
    assert ended.status == 128 + signal.SIGTERM, ended.errors[-3000:]
    assert REPLACED in ended.output
    assert ended.output.count(STARTED_AGAIN) == 1
    assert RESTARTED not in ended.output
    struck, *_, joined = ended.trace
    assert struck["step"] < joined["step"], "it waited for the engine"
    assert outliving(ended.processes) == []
    steps = read_steps(tmp_path / "run")
    numbers = tuple(range(1, len(steps) + 1))
    assert tuple(row["step"] for row in steps) == numbers
    prompts = seen_prompts(tmp_path / "run", numbers)
    assert len(set(prompts[:256])) == min(256, len(prompts))  # of an epoch of 256 rows


def test_an_engine_that_is_stopped_while_the_run_starts_ends_it_long_before_the_deadline_of_the_start(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, tiny_model_dir, cluster={"start_deadline_s": 3 * STACK_WAIT_S})
    ended = run_with_faults(config, [hit(0, ".build", CORE, "SIGSTOP")])
    assert ended.status == 1, ended.errors[-3000:]
    assert "is stopped; it is killed" in ended.output
    assert "engine" in ended.errors
    assert "Traceback" not in ended.errors
    assert outliving(ended.processes) == []
