"""Metrics of a step's rollouts, before any update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlhf.log.reductions import HISTOGRAM_BINS, Binned, Histogram, Mean, StepMetrics
from rlhf.rewards.grade import count_answers
from rlhf.types import RolloutGroup, ScoredRollout


def rollout_metrics(
    groups: Sequence[RolloutGroup], advantages: np.ndarray, *, version: int, asynchronous: bool
) -> StepMetrics:
    """Metrics of the rollouts of a step, before any update.

    Args:
        version: the version of the weights that the step trains; a token's lag is counted from it.
        asynchronous: whether there can be a lag; otherwise it is not logged.
    """
    samples = [sample for group in groups for sample in group.samples]
    rewards = [s.reward for s in samples if s.reward is not None]
    several = [group for group in groups if len(group.samples) > 1]
    metrics: StepMetrics = {
        "reward": Histogram(tuple(rewards)),
        "reward/equal_group_fraction": Mean(
            float(sum(len(group.distinct_rewards()) < 2 for group in several)), float(len(several))
        ),
        "reward/answered_fraction": Mean(*count_answers(samples)),
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
