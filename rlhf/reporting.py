"""What is measured of a step: seconds by phase, and what the rollouts say of themselves."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlhf import batching
from rlhf.types import Histogram, Max, Mean, RolloutGroup, StepMetrics


class Clock:
    """Seconds by phase, of the whole run (a resumed one goes on counting) and since the last step was logged."""

    def __init__(self, spent: Mapping[str, float]) -> None:
        self.total: dict[str, float] = defaultdict(float, spent)
        self.step: dict[str, float] = {}
        self._step_started = time.monotonic()

    def start_step(self) -> None:
        self._step_started = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.step[name] = self.step.get(name, 0.0) + seconds
            self.total[name] += seconds

    def step_seconds(self) -> float:
        return time.monotonic() - self._step_started


def rollout_metrics(groups: Sequence[RolloutGroup], advantages: np.ndarray, *, step: int) -> StepMetrics:
    """What the rollouts of a step say of themselves, before any update."""
    samples = batching.flatten(groups)
    rewards = [s.reward for s in samples if s.reward is not None]
    metrics: StepMetrics = {
        "reward": Histogram(tuple(rewards)),
        "reward/equal_group_fraction": Mean(
            float(sum(len({s.reward for s in group.samples}) == 1 for group in groups)), float(len(groups))
        ),
        "rollout/response_length": Histogram(tuple(float(s.rollout.response_length) for s in samples)),
        "rollout/stopped_fraction": Mean(
            float(sum(s.rollout.finish_reason == "stop" for s in samples)), float(len(samples))
        ),
        "rollout/lag_max": Max(float(max(step - group.oldest_version for group in groups))),
        "rollout/lag": Histogram(tuple(float(step - s.rollout.oldest_version) for s in samples)),
        "policy/advantage_abs": Mean(float(np.abs(advantages).sum()), float(len(advantages))),
    }
    for name in samples[0].reward_parts:
        values = [s.reward_parts.get(name) for s in samples]
        known = [v for v in values if v is not None]
        metrics[f"reward/part/{name}"] = Mean(float(sum(known)), float(len(known)))
    return metrics
