"""A Ray whose control service or raylet has ended: the driver notices, says which, and ends with nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from processes import Process, below, outliving, running
from waiting import STACK_WAIT_S, read_until

from rlhf.config.cli import RESUMABLE

pytestmark = pytest.mark.stack

PROGRAM = """
import asyncio, sys
from rlhf.cluster.session import RaySession
from rlhf.config import cli

async def wait(address):
    session = RaySession()
    try:
        session.start(address)
        lost = asyncio.ensure_future(session.wait_until_lost())
        await asyncio.sleep(0)  # it begins
        print("started", flush=True)
        raise session.lost_error(await lost)
    finally:
        session.stop()

sys.exit(cli.run_program(lambda: cli.run_async(wait(*sys.argv[1:] or [None]))))
"""
CONTROL, RAYLET = "/gcs/gcs_server ", "/raylet/raylet "


def start(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    read_until(process, "started")
    return process


def kill(processes: Iterable[Process], command: str = "") -> None:
    """Those whose command has these words."""
    for process, text in running({*processes}).items():
        if command in text:
            os.kill(process.pid, signal.SIGKILL)


def last_error(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Ray itself prints the end of the raylet's log before it."""
    _, errors = process.communicate(timeout=STACK_WAIT_S)
    return process.returncode, errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "part"),
    [
        pytest.param(CONTROL, "control service (gcs_server)", marks=pytest.mark.faults),
        (RAYLET, "manager (raylet)"),
    ],
)
def test_the_death_of_a_part_of_the_own_ray_is_named(command: str, part: str) -> None:
    process = start()
    started = below({process.pid})
    kill(started, command)
    status, error = last_error(process)
    assert status == 1
    assert error.startswith("error: Ray's ")
    assert error.endswith(f"{part} has ended with status 137.")
    assert outliving(started) == []


def test_a_signal_to_the_process_group_does_not_reach_ray() -> None:
    process = start()
    started = below({process.pid})
    groups = {os.getpgid(member.pid) for member in started if RAYLET in running({member}).get(member, "")}
    assert groups
    assert process.pid not in groups
    os.killpg(process.pid, signal.SIGTERM)
    assert last_error(process) == (128 + signal.SIGTERM, "terminated")
    assert outliving(started) == []


@pytest.fixture
def cluster() -> Iterator[tuple[int, str]]:
    """A Ray that a run joins: the process that started it, and its address."""
    script = Path(__file__).parents[1] / "ray_cluster.py"
    process = subprocess.Popen(
        [sys.executable, script, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"RAY_raylet_start_wait_time_s": f"{STACK_WAIT_S:.0f}"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())["address"]
    finally:
        started = below({process.pid})
        process.kill()
        kill(started)  # its own end does not reach all of them
        process.communicate()
        assert outliving(started) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (CONTROL, "control service does not answer"),
        pytest.param(RAYLET, "on this machine (raylet) has ended", marks=pytest.mark.faults),
    ],
)
def test_a_run_that_joined_a_cluster_ends_with_the_status_that_launchers_resume_on(
    cluster: tuple[int, str], command: str, problem: str
) -> None:
    root, address = cluster
    process = start(address)
    kill(below({root}), command)
    status, error = last_error(process)
    assert (status, problem in error) == (RESUMABLE, True), error
    assert error.endswith("Start the cluster again, and go on with --resume.")
