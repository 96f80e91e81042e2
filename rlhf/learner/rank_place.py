"""The place of a rank in its world, as the driver sends it, and a port to meet at; importable without torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One rank of a world.

    Attributes:
        threads: of torch, on CPU.
        ranks_on_node: ranks that share the node's memory.
        deterministic: whether torch may take only algorithms that give the same bits every time.
    """

    rank: int
    world_size: int
    local_rank: int
    master_host: str
    master_port: int
    threads: int
    ranks_on_node: int = 1
    deterministic: bool = False


def free_port() -> int:
    """A TCP port that is free on this machine now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
