"""How much of its time limits a job has used: CPU seconds of its process, and wall-clock seconds.

A reward must not depend on the load of the machine, so the first limit is in CPU seconds. The second one is for a
process that sleeps, and does not count the time in which the process waited for a core.
"""

from __future__ import annotations

import time

CPUCLOCK_SCHED = 2  # linux: clock id of a process's CPU time is (~pid << 3) | 2


class Stopwatch:
    """Measures one process, and is restarted for each of its jobs.

    Attributes:
        cpu: CPU seconds of the process when the job began, as the process reported them.
    """

    def __init__(self) -> None:
        self.cpu = 0.0
        self._started = time.monotonic()
        self._waited: float | None = None  # seconds waiting for a core until the job was first checked

    def start(self) -> None:
        self._started, self._waited = time.monotonic(), None

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def exceeded(self, pid: int, *, cpu_seconds: float, wall_seconds: float) -> str:
        """The limit that the job has used up, as text for a message; "" while it is within both."""
        waited = seconds_waiting_for_a_core(pid)
        if self._waited is None:
            self._waited = waited
        if cpu_seconds_of(pid) - self.cpu > cpu_seconds:
            return f"over {cpu_seconds:g} CPU seconds"
        over_wall = self.elapsed() - (waited - self._waited) > wall_seconds
        return f"over {wall_seconds:g} seconds by the clock" if over_wall else ""


def cpu_seconds_of(pid: int) -> float:
    """CPU seconds of all threads of a process so far; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def seconds_waiting_for_a_core(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
