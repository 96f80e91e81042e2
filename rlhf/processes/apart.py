"""One call in a forked process that can do nothing but compute, read files and answer. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from rlhf.processes.confinement import ALONE, FOLDERS, SYSTEM, Domain, close_descriptors
from rlhf.processes.outside import die_with_parent

MAX_ERROR = 500  # characters
PIPE = 1 << 16  # bytes that a pipe holds


class ApartError(Exception):
    """The call raised, took too long or ended its process."""


async def apart(function: Callable[[], Any], *, seconds: float) -> Any:
    """What the function returns, as JSON; whatever it does costs nothing but this call.

    It cannot start processes, write files or reach a network, and has no descriptor of this process.

    Raises:
        ApartError: it raised, took over `seconds` of the clock, or its process ended.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writes, _answer(function, seconds, writes))
        finally:
            os._exit(0)  # without the exit handlers of the parent
    os.close(writes)
    loop, answered = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(reads, answered.set)
    try:
        await asyncio.wait_for(answered.wait(), seconds)
        said = json.loads(os.read(reads, PIPE) or b'{"error": "its process was ended"}')
    except asyncio.TimeoutError:  # noqa: UP041 - another one than TimeoutError in Python 3.10
        said = {"error": f"it took over {seconds:g} seconds"}
    finally:
        loop.remove_reader(reads)
        os.close(reads)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if "error" in said:
        raise ApartError(said["error"])
    return said["value"]


def _answer(function: Callable[[], Any], seconds: float, writes: int) -> bytes:
    """Confine this process for good, call the function, and return the message for the parent."""
    die_with_parent(signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    packages = [entry for entry in sys.path if entry]
    Domain([*FOLDERS, *SYSTEM, sys.prefix, sys.base_prefix, *packages], level=ALONE).enter()
    close_descriptors([writes])
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
    try:
        said = json.dumps({"value": function()})
    except BaseException as error:
        said = json.dumps({"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]})
    return said.encode()
