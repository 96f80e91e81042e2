"""The guard of a Ray cluster: when the driver's end of its input closes, it ends the cluster and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import WAIT_S, eventually

from rlhf.cluster import guard

pytestmark = pytest.mark.slow

READS = "import sys; log = open(sys.argv[1]); input()"
# a worker of the cluster, and a process below it that no longer has the mark
PARENT = (
    "import subprocess, sys; log = open(sys.argv[1], 'a')\n"
    "subprocess.run([sys.executable, '-c', 'input()'], env={}); input()"  # it lives on if its child is killed first
)
# a driver that has the folder open, starts the guard, closes its input and lives on
DRIVER = (
    "import subprocess, sys; log = open(sys.argv[1] + '/driver.log', 'a')\n"
    "guard = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE)\n"
    "input(); guard.communicate(); print('ended', flush=True); input()"
)
# a process with shared memory, and the resource tracker of Python that removes it when this process has been killed
SHARES = (
    "from multiprocessing import resource_tracker, shared_memory\n"
    "memory = shared_memory.SharedMemory(create=True, size=1000)\n"
    "print(memory.name, resource_tracker._resource_tracker._pid, flush=True); input()"
)


def start(code: str, *arguments: str | Path, mark: str | Path = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    variables = os.environ | {guard.MARK: str(mark)}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "raylet.log").write_text("ready\n")
    started = {
        "driver": start(DRIVER, folder, guard.__file__),
        "worker": start(PARENT, folder / "worker.log", mark=folder),
        "reader": start(READS, folder / "raylet.log"),  # names a log of the cluster in its command and has it open
        "other worker": start(READS, folder / "raylet.log", mark=f"{folder}2"),  # of another run
    }
    yield started
    for process in started.values():
        for member in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            member.kill()
        process.kill()
        process.communicate()


@pytest.mark.parametrize("killed", [False, True])
def test_the_cluster_ends_with_the_driver_its_folder_goes_and_others_stay(
    processes: dict[str, subprocess.Popen[str]], tmp_path: Path, killed: bool
) -> None:
    driver, worker, *others = processes.values()
    assert eventually(lambda: (tmp_path / "ray/worker.log").exists() and psutil.Process(worker.pid).children())
    assert eventually(lambda: psutil.Process(driver.pid).children())
    assert eventually(lambda: all(psutil.Process(other.pid).open_files() for other in others))
    (child,) = psutil.Process(worker.pid).children()
    assert driver.stdin is not None
    assert driver.stdout is not None
    if killed:
        driver.kill()
    else:
        driver.stdin.write("\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "ended\n"
        assert not (tmp_path / "ray").exists()
        assert driver.poll() is None
    assert worker.wait(WAIT_S) == -9
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert eventually(lambda: not (tmp_path / "ray").exists())
    assert [other.poll() for other in others] == [None, None]


def test_shared_memory_of_a_process_that_was_killed_before_is_removed_by_its_tracker(
    processes: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver, worker, *_ = processes.values()
    killed = start(SHARES, mark=tmp_path / "ray")
    assert killed.stdout is not None
    name, tracker = killed.stdout.readline().split()
    os.kill(int(tracker), signal.SIGSTOP)  # on a busy machine it has not had its turn
    killed.kill()
    killed.wait()  # not for the end of its output, which the tracker holds too
    assert eventually(lambda: (tmp_path / "ray/worker.log").exists() and psutil.Process(driver.pid).children())
    driver.kill()
    assert worker.wait(WAIT_S) == -9  # the guard has looked
    assert Path("/dev/shm", name).exists()
    os.kill(int(tracker), signal.SIGCONT)
    assert eventually(lambda: not Path("/dev/shm", name).exists())
