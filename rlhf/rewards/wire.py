"""JSON messages over a socket: a length in 4 bytes, then UTF-8. Both ends of the reward pool speak it."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

# Rewards that take microseconds, or ask before they take longer; only these are answered several at a time.
QUICK_REWARDS = frozenset(["math", "gsm8k", "multiple_choice", "exact", "f1", "length"])
HEADER = struct.Struct("!I")
READ_BYTES = 1 << 18
MAX_BYTES = 1 << 28  # a longer message is not one of ours
SEND_S = 10.0  # a peer that does not read for so long counts as dead


class Channel:
    """One end of a stream socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()

    def send(self, message: Any, *, fd: int | None = None) -> None:
        """Send all of it. Raises OSError when the peer is gone or does not read."""
        body = json.dumps(message, default=as_json).encode()
        data = HEADER.pack(len(body)) + body
        self.socket.settimeout(SEND_S)
        sent = socket.send_fds(self.socket, [data], [fd]) if fd is not None else 0
        self.socket.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[list[Any], bool]:
        """What has arrived, without waiting: (whole messages, whether the peer is still there and sane)."""
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
        except ValueError:
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
        """Whole messages after this data, for a reader that calls recv itself."""
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
    """Columns of a data set may hold arrays, numpy numbers, dates: lists and numbers where possible, else text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset | tuple) else str(value)
