"""The heartbeat finds stopped processes, below an actor too, kills what it is told to, and measures memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from documented import check_documented
from waiting import eventually

from rlhf.cluster import heartbeat
from rlhf.cluster.actors import ActorGroup, Location
from rlhf.cluster.heartbeat import Look, look, memory_metrics

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


@pytest.fixture
def actor() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a process below it."""
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE)
    assert eventually(lambda: psutil.Process(process.pid).children())
    yield process
    for member in [*psutil.Process(process.pid).children(recursive=True), process]:
        member.kill()
    process.wait()


def test_stopped_processes_are_found_and_killed_and_others_are_left_alone(actor: subprocess.Popen[bytes]) -> None:
    (child,) = psutil.Process(actor.pid).children()
    gone = 2**22 - 1  # above the largest process id of this machine, or unused
    assert look([actor.pid, gone]).stopped == []
    os.kill(child.pid, signal.SIGSTOP)
    assert eventually(lambda: look([actor.pid]).stopped == [child.pid])
    os.kill(child.pid, signal.SIGCONT)
    assert eventually(lambda: look([actor.pid], kill=[child.pid]).stopped == [])
    time.sleep(0.1)
    assert child.is_running()
    os.kill(child.pid, signal.SIGSTOP)
    assert eventually(lambda: look([actor.pid], kill=[child.pid]).stopped)
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_memory_of_an_actor_is_that_of_all_processes_below_it_and_of_its_gpus(
    actor: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\necho '0, GPU-aa, 512 MiB\n1, GPU-bb, 1024 MiB'\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    family = [psutil.Process(actor.pid), *psutil.Process(actor.pid).children(recursive=True)]
    assert len(family) == 2
    for process in family:
        process.suspend()  # one that is still starting takes more and more
    seen = look([actor.pid], others=[os.getpid()])
    assert seen.resident[actor.pid] == sum(process.memory_info().rss for process in family)
    assert seen.resident[os.getpid()] > seen.resident[actor.pid]

    engines, models = ActorGroup("engine", [], deadline_s=1.0), ActorGroup("reward model", [], deadline_s=1.0)
    engines.locations = [
        Location("1", "a", "host", actor.pid, 1, ("0", "GPU-bb"), 2),
        Location("2", "b", "host", 7, 1, ("0",), 2),
    ]
    models.locations = [Location("3", "b", "host", 8, 1, (), 2)]
    elsewhere = Look(resident={7: 2**30, 8: 2**31}, gpus={"0": 2**29})
    metrics = memory_metrics([engines, models], {"a": seen, "b": elsewhere}, {"driver": 2**28, "graders": 2**27})
    assert metrics.pop("memory/engine/0") == seen.resident[actor.pid] / 2**30
    assert metrics == {
        "memory/driver": 0.25, "memory/graders": 0.125, "memory/engine/0/gpu": 1.5, "memory/engine/1": 1.0,
        "memory/engine/1/gpu": 0.5, "memory/reward_model/0": 2.0,
    }  # fmt: skip
    check_documented([metrics], logged={"GPUs"})


def test_a_hanging_nvidia_smi_does_not_keep_a_stopped_process_from_being_found(
    actor: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heartbeat.GPU_ANSWER_S < heartbeat.ANSWER_S / 2  # else the driver gives the whole look up
    monkeypatch.setattr(heartbeat, "GPU_ANSWER_S", 0.1)
    stand_in = tmp_path / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\nexec sleep 1000\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    os.kill(actor.pid, signal.SIGSTOP)
    assert eventually(lambda: actor.pid in look([actor.pid]).stopped)
    assert look([actor.pid]).gpus == {}
