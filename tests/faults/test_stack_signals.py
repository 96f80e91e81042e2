"""Signals to a run on the real stack, in each of its phases; and what is left of a run whose driver is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from processes import Process, below, outliving, running
from ray_cluster import ray_folder
from test_stack_grpo import read_steps, run_grpo, wait_for_step, write_config
from waiting import STACK_WAIT_S

from rlhf.run.folder import RunFolder

pytestmark = pytest.mark.stack

AT_PHASE = Path(__file__).parent / "at_phase.py"
GONE_S = 10.0  # after the driver's death


def run_with_signal(
    config: Path, phase: str, nth: int, *signals: str, more: list[str]
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(AT_PHASE), phase, str(nth), *signals, "--", "--config", str(config), more]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=STACK_WAIT_S, stdin=subprocess.DEVNULL, check=False
    )


@pytest.mark.faults
@pytest.mark.parametrize(
    ("phase", "nth", "number", "saved"),
    [
        ("sampling", 2, "SIGINT", 1),
        ("update", 2, "SIGTERM", 2),
        ("transfer", 2, "SIGTERM", 2),
        ("evaluation", 3, "SIGTERM", 2),
        ("checkpoint", 1, "SIGINT", 2),
    ],
)
def test_a_signal_in_any_phase_saves_and_the_run_goes_on_from_there(
    tiny_model_dir: Path, tmp_path: Path, phase: str, nth: int, number: str, saved: int
) -> None:
    config = write_config(tmp_path, tiny_model_dir, evaluation={"every": 1}, checkpoint={"every": 2})
    ended = run_with_signal(config, phase, nth, number, more="run.steps=4")
    assert ended.returncode == 128 + signal.Signals[number], ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr
    assert f"Go on from step {saved} with --resume." in ended.stdout
    assert [row["step"] for row in read_steps(tmp_path / "run")] == list(range(1, saved + 1))
    resumed = run_grpo("--config", config, "--resume", "run.steps=4")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    rows = [row["step"] for row in read_steps(tmp_path / "run")]
    assert rows == [1, 2, 3, 4]


@pytest.mark.faults
def test_a_second_signal_ends_the_run_at_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir)
    ended = run_with_signal(config, "update", 2, "SIGTERM", "SIGTERM", more="run.steps=100000")
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr[-3000:]
    assert "Traceback" not in ended.stderr


def test_nothing_is_left_10_s_after_the_driver_was_killed_and_the_run_can_be_resumed(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ray_folder() as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        what_a_killed_driver_leaves(tiny_model_dir, tmp_path, Path(temporary))


def shared_memory(processes: Iterable[Process]) -> set[Path]:
    """The files in shared memory that these processes map."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return {path for path in Path("/dev/shm").iterdir() if f" {path}\n" in maps}


def what_a_killed_driver_leaves(tiny_model_dir: Path, tmp_path: Path, temporary: Path) -> None:
    config = write_config(tmp_path, tiny_model_dir, run={"steps": 100000})
    program = subprocess.Popen(
        [sys.executable, "-m", "rlhf.grpo", "--config", str(config)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 3, program)  # the checkpoint of step 2 is complete
    started = below({program.pid})
    assert any(path.name.startswith("rlhf-ray-") for path in temporary.iterdir())
    shared = shared_memory(running(started))
    assert shared  # vLLM's
    program.kill()
    program.communicate()
    deadline = time.monotonic() + GONE_S
    assert outliving(started, grace_s=GONE_S) == []
    while time.monotonic() < deadline and list(temporary.glob("rlhf-ray-*")):
        time.sleep(0.1)
    assert not list(temporary.glob("rlhf-ray-*"))
    assert not [path for path in shared if path.exists()]
    assert RunFolder(tmp_path / "run", resume=True).restored is not None  # undamaged
