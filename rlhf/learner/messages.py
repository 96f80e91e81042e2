"""The place of a rank in its world, as the driver sends it; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """One rank of a world; `threads` is for CPU."""

    rank: int
    world_size: int
    local_rank: int
    master_host: str
    master_port: int
    threads: int
