"""JSON messages between the driver and the processes of the pool: 4 bytes with the length, then UTF-8."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

# Rewards that take microseconds; only their replies are sent together.
QUICK_REWARDS = frozenset(["math", "gsm8k", "multiple_choice", "exact", "f1", "length"])
HEADER = struct.Struct("!I")
READ_BYTES = 1 << 18
MAX_BYTES = 1 << 28  # our messages are shorter
SEND_S = 10.0  # a peer that reads nothing for this long counts as dead


def encoded(message: Any) -> bytes:
    body = json.dumps(message, default=as_json).encode()
    return HEADER.pack(len(body)) + body


class Channel:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()

    def send(self, message: Any, *, fds: Sequence[int] = ()) -> None:
        """Send a whole message. Raises OSError when the peer is gone or does not read."""
        data = encoded(message)
        self.socket.settimeout(SEND_S)
        sent = socket.send_fds(self.socket, [data], fds) if fds else 0
        self.socket.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[list[Any], bool]:
        """Read without waiting: (the whole messages so far, whether the peer is alive and its messages are valid)."""
        self.socket.setblocking(False)
        alive = True
        try:
            data = self.socket.recv(READ_BYTES)
            alive = bool(data)
            self._buffer += data
        except BlockingIOError:
            pass
        except OSError:
            alive = False
        try:
            return self._take(), alive
        except (ValueError, RecursionError):
            return [], False

    def receive_one(self) -> Any:
        """Wait for one message. Raises EOFError when the peer is gone."""
        self.socket.setblocking(True)
        while True:
            message = self._take_one()
            if message is not None:
                return message
            data = self.socket.recv(READ_BYTES)
            if not data:
                raise EOFError
            self._buffer += data

    def feed(self, data: bytes) -> list[Any]:
        """The whole messages that this data completes, for a reader that calls recv itself."""
        self._buffer += data
        return self._take()

    def close(self) -> None:
        self.socket.close()

    def _take(self) -> list[Any]:
        messages = []
        while (message := self._take_one()) is not None:
            messages.append(message)
        return messages

    def _take_one(self) -> Any:
        if len(self._buffer) < HEADER.size:
            return None
        (size,) = HEADER.unpack_from(self._buffer)
        if size > MAX_BYTES:
            raise ValueError("not a message")
        if len(self._buffer) < HEADER.size + size:
            return None
        body = bytes(self._buffer[HEADER.size : HEADER.size + size])
        del self._buffer[: HEADER.size + size]
        return json.loads(body)


def as_json(value: Any) -> Any:
    """JSON for the arrays, numpy numbers and dates of data columns: a list or number where possible, else text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)
