"""A port for the ranks of a world to meet at; importable without torch and ray."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """A TCP port that is free on this machine, and held for this process.

    The system gives a port that a socket is bound to neither to a client nor to who asks for any port. A server with
    SO_REUSEADDR, such as torch's store, may listen there nevertheless, since the socket here does not listen.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    _held.append(held)
    return int(held.getsockname()[1])
