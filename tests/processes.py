"""Which processes a test leaves behind, also those whose parents are gone.

A process is known by having been seen below this one. An environment variable would not do as a mark: Ray's agents
write their titles over the memory that /proc/PID/environ shows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.3
GRACE_S = 60.0  # vLLM's workers notice within seconds that their parent is gone, later where others take the cores
LIVES_AS_LONG_AS_THIS_PROCESS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
LIVES_AS_LONG_AS_ITS_PARENT = "rlhf/config/limit.py"


@dataclass(frozen=True)
class Process:
    """A process by its id and start, which together are never used twice."""

    pid: int
    started: int  # clock ticks since boot


@dataclass(frozen=True)
class Seen:
    parent: int
    state: str
    command: str


def all_pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def all_processes(pids: Iterable[int] | None = None) -> dict[Process, Seen]:
    """Every process, or those of some ids."""
    found = {}
    for pid in all_pids() if pids is None else pids:
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                fields = stat.read().rsplit(")", 1)[1].split()
                command = cmdline.read().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended meanwhile
            continue
        found[Process(pid, int(fields[19]))] = Seen(int(fields[1]), fields[0], command)
    return found


def below(roots: set[int], *, spare: Collection[Process] = (), now: dict[Process, Seen] | None = None) -> set[Process]:
    """Descendants of the roots, by their ids, without `spare` and what is below those."""
    now = all_processes() if now is None else now
    found: set[Process] = set()
    parents = roots
    while parents:
        children = {p for p, seen in now.items() if seen.parent in parents and p not in spare and p not in found}
        found |= children
        parents = {p.pid for p in children}
    return found


def running(processes: Collection[Process], now: dict[Process, Seen] | None = None) -> dict[Process, str]:
    """Those of the processes that still run, with their commands."""
    now = all_processes() if now is None else now
    return {process: now[process].command for process in now.keys() & processes if now[process].state != "Z"}


def outliving(processes: Collection[Process], *, grace_s: float = GRACE_S) -> list[str]:
    """Wait for processes to end, and no longer than the grace; the commands of those that have not."""
    deadline = time.monotonic() + grace_s
    while (left := running(processes)) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return sorted(left.values())


def shared_memory(processes: Iterable[Process]) -> set[Path]:
    """The files in shared memory that these processes map; those of one that has ended meanwhile are left out."""
    maps = ""
    for process in processes:
        with contextlib.suppress(OSError):
            maps += Path(f"/proc/{process.pid}/maps").read_text()
    return {path for path in Path("/dev/shm").iterdir() if f" {path}\n" in maps}


class Watch:
    """Notes every process that appears below this one, from `start` on."""

    def __init__(self) -> None:
        self.noted: set[Process] = set()
        self._before: set[Process] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="watch processes", daemon=True)

    def start(self) -> None:
        """What is below this process already belongs to someone else, and so does what that starts."""
        self._before = below({os.getpid()})
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def alive(self) -> dict[Process, str]:
        """The noted processes that still run, with their commands."""
        now = all_processes()
        roots = {os.getpid(), *(p.pid for p in self.noted & now.keys())}
        self.noted |= below(roots, spare=self._before, now=now)
        return {
            process: command
            for process, command in running(self.noted, now).items()
            if not any(name in command for name in LIVES_AS_LONG_AS_THIS_PROCESS)
            and not (LIVES_AS_LONG_AS_ITS_PARENT in command and now[process].parent == os.getpid())
        }

    def end_what_is_left(self, *, grace_s: float = GRACE_S) -> list[str]:
        """Stop watching, wait for the noted processes to end, and kill the rest; the commands of the rest."""
        self.stop()
        deadline = time.monotonic() + grace_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return sorted(f"{process.pid} {command}" for process, command in left.items())

    def _look_on(self) -> None:
        """Note new processes. To read of all of them, each time, would take a tenth of a core in six such threads."""
        known: set[int] = set()
        alive = {os.getpid()}  # and the noted ones; an id that has been gone may come back as a stranger's
        while not self._stop.wait(LOOK_EVERY_S):
            pids = all_pids()
            alive &= pids
            new = below(alive, spare=self._before, now=all_processes(pids - known))
            self.noted |= new
            alive |= {process.pid for process in new}
            known = pids
