"""The ranges in which the metrics of a healthy run lie; docs/metrics.md shows the same ones in its column *healthy*.

The rules of `diagnosis` warn of what is surely wrong. A value outside of its range here may have a good reason, so it
is a notice: at the end of a run, and in the report, whose charts show the range.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Bounds that belong to the range; None: no bound on this side."""

    low: float | None
    high: float | None

    def __str__(self) -> str:
        match self:
            case (None, high):
                return f"below {high}"
            case (low, None):
                return f"above {low}"
        return f"{self.low} to {self.high}"

    def holds(self, value: float) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


HEALTHY = {
    "reward/equal_group_fraction": Range(None, 0.8),
    "reward/answered_fraction": Range(0.9, None),
    "policy/ratio": Range(0.99, 1.01),
    "policy/ratio_max": Range(None, 10),
    "policy/clip_fraction": Range(None, 0.1),
    "policy/dual_clip_fraction": Range(None, 0.01),
    "policy/kl_k[1234]": Range(None, 0.5),
    "policy/kl_old": Range(None, 0.01),
    "policy/engine_kl_excess": Range(None, 1),
    "policy/effective_sample_fraction": Range(0.9, None),
    "policy/importance_weight": Range(0.95, 1.05),
    "policy/importance_outside_fraction": Range(None, 0.01),
    "rollout/stopped_fraction": Range(0.9, None),
    "critic/clip_fraction": Range(None, 0.3),
    "router/max_load": Range(1, 3),
    "router/load_entropy": Range(0.9, None),
    "router/balance_loss": Range(1, 1.5),
    "eval/*/stopped_fraction": Range(0.9, None),
    "eval/*/answered_fraction": Range(0.9, None),
}


class Outside(NamedTuple):
    metric: str
    value: float
    healthy: str


def range_of(metric: str) -> Range | None:
    """The range of a metric by its name; None if it has none."""
    return next((healthy for pattern, healthy in HEALTHY.items() if fnmatchcase(metric, pattern)), None)


def outside_their_range(rows: Sequence[Mapping[str, Any]]) -> list[Outside]:
    """Metrics whose mean over the rows that have them lies outside of their range."""
    found = []
    for metric in dict.fromkeys(name for row in rows for name in row):
        healthy = range_of(metric)
        mean = statistics.fmean(row[metric] for row in rows if metric in row) if healthy else 0.0
        if healthy and not healthy.holds(mean):
            found.append(Outside(metric, mean, str(healthy)))
    return found
