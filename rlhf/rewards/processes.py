"""The processes below a worker: they are counted, and killed when their job ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
KILL_S = 4.0  # time limit for killing processes that keep starting others

prctl = ctypes.CDLL(None).prctl
prctl.argtypes = (ctypes.c_int, *4 * (ctypes.c_ulong,))


def children_of(pid: int) -> set[int]:
    """Processes that any thread of a process has started, or that it has adopted."""
    children: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children |= {int(child) for child in file.read().split()}
    except FileNotFoundError:  # the process is gone, or the kernel has no CONFIG_PROC_CHILDREN
        children = {int(other) for other in os.listdir("/proc") if other.isdigit() and _parent(int(other)) == pid}
    return children


def count_below(pid: int, limit: int) -> int:
    """How many processes are below a process; counting stops above the limit."""
    count, frontier = 0, {pid}
    while frontier and count <= limit:
        frontier = {child for parent in frontier for child in children_of(parent)}
        count += len(frontier)
    return count


def kill_children(*, spared: Collection[int]) -> bool:
    """Kill every child except `spared`; a subreaper adopts the children of those it killed. False if some are left."""
    deadline = time.monotonic() + KILL_S
    while (doomed := children_of(os.getpid()) - set(spared)) and time.monotonic() < deadline:
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)  # a fork bomb must not outrun the killing
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return not doomed


def default_workers() -> int:
    """One worker per core that this process may use, at most 8: each grades thousands of answers per second."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def adopt_orphans() -> None:
    """Become the parent of descendant processes whose own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends."""
    prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0
