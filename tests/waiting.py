"""Waits of tests: for a condition, up to a deadline that only a broken program reaches, however busy the machine is."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import time
from collections.abc import Callable

from rlhf.processes.workers import Workers

WAIT_S = 240.0  # for processes that import little; several such waits fit into pytest's own time-out
STACK_WAIT_S = 1200.0  # for a program on the whole stack: next to other jobs one start of vLLM took 184 s


def eventually(holds: Callable[[], object], deadline_s: float = WAIT_S) -> bool:
    """Whether a condition comes to hold."""
    end = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def worker_pids(workers: Workers) -> list[int]:
    """The processes that can be given work."""
    return [worker.pid for worker in workers.free()]


def wait_full(workers: Workers) -> int:
    """Wait until every killed worker is replaced; how many there are."""
    eventually(lambda: len(workers.free()) >= workers.size)
    return len(workers.free())


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a process prints until a line has this text; a process that ends before fails the test."""
    assert process.stdout is not None
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, output
        output += line
    return output


def free_port() -> int:
    """A port that is free together with the next one; below those that the system gives to clients."""
    while True:
        port = random.randrange(20000, 29998, 2)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("", port))
            second.bind(("", port + 1))
            return port
