"""What Ray and vLLM need of this machine besides cores: a short TMPDIR, a home folder to write to, shared memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOCKET_PATH_BYTES = 107  # of a Unix socket, as the kernel limits it
# Below TMPDIR, with the longest of the names; NUMBER is the process, which is this one or one of the same length.
RAY_SOCKET = "/rlhf-12345678/ray/session_2026-01-02_03-04-05_123456_NUMBER/sockets/plasma_store"
SHARED_MEMORY = Path("/dev/shm")
# vLLM's engine refuses to start without 160 MiB for its queue to the workers, and each worker without 240 for its own.
SHARED_MEMORY_MIB = 256


def machine_problems() -> Iterator[str]:
    """Reasons why Ray or vLLM would not start on this machine."""
    yield from _temp_folder_problems()
    yield from _home_problems()
    yield from shared_memory_problems(SHARED_MEMORY)


def _temp_folder_problems() -> Iterator[str]:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield f"TMPDIR: {error.strerror or error}. Set it to a folder that can be written, such as TMPDIR=/tmp."
        return
    longest = SOCKET_PATH_BYTES - len(RAY_SOCKET.replace("NUMBER", str(os.getpid())))
    if (length := len(os.fsencode(os.path.abspath(folder)))) > longest:
        yield (
            f"TMPDIR={folder}: it has {length} characters, and Ray can use at most {longest} here: the paths of its "
            f"sockets end at {SOCKET_PATH_BYTES}. Set it to a shorter folder, such as TMPDIR=/tmp."
        )


def _home_problems() -> Iterator[str]:
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    remedy = "Set HOME to a folder that can be written, such as HOME=/tmp/home: Ray makes the file of its token there."
    try:
        home = Path.home().absolute()
    except RuntimeError:
        yield f"HOME: it is not set, and user {os.getuid()} has no home folder. {remedy}"
        return
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        yield f"HOME={home}: {existing} cannot be written ({error.strerror}). {remedy}"


def shared_memory_problems(folder: Path) -> Iterator[str]:
    """A problem if the file system of this folder has too little room for what processes share."""
    try:
        left = os.statvfs(folder)
    except OSError:
        return  # none here: vLLM and Ray then use other means, or say so
    free = left.f_bavail * left.f_frsize // 2**20
    if free < SHARED_MEMORY_MIB:
        yield (
            f"{folder}: {free} MiB are free, and vLLM needs {SHARED_MEMORY_MIB} for what its processes share. Start "
            "the container with --shm-size=8g or more (Docker's default is 64 MB); on a machine remove old files there."
        )
