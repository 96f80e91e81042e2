"""Processes seen from outside: count and kill the processes below a worker, and measure the time of its work.

A result must not depend on the load of the machine, so the first limit is in CPU seconds. The second limit is for
processes that sleep: seconds by the clock, without those in which the process waited for a core.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
CPUCLOCK_SCHED = 2  # linux: the clock id of a process's CPU time is (~pid << 3) | 2
BY_CLOCK = "seconds by the clock"
KILL_S = 4.0  # limit for killing processes that keep starting others

prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = (ctypes.c_int, *4 * (ctypes.c_ulong,))


def children_of(pid: int) -> set[int]:
    """Processes that any thread of a process has started or adopted."""
    children: set[int] = set()
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError), open(f"/proc/{pid}/task/{thread}/children") as file:
                children |= {int(child) for child in file.read().split()}
    except FileNotFoundError:  # the process is gone, or the kernel has no CONFIG_PROC_CHILDREN
        children = {other for other in pids() if parent_of(other) == pid}
    except PermissionError:  # Landlock
        if pid != os.getpid():
            raise
        children = {other for other in pids() if _is_own_child(other)}
    return children


def pids() -> list[int]:
    """The ids of all processes, which are visible even if their files are not readable."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _is_own_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def parent_of(pid: int) -> int:
    """The process id of a process's parent; 0 if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def may_signal(pid: int) -> bool:
    """True if the process exists, has not been reaped, and this process may signal it."""
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        return True
    return False


def threads_of(pid: int) -> int:
    """The number of threads of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}/task").st_nlink - 2  # a folder for each
    return 0


def count_below(pid: int, limit: int) -> int:
    """The number of processes below a process. Counting stops above the limit."""
    count, frontier = 0, {pid}
    while frontier and count <= limit:
        frontier = {child for parent in frontier for child in children_of(parent)}
        count += len(frontier)
    return count


def kill_children(*, spared: Collection[int]) -> bool:
    """Kill every child except `spared`, and the children that this subreaper then adopts. False if some are left."""
    deadline = time.monotonic() + KILL_S
    while (doomed := children_of(os.getpid()) - set(spared)) and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: a fork bomb must not outrun the killing
            for pid in doomed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for pid in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
    return not doomed


def adopt_orphans() -> None:
    """Become the parent of descendant processes whose own parent ends."""
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(number: int) -> None:
    """Have the kernel send this signal when the parent ends."""
    prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def over_clock(seconds: float) -> str:
    """The message for a limit of wall-clock time, whatever measures it."""
    return f"over {seconds:g} {BY_CLOCK}"


class Stopwatch:
    """Measures one process between `start` and `stop`. `total_s` is the sum of `own_seconds` over all these times."""

    running, total_s = False, 0.0

    def __init__(self, *, cpu_seconds: float, wall_seconds: float) -> None:
        self._cpu_seconds_limit, self.wall_seconds = cpu_seconds, wall_seconds

    def start(self, pid: int) -> None:
        """Begin to measure, or begin again."""
        self.running, self._pid, self._began = True, pid, time.monotonic()
        self._cpu, self._waited = self._cpu_seconds(), self._seconds_without_core()

    def stop(self) -> None:
        self.total_s += self.own_seconds() if self.running else 0.0
        self.running = False

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def own_seconds(self) -> float:
        """Seconds by the clock, without those in which the process waited for a core."""
        return self.elapsed() - max(0.0, self._seconds_without_core() - self._waited)

    def exceeded(self) -> str:
        """The limit that was exceeded, as text for a message. Empty while the process is within both."""
        if self._cpu_seconds() - self._cpu > self._cpu_seconds_limit:
            return f"over {self._cpu_seconds_limit:g} CPU seconds"
        return over_clock(self.wall_seconds) if self.own_seconds() > self.wall_seconds else ""

    def _cpu_seconds(self) -> float:
        with contextlib.suppress(OSError):  # the process is gone
            return time.clock_gettime((~self._pid << 3) | CPUCLOCK_SCHED)
        return 0.0

    def _seconds_without_core(self) -> float:
        try:
            return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # it is gone, or the kernel has no CONFIG_SCHEDSTATS
            return 0.0


def remove(folder: str | Path) -> None:
    """Remove a folder that a command has left, including folders that are very deep or lack permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.isdir(folder) and not os.path.islink(folder):
        script = 'chmod -R u+rwx "$1"; rm -rf "$1"'
        with contextlib.suppress(OSError):  # no process can be started now
            subprocess.run(["/bin/sh", "-c", script, "sh", folder], stderr=subprocess.DEVNULL, check=False)
