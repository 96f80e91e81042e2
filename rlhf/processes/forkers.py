"""The processes that fork workers, as the driver sees them: the keeper (`keeper.py`), and templates."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.processes.channel import Channel

CLOSE_S = 5.0  # time for the keeper to kill and reap all workers, before it is killed itself; wardens go on
START_S = 120.0  # limit for the processes to load, including other people's modules

# Makes our package importable, and none of our site-packages; then runs a module.
BOOT = """import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("rlhf", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]])
sys.modules["rlhf"] = module_from_spec(spec)
from rlhf.processes.{module} import main
main(*sys.argv[2:])
"""
PACKAGE = str(Path(__file__).parents[1])


class Forker:
    """A process that forks workers, and answers pings: the keeper, or a template."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pinged = time.monotonic()
        self.deadline = self._pinged + START_S  # of its next sign of life

    def send(self, command: Mapping[str, Any], *, fds: Sequence[int] = ()) -> None:
        """Send a command. If the process has ended, its channel reports it."""
        with contextlib.suppress(OSError):
            self.channel.send(command, fds=fds)

    def is_silent(self, *, ping_s: float) -> bool:
        """Ping the process every `ping_s`; True if it has not answered in time."""
        now = time.monotonic()
        if now - self._pinged > ping_s:
            self._pinged = now
            self.send({"ping": True})
        return now > self.deadline


class KeeperProcess(Forker):
    """A running keeper (`keeper.py`); it ends with the thread that starts it."""

    def __init__(self, python: str, plan: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(Channel(ours))
        self._process = subprocess.Popen(
            [python, "-c", BOOT.format(module="keeper"), PACKAGE, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(plan).encode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Have it kill every worker, and wait until it has ended; after CLOSE_S it is killed.

        Returns its exit status, or minus the signal that ended it.
        """
        self.channel.socket.close()
        try:
            return self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()
