"""JSON messages, one per line: unlike with pickle, a hijacked process cannot make the driver run code."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Any

READ_BYTES, MAX_FDS = 1 << 18, 64  # of one read
MAX_BYTES = 1 << 28  # our messages are shorter
SEND_S = 10.0  # a peer that reads nothing for so long counts as dead


class Channel:
    """One end of a stream socket.

    Attributes:
        problem: why `receive` has failed; empty if the peer has just left.
    """

    problem = ""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._rest = bytearray()  # of a message that has not arrived completely
        self._unsent = bytearray()

    def queue(self, message: Any) -> None:
        """Add a message for `flush` to send, since the peer may itself be waiting to send."""
        self._unsent += _encoded(message)

    def flush(self) -> bool:
        """Send as much as the peer has room for; True if that was everything. `receive` tells if the peer is gone."""
        if self._unsent:
            self.socket.setblocking(False)
            with contextlib.suppress(OSError):
                while self._unsent:
                    del self._unsent[: self.socket.send(self._unsent)]
        return not self._unsent

    def send(self, message: Any, *, fds: Sequence[int] = ()) -> None:
        """Send a whole message. Raises OSError when the peer is gone or does not read."""
        data = _encoded(message)
        self.socket.settimeout(SEND_S)
        sent = socket.send_fds(self.socket, [data], fds) if fds else 0
        self.socket.sendall(memoryview(data)[sent:])

    def receive(self, *, wait: bool = False, fds: list[int] | None = None) -> tuple[list[Any], bool]:
        """Read once: (the whole messages so far, whether the peer is alive and its messages are valid).

        Args:
            fds: gets the file descriptors that come with the messages; without it they are dropped.
        """
        self.socket.setblocking(wait)
        try:
            if fds is None:
                data = self.socket.recv(READ_BYTES)
            else:
                data, new, _, _ = socket.recv_fds(self.socket, READ_BYTES, MAX_FDS)
                fds += new
        except BlockingIOError:
            return [], True
        except ConnectionResetError:  # the peer left messages unread
            return [], False
        except OSError as error:
            self.problem = f"the channel cannot be read: {error}"
            return [], False
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) >= MAX_BYTES:
                self.problem = f"a message has over {MAX_BYTES} bytes"
            return [], bool(data) and not self.problem
        *lines, self._rest = self._rest.split(b"\n")
        try:
            return [json.loads(line) for line in lines], True
        except (ValueError, RecursionError):
            self.problem = "a message is not JSON"
            return [], False


def _encoded(message: Any) -> bytes:
    return json.dumps(message, default=as_json).encode() + b"\n"


def as_json(value: Any) -> Any:
    """The JSON form of arrays, numpy numbers and dates in data columns: a list or number if possible, else text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)
