"""The driver's side of the keeper, the process that forks, kills and reaps the workers (`worker.py`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.rewards.protocol import Channel

CLOSE_S = 5.0  # for the keeper to kill and reap every worker, before it is killed itself


class KeeperProcess:
    """A running keeper; it ends with the thread that starts it.

    Args:
        hello: what its workers need to know.
        environment: its variables, which the workers inherit.
        start_s: seconds for it to load; `answered` sets how long it may then be silent.

    Attributes:
        channel: commands to it, and its messages.
    """

    def __init__(self, hello: Mapping[str, Any], environment: Mapping[str, str], *, start_s: float) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(hello).encode())
        self.pid, self.channel = self._process.pid, Channel(ours)
        self._start_s, self._pinged = start_s, time.monotonic()
        self._deadline = self._pinged + start_s

    def send(self, command: Mapping[str, Any], *, fds: Sequence[int] = ()) -> None:
        """Send a command; that the keeper has ended is an event of its channel."""
        with contextlib.suppress(OSError):
            self.channel.send(command, fds=fds)

    def answered(self, *, silent_s: float) -> None:
        """Count a message as a sign of life: it may now be silent for `silent_s`."""
        self._deadline = time.monotonic() + silent_s

    def watch(self, *, ping_s: float) -> None:
        """Ping it every `ping_s`, and kill it when it has not answered for long."""
        now = time.monotonic()
        if now > self._deadline:
            self._deadline = now + self._start_s
            os.killpg(self.pid, signal.SIGKILL)
        elif now - self._pinged > ping_s:
            self._pinged = now
            self.send({"ping": True})

    def end(self) -> None:
        """Have it kill every worker, and wait until it has ended; after CLOSE_S it is killed."""
        self.channel.socket.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
