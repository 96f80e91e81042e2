"""Program: ends all processes of a run's own Ray cluster as soon as the driver has ended, for whatever reason.

    python guard.py FOLDER

The driver holds the other end of the standard input, so the input ends with the driver. A process belongs to the
cluster if it was started with FOLDER in the environment variable MARK, which Ray's processes inherit from the driver's
`ray.init`, or if it is a descendant of such a process. Open files do not count: a process that follows a log is spared.
Only the standard library is used: it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

LOOK_EVERY_S = 0.2
PATIENCE_S = 60.0  # for processes that wait for a disk and cannot be killed yet
TRACKERS_S = 5.0  # for Python's resource trackers: they remove the shared memory of the others, and then end
TRACKER = b"multiprocessing.resource_tracker"
SHARED_MEMORY = "/dev/shm/"
MARK = "RLHF_RAY_FOLDER"


def main() -> None:
    folder, spared = sys.argv[1], {os.getpid(), os.getppid()}  # a driver that is still ending has the folder open too
    sys.stdin.buffer.read()
    shared: set[str] = set()
    began = time.monotonic()
    while (members := _members(folder, spared)) and time.monotonic() < began + PATIENCE_S:
        shared.update(*map(_shared_memory, members))
        late = time.monotonic() > began + TRACKERS_S
        for process in [process for process in members if late or TRACKER not in _read(process, "cmdline")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str, spared: set[int]) -> set[int]:
    """The running processes of the cluster and their descendants, except the spared ones."""
    parents: dict[int, int] = {}
    members: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spared:
            continue
        with contextlib.suppress(OSError):
            state, parent, *_ = Path("/proc", entry, "stat").read_text().rsplit(")", 1)[1].split()
            if state == "Z":
                continue
            parents[int(entry)] = int(parent)
            if f"{MARK}={folder}".encode() in _read(int(entry), "environ").split(b"\0"):
                members.add(int(entry))
    while below := {process for process, parent in parents.items() if parent in members} - members:
        members |= below
    return members


def _read(process: int, name: str) -> bytes:
    """A file of a process in /proc; empty if the process is gone."""
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except OSError:
        return b""


def _shared_memory(process: int) -> set[str]:
    """The files in shared memory that a process maps; they would stay when it is killed."""
    lines = _read(process, "maps").decode(errors="surrogateescape").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if SHARED_MEMORY in line}


if __name__ == "__main__":
    main()
