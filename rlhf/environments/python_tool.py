"""The built-in tool `python`: the model's program in a new interpreter, in a process domain of its own, with limits."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.environments.places import without_places
from rlhf.processes.domains import Bounds, Command
from rlhf.processes.outside import remove

KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
MIB = 1 << 20
MAX_FILE_MB, MAX_OPEN_FILES = 64, 256  # of a process
MAX_FOLDER_MB, MAX_FILES, MAX_PROCESSES = 256, 4096, 32  # of a program


def python_tool(
    *, seconds: float = 10.0, memory_mb: int = 1024, max_output_characters: int = 10_000
) -> Callable[..., Any]:
    """The tool with its limits.

    Args:
        seconds: of the clock, and of CPU, for one program.
        memory_mb: of address space for one program.
        max_output_characters: longer output is cut, and the answer says so.

    Raises:
        ValueError: a limit is not above 0.
    """
    for name, limit in {
        "seconds": seconds,
        "memory_mb": memory_mb,
        "max_output_characters": max_output_characters,
    }.items():
        if not limit > 0:
            raise ValueError(f"{name}={limit}: the limit must be above 0.")

    limits = [
        (resource.RLIMIT_AS, memory_mb * MIB),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_FSIZE, MAX_FILE_MB * MIB),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
    ]
    bounds = Bounds(seconds, MAX_PROCESSES, MAX_FOLDER_MB, MAX_FILES, limits)

    async def python(code: str) -> str:
        """
        Run a Python program in a new interpreter.

        Args:
            code: The program. Only what it prints is returned.

        Returns:
            What the program printed, errors included.
        """
        place = _Place(bounds)
        try:
            place.begin(code)
            return await _run(code, place, max_output_characters)
        finally:
            place.close()

    return python


class _Place:
    """The folder of a program, the file of its output, and the process that becomes its interpreter."""

    def __init__(self, bounds: Bounds) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="python-tool-"))
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the place
        folder = str(self.folder)
        variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        variables |= {"HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        variables |= {"PYTHONIOENCODING": "utf-8:backslashreplace", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        how: dict[str, Any] = {"work": folder, "variables": variables, "bounds": bounds}
        self.running = Command([sys.executable, "-s", "main.py"], self.folder, output=self.output.fileno(), **how)

    def begin(self, code: str) -> None:
        (self.folder / "main.py").write_bytes(code.encode("utf-8", "backslashreplace"))
        self.running.begin()

    def close(self) -> None:
        self.running.close()
        self.output.close()
        remove(self.folder)


async def _run(code: str, place: _Place, max_output_characters: int) -> str:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(place.running.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(place.running.fileno())
    status, over = place.running.ended()
    printed = os.pread(place.output.fileno(), 4 * max_output_characters + 1, 0)
    folder = str(place.folder)
    text = printed.decode("utf-8", "backslashreplace")
    for path in (folder, os.path.realpath(folder)):
        text = text.replace(f"{path}/", "").replace(path, ".")
    text = without_places(text, written=code)
    if len(text) > max_output_characters:
        text = f"{text[:max_output_characters]}\n[output cut after {max_output_characters} characters]"
    if over or status < 0:
        return f"{text}\n[{f'stopped {over}' if over else f'ended by signal {-status}'}]".lstrip("\n")
    return text or (f"[exit status {status}]" if status else "")
