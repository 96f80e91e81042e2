"""The built-in tool `python`: the model's program in a new interpreter, in a process domain of its own, with limits."""

from __future__ import annotations

import asyncio
import contextlib
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
    """The tool with its limits. Raises ValueError if one is not above 0.

    Args:
        seconds: of the clock, and of CPU, for one program.
        memory_mb: of address space for one program.
        max_output_characters: longer output is cut, and the answer says so.
    """
    given = {"seconds": seconds, "memory_mb": memory_mb, "max_output_characters": max_output_characters}
    if wrong := next((f"{name}={limit}" for name, limit in given.items() if not limit > 0), None):
        raise ValueError(f"{wrong}: the limit must be above 0.")
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
        folder = Path(tempfile.mkdtemp(prefix="python-tool-"))
        try:
            (folder / "main.py").write_bytes(code.encode("utf-8", "backslashreplace"))
            with tempfile.TemporaryFile() as output:
                status, over = await _run(folder, output.fileno(), bounds)
                printed = os.pread(output.fileno(), 4 * max_output_characters + 1, 0)
        finally:
            remove(folder)
        text = printed.decode("utf-8", "backslashreplace")
        for path in (str(folder), os.path.realpath(folder)):
            text = text.replace(f"{path}/", "").replace(path, ".")
        text = without_places(text, written=code)
        if len(text) > max_output_characters:
            text = f"{text[:max_output_characters]}\n[output cut after {max_output_characters} characters]"
        if over or status < 0:
            return f"{text}\n[{f'stopped {over}' if over else f'ended by signal {-status}'}]".lstrip("\n")
        return text or (f"[exit status {status}]" if status else "")

    return python


async def _run(folder: Path, output: int, bounds: Bounds) -> tuple[int, str]:
    """Run the program in a folder; its exit status, and the bound that it exceeded (an empty string if none)."""
    variables = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    variables |= {"HOME": str(folder), "TMPDIR": str(folder), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    variables |= {"PYTHONIOENCODING": "utf-8:backslashreplace", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    how: dict[str, Any] = {"work": str(folder), "variables": variables, "bounds": bounds}
    command = Command([sys.executable, "-s", "main.py"], folder, output=output, **how)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.closing(command):
        command.begin()
        loop.add_reader(command.fileno(), ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(command.fileno())
        return command.ended()
