"""A port for the ranks of a world to meet at; importable without torch and ray."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port that is free on this machine now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
