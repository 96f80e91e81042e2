"""Program: ends what a run has left of its own Ray cluster, as soon as the driver is gone, however it ended.

    python guard.py FOLDER

The driver holds the other end of the standard input, which is at its end when the driver is. A process belongs to the
cluster if it names Ray's temporary folder in its command, has a file of it open (the log that Ray's workers and all
processes below them write to), or was started by one that does. Standard library alone: it starts in an instant.
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
SHARED_MEMORY = "/dev/shm/"


def main() -> None:
    folder, spared = sys.argv[1], {os.getpid(), os.getppid()}  # a driver that only ends has the folder open too
    sys.stdin.buffer.read()
    shared: set[str] = set()
    end = time.monotonic() + PATIENCE_S
    while (members := _members(folder, spared)) and time.monotonic() < end:
        shared.update(*map(_shared_memory, members))
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_EVERY_S)
    for path in shared:
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def _members(folder: str, spared: set[int]) -> set[int]:
    """The processes of the cluster that have not ended, and all below them, but for those that are spared."""
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
            if _belongs(entry, folder):
                members.add(int(entry))
    while below := {process for process, parent in parents.items() if parent in members} - members:
        members |= below
    return members


def _belongs(process: str, folder: str) -> bool:
    program = os.readlink(f"/proc/{process}/exe")
    if program != os.readlink("/proc/self/exe") and "/ray/" not in program:
        return False  # somebody who reads a log
    if folder.encode() in Path("/proc", process, "cmdline").read_bytes():
        return True
    for descriptor in os.scandir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor.path).startswith(f"{folder}/"):
                return True
    return False


def _shared_memory(process: int) -> set[str]:
    """Files in shared memory that a process maps: nobody removes them when it is killed."""
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {line.split(maxsplit=5)[5] for line in lines if SHARED_MEMORY in line}


if __name__ == "__main__":
    main()
