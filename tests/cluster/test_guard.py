"""The guard of a Ray cluster: when the driver's end of its input closes, it ends the cluster and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import WAIT_S, eventually

from rlhf.cluster import guard

HOLDS = "import sys; log = open(sys.argv[1], 'a'); input()"
PARENT = "import subprocess, sys; log = open(sys.argv[1], 'a'); subprocess.run([sys.executable, '-c', 'input()'])"
# a driver that has the folder open, starts the guard, closes its input and lives on
DRIVER = (
    "import subprocess, sys; log = open(sys.argv[1] + '/driver.log', 'a')\n"
    "guard = subprocess.Popen([sys.executable, '-I', '-S', sys.argv[2], sys.argv[1]], stdin=subprocess.PIPE)\n"
    "input(); guard.communicate(); print('ended', flush=True); input()"
)


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    folder = tmp_path / "ray"
    folder.mkdir()
    started = {
        "driver": start(DRIVER, folder, guard.__file__),
        "worker": start(PARENT, folder / "worker.log"),
        "stranger": start(HOLDS, tmp_path / "other.log"),
    }
    yield started
    for process in started.values():
        for member in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            member.kill()
        process.kill()
        process.communicate()


def test_the_cluster_ends_with_the_driver_its_folder_goes_and_others_stay(
    processes: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver, worker, stranger = processes.values()
    assert eventually(lambda: (tmp_path / "ray/worker.log").exists() and psutil.Process(worker.pid).children())
    assert eventually(lambda: (tmp_path / "other.log").exists() and psutil.Process(driver.pid).children())
    (child,) = psutil.Process(worker.pid).children()
    assert driver.stdin is not None
    assert driver.stdout is not None
    driver.stdin.write("\n")
    driver.stdin.flush()
    assert driver.stdout.readline() == "ended\n"
    assert worker.wait(WAIT_S) == -9
    assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert not (tmp_path / "ray").exists()
    assert driver.poll() is None
    assert stranger.poll() is None


def test_a_driver_that_is_killed_has_the_same_effect(
    processes: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    driver, worker, stranger = processes.values()
    assert eventually(lambda: (tmp_path / "ray/worker.log").exists() and psutil.Process(driver.pid).children())
    driver.kill()
    assert worker.wait(WAIT_S) == -9
    assert eventually(lambda: not (tmp_path / "ray").exists())
    assert stranger.poll() is None
