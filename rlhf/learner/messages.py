"""What the driver and a learner rank say to each other; importable without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf.types import Denominators, PackedTokens, PolicyTargets, ValueTargets


@dataclass(frozen=True)
class Place:
    """Where a rank stands in its world; `threads` is for CPU."""

    rank: int
    world_size: int
    local_rank: int
    master_host: str
    master_port: int
    threads: int


@dataclass(frozen=True)
class LearnerMinibatch:
    """One optimizer step as one rank sees it."""

    microbatches: tuple[PackedTokens, ...]
    targets: tuple[PolicyTargets, ...]
    denominators: Denominators


@dataclass(frozen=True)
class ValueMinibatch:
    """The same for the critic."""

    microbatches: tuple[PackedTokens, ...]
    targets: tuple[ValueTargets, ...]
    denominators: Denominators


@dataclass(frozen=True)
class LogprobPass:
    """Log-probs of one microbatch before the first update; [T] float32 each, `ref` zeros without a reference."""

    old: np.ndarray
    ref: np.ndarray
