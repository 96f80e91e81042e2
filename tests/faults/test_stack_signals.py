"""Signals to a run in each of its phases and at each write of a save, one after another to one and the same run.

Each case resumes what the case before it has left. The last one finishes the run, and finds every step and every prompt
in it once.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_run import Ended, Fault, run_with_faults
from processes import outliving
from ray_cluster import ray_folder
from test_stack_grpo import CANARY_BOUND, check_account, read_steps, seen_prompts, write_config

from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.stack

GONE_S = 10.0  # after the driver's death
PHASES = ("sampling", "logprobs", "update", ".send_weights", "canary", "evaluation", "checkpoint")
SAVING = (
    ".save",  # learners begin to write
    "!open driver.json",
    "!open manifest.json",
    "!os.rename .partial",  # it is complete
    "!open latest.new",
    "!shutil.rmtree .partial",  # an old one is removed
)


class InterruptedRun:
    """A run that is resumed whenever something has ended it."""

    def __init__(self, config: Path, temporary: Path) -> None:
        self.folder, self._config, self._temporary = config.parent / "run", config, temporary

    @property
    def saved(self) -> int:
        return (
            RunFolder(self.folder, resume=True).saved_step if (self.folder / "checkpoints" / "latest").exists() else 0
        )

    def go_on(self, *faults: Fault, steps: int) -> Ended:
        resume = ["--resume"] if self.saved else []
        return run_with_faults(self._config, faults, *resume, f"run.steps={steps}", TMPDIR=str(self._temporary))

    def check_nothing_is_left(self, ended: Ended) -> None:
        deadline = time.monotonic() + GONE_S
        assert outliving(ended.processes, grace_s=GONE_S) == []
        while time.monotonic() < deadline and list(self._temporary.glob("rlhf-*")):
            time.sleep(0.1)
        assert not list(self._temporary.glob("rlhf-*"))
        assert not [path for row in ended.trace for path in row["shared"] if os.path.exists(path)]


@pytest.fixture(scope="module")
def interrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterruptedRun]:
    with ray_folder() as temporary:
        yield InterruptedRun(make_config(tmp_path_factory.mktemp("signals"), tiny_model_dir), Path(temporary))


def make_config(folder: Path, data: Path) -> Path:
    return write_config(
        folder, data, evaluation={"every": 1, "at_start": False}, checkpoint={"every": 1},
        run={"deterministic": True}, learner={"schedule": {"name": "constant"}},
    )  # fmt: skip


def killed(*moments: str) -> Any:
    return [pytest.param(at, marks=() if at == "sampling" else pytest.mark.faults) for at in moments]


@pytest.mark.parametrize("at", killed(*PHASES, *SAVING))
def test_nothing_is_left_10_s_after_the_driver_was_killed_and_the_run_can_be_resumed(
    interrupted: InterruptedRun, at: str
) -> None:
    before = interrupted.saved
    step = before + 3  # two checkpoints are there
    ended = interrupted.go_on(Fault(step, at, "send_signals", ("SIGKILL",)), steps=100000)
    assert ended.status == -signal.SIGKILL, ended.errors[-3000:]
    (killed,) = ended.trace
    assert len(killed["processes"]) > 5  # Ray's, the engine's, the learner
    assert killed["shared"]  # vLLM's
    interrupted.check_nothing_is_left(ended)
    assert before < interrupted.saved <= killed["step"]


@pytest.mark.faults
def test_nothing_is_left_10_s_after_the_whole_process_group_was_killed(interrupted: InterruptedRun) -> None:
    before = interrupted.saved
    ended = interrupted.go_on(Fault(before + 3, "update", "signal_group", ("SIGKILL",)), steps=100000)
    assert ended.status == -signal.SIGKILL, ended.errors[-3000:]
    interrupted.check_nothing_is_left(ended)
    assert before < interrupted.saved


@pytest.mark.faults
@pytest.mark.parametrize(
    ("at", "number", "saved"),
    [
        (".build", "SIGTERM", {0}),  # in start-up
        ("sampling", "SIGINT", {1, 2}),  # the engine began when the step before had ended, and may be done
        ("update", "SIGTERM", {2}),
        (".send_weights", "SIGTERM", {2}),
        ("evaluation", "SIGTERM", {2}),
        ("logprobs", "SIGHUP", {2}),  # as a lost terminal sends it
        ("checkpoint", "SIGINT", {2}),
        ("!open manifest.json", "SIGTERM", {1, 2}),  # while a save is under way: of step 1 or of step 2
    ],
)
def test_a_signal_in_any_phase_saves_and_says_where_to_go_on(
    interrupted: InterruptedRun, at: str, number: str, saved: set[int]
) -> None:
    before = interrupted.saved
    step = before + 2 if any(saved) else 0
    ended = interrupted.go_on(Fault(step, at, "send_signals", (number,)), steps=100000)
    assert ended.status == 128 + signal.Signals[number], ended.errors[-3000:]
    assert ended.errors.splitlines()[-1] == ("interrupted" if number == "SIGINT" else "terminated")
    assert "Traceback" not in ended.errors
    interrupted.check_nothing_is_left(ended)
    assert interrupted.saved - before in saved
    assert (f"Go on from step {interrupted.saved} with --resume." in ended.output) == any(saved)
    assert [row["step"] for row in read_steps(interrupted.folder)] == list(range(1, interrupted.saved + 1))


@pytest.mark.faults
def test_a_signal_to_the_process_group_saves_too(interrupted: InterruptedRun) -> None:
    before = interrupted.saved
    ended = interrupted.go_on(Fault(before + 2, "sampling", "signal_group", ("SIGTERM",)), steps=100000)
    assert ended.status == 128 + signal.SIGTERM, ended.errors[-3000:]
    interrupted.check_nothing_is_left(ended)
    assert before < interrupted.saved
    assert f"Go on from step {interrupted.saved} with --resume." in ended.output


@pytest.mark.faults
def test_a_second_signal_ends_the_run_at_once(interrupted: InterruptedRun) -> None:
    before = interrupted.saved
    # the second comes while the update waits for a learner that does nothing
    faults = [
        Fault(before + 3, "update", "strike", ("ray::HostedActor", "SIGSTOP", "0")),
        Fault(before + 3, ".update", "send_signals", ("SIGTERM", "SIGTERM")),
    ]
    ended = interrupted.go_on(*faults, steps=100000)
    assert ended.status == 128 + signal.SIGTERM, ended.errors[-3000:]
    assert "A second signal ends it at once." in ended.output
    assert "Traceback" not in ended.errors
    interrupted.check_nothing_is_left(ended)
    assert before < interrupted.saved <= before + 2


@pytest.mark.faults
def test_after_all_interruptions_every_step_and_every_prompt_is_there_once(
    interrupted: InterruptedRun, tiny_model_dir: Path, tmp_path: Path
) -> None:
    last = interrupted.saved + 1
    done = interrupted.go_on(steps=last)
    assert done.status == 0, done.errors[-3000:]
    steps, numbers = read_steps(interrupted.folder), tuple(range(1, last + 1))
    assert tuple(row["step"] for row in steps) == numbers
    assert all(row["sync/canary_difference"] < CANARY_BOUND for row in steps)
    check_account(steps)
    prompts = seen_prompts(interrupted.folder, numbers)
    assert len(set(prompts[:256])) == min(256, len(prompts))  # of an epoch of 256 rows
    summary = json.loads((interrupted.folder / "summary.json").read_text())
    assert (summary["updates_taken"], summary["updates_skipped"]) == (2 * last, 0)
    assert summary["account/sampled"] == summary["account/trained"] == 32 * last
    whole = run_with_faults(make_config(tmp_path, tiny_model_dir), [], f"run.steps={last}")
    assert whole.status == 0, whole.errors[-3000:]
    check_same_run(interrupted.folder, tmp_path / "run")


def check_same_run(one: Path, other: Path) -> None:
    """Texts, rewards and advantages, losses, and the weights of two runs are equal bit for bit."""
    for file in sorted((other / "rollouts").iterdir()):
        assert (one / "rollouts" / file.name).read_text() == file.read_text(), file.name
    losses = [[(row["policy/loss"], row["learner/grad_norm"]) for row in read_steps(run)] for run in (one, other)]
    assert losses[0] == losses[1]
    assert (one / "model" / "model.safetensors").read_bytes() == (other / "model" / "model.safetensors").read_bytes()
