"""What is measured in every step: seconds by phase, who waited for whom, and metrics of the rollouts."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rlhf.log.reductions import HISTOGRAM_BINS, Binned, Histogram, Mean, StepMetrics
from rlhf.types import RolloutGroup, ScoredRollout

# policy/engine_kl of the tokens at these places of their sequences, prompt included, each up to the next. The canary's
# sequences are short; an engine that differs from the learner in long contexts alone shows here.
ENGINE_KL_FROM = {place: f"policy/engine_kl/from_{place}" for place in (0, 64, 1024, 4096)}


Watch = Callable[[str], contextlib.AbstractContextManager[None]]  # a context around something that has a name


def unwatched(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Clock:
    """Seconds by phase, of the whole run (a resumed run continues the count) and since the last logged step."""

    def __init__(self, spent: Mapping[str, float], watch: Watch = unwatched) -> None:
        self._watch = watch
        self.total: dict[str, float] = defaultdict(float, spent)
        self.step: dict[str, float] = {}
        self._step_started = self._window_started = time.monotonic()

    def start_window(self) -> None:
        """Count waiting from now on; call this when engines and learners have started."""
        self._window_started = time.monotonic()

    def start_step(self) -> None:
        self._step_started = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            with self._watch(name):
                yield
        finally:
            seconds = time.monotonic() - started
            self.step[name] = self.step.get(name, 0.0) + seconds
            self.total[name] += seconds

    def step_seconds(self) -> float:
        return time.monotonic() - self._step_started

    def take(self) -> tuple[dict[str, float], float]:
        """(seconds by phase, seconds in total) since the last call; evaluation and checkpoint are included."""
        now = time.monotonic()
        phases, window_s = self.step, now - self._window_started
        self.step, self._window_started = {}, now
        return phases, window_s


LEARNER_PHASES = ("logprobs", "update", "transfer", "canary", "checkpoint")


def waiting_seconds(phases: Mapping[str, float], window_s: float, engines_busy_s: float) -> dict[str, float]:
    """Seconds in which no engine had a request, and seconds in which the learners had no work."""
    learners_busy_s = sum(phases.get(phase, 0.0) for phase in LEARNER_PHASES)
    return {
        "time/engine_idle": max(0.0, window_s - engines_busy_s),
        "time/learner_idle": max(0.0, window_s - learners_busy_s),
    }


def rollout_metrics(
    groups: Sequence[RolloutGroup], advantages: np.ndarray, *, version: int, asynchronous: bool
) -> StepMetrics:
    """Metrics of the rollouts of a step, before any update.

    Args:
        version: of the weights that the step trains; the lag of a token is counted from it.
        asynchronous: whether there can be a lag; otherwise it is not logged.
    """
    samples = [sample for group in groups for sample in group.samples]
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
        "policy/advantage/histogram": Binned(*np.histogram(advantages, bins=HISTOGRAM_BINS)),
        "policy/advantage_abs": Mean(float(np.abs(advantages).sum()), float(len(advantages))),
    }
    if asynchronous:
        metrics["rollout/lag"] = Histogram(tuple(float(version - s.rollout.oldest_version) for s in samples))
        metrics |= _lag_of_tokens(samples, version)
    for name in dict.fromkeys(name for sample in samples for name in sample.reward_parts):
        values = [s.reward_parts.get(name) for s in samples]
        known = [v for v in values if v is not None]
        metrics[f"reward/part/{name}"] = Mean(float(sum(known)), float(len(known)))
    return metrics


def _lag_of_tokens(samples: Sequence[ScoredRollout], version: int) -> StepMetrics:
    """rollout/tokens_at_lag/L: fraction of the sampled tokens whose weights were L training steps old."""
    tokens: dict[int, int] = defaultdict(int)
    for sample in samples:
        for span in sample.rollout.version_spans:
            tokens[version - span.version] += span.end - span.start
    total = float(sum(tokens.values()))
    return {f"rollout/tokens_at_lag/{lag}": Mean(float(count), total) for lag, count in sorted(tokens.items())}
