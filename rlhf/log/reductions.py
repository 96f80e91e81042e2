"""Metrics of a step; the type of a metric says how it merges over microbatches, ranks and updates.

The values come from run/rollout_log.py (rollouts), learner/update.py (losses) and run/speed.py (throughput).
"""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np

HISTOGRAM_BINS = 32
MAX_EXPONENT = 700.0  # of a finite float
# policy/engine_kl by the token's position in its sequence, prompt included: from each of these up to the next. The
# canary's sequences are short; an engine that differs from the learner only in long contexts shows here.
ENGINE_KL_FROM = {position: f"policy/engine_kl/from_{position}" for position in (0, 64, 1024, 4096)}
# policy/engine_kl by the turn of its sequence that a token belongs to; the last of these has all later turns too.
ENGINE_KL_OF_TURN = {turn: f"policy/engine_kl/turn_{turn}" for turn in (1, 2, 3, 4)}
Scalar = Any  # a number; until its microbatch's step is queued, a tensor of one number on the learner's device


class Metric:
    """Fields that add up, unless a metric merges otherwise."""

    def merge(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))

    @abstractmethod
    def value(self) -> float: ...


@dataclass(frozen=True)
class Mean(Metric):
    """Weighted mean: `total` over `weight`; with weight 0 it is NaN, which is not logged."""

    total: Scalar
    weight: Scalar

    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Perplexity(Mean):
    """e to the power of a weighted mean of negative log-probabilities."""

    def value(self) -> float:
        return math.exp(min(super().value(), MAX_EXPONENT))


@dataclass(frozen=True)
class _Number(Metric):
    """One number, which the kind of metric merges."""

    number: Scalar

    def value(self) -> float:
        return self.number


class Sum(_Number):
    pass


class Max(_Number):
    def merge(self, other: Self) -> Self:
        return max(self, other, key=Max.value)


class Last(_Number):
    """The newest value wins, as for a learning rate or a counter."""

    def merge(self, other: Self) -> Self:
        return other


@dataclass(frozen=True)
class EffectiveSampleFraction(Metric):
    """Kish's effective sample size over n, (sum w)^2 / (n sum w^2), of importance ratios w."""

    samples: Scalar
    ratio_sum: Scalar
    ratio_square_sum: Scalar

    def value(self) -> float:
        return self.ratio_sum**2 / (self.samples * self.ratio_square_sum) if self.samples else float("nan")


@dataclass(frozen=True)
class Variance(Metric):
    """Of values whose differences to a number near them add up to `total`, and their squares to `squares`."""

    total: Scalar
    squares: Scalar
    count: Scalar

    def value(self) -> float:
        return self.squares / self.count - (self.total / self.count) ** 2 if self.count else float("nan")


@dataclass(frozen=True)
class Histogram(Metric):
    """All values; logged as their mean and four quantiles."""

    values: tuple[float, ...]

    def value(self) -> float:
        return float(np.mean(self.values)) if self.values else float("nan")


@dataclass(frozen=True)
class Binned(Metric):
    """Counts in fixed bins, which are shown only as a histogram."""

    counts: Any  # an array, or a tensor where a Scalar would be a tensor
    edges: np.ndarray

    def merge(self, other: Self) -> Self:
        return replace(self, counts=self.counts + other.counts)

    def value(self) -> float:
        return float(self.counts.sum())


@dataclass(frozen=True)
class ExpertLoad(Metric):
    """How evenly the experts of a model are used, from the tokens of each of them in each layer.

    Attributes:
        tokens: [layers][experts], an array, or a tensor where a Scalar would be a tensor.
        statistic: `max`: tokens of the most used expert over the mean, of the layer where it is highest. `entropy`:
            entropy of the experts' shares over its maximum, mean over layers. Both are 1 for an even load.
    """

    tokens: Any
    statistic: Literal["max", "entropy"]

    def merge(self, other: Self) -> Self:
        return replace(self, tokens=self.tokens + other.tokens)

    def value(self) -> float:
        if not self.tokens.any():
            return float("nan")
        shares = self.tokens / self.tokens.sum(1, keepdims=True)
        experts = shares.shape[1]
        if self.statistic == "max":
            return float(shares.max() * experts)
        if experts == 1:
            return 1.0
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        return float(-(shares * logs).sum(1).mean() / math.log(experts))


Counts = tuple[np.ndarray, np.ndarray]  # of a histogram with N bins: counts [N], edges [N+1]
StepMetrics = dict[str, Metric]


@dataclass(frozen=True)
class UpdateOutcome:
    """One optimizer step."""

    module: str  # `critic`, or `learner` for the policy and for a reward model
    taken: bool  # False if it was skipped because a number was not finite
    metrics: StepMetrics


def counts_of(values: Sequence[float] | np.ndarray) -> Counts:
    """The histogram of the finite values; those that are equal, but for rounding, are in the middle of a range."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    rounding = HISTOGRAM_BINS * np.spacing(max(abs(low), abs(high)))  # numpy refuses bins that have no width
    margin = 0.0 if high - low > rounding else max(0.5, rounding)
    return np.histogram(finite, bins=HISTOGRAM_BINS, range=(low - margin, high + margin))


def merge_metrics(parts: list[StepMetrics]) -> StepMetrics:
    """Merge the metrics of several microbatches, ranks or minibatches; a name has the same reduction in all of them."""
    merged: StepMetrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric
    return merged


def merge_outcomes(ranks: Sequence[UpdateOutcome]) -> UpdateOutcome:
    """One optimizer step from what each rank says of it."""
    first = ranks[0]
    assert all(rank.taken == first.taken for rank in ranks), "ranks take and skip the same optimizer steps"
    return UpdateOutcome(first.module, first.taken, merge_metrics([rank.metrics for rank in ranks]))


def mean_over_updates(updates: Sequence[UpdateOutcome]) -> StepMetrics:
    """The metrics of a step from those of its updates; a sum over one update (its loss) becomes a mean over updates."""
    parts = [update.metrics.items() for update in updates]
    return merge_metrics([{n: Mean(m.value(), 1.0) if isinstance(m, Sum) else m for n, m in part} for part in parts])


def to_values(metrics: StepMetrics) -> dict[str, Any]:
    """Reduce to plain numbers. A histogram becomes its mean and four quantiles.

    Non-finite values (a mean over nothing, the norm of a skipped gradient) are dropped: JSON cannot hold them.
    """
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, Binned) or not math.isfinite(value := metric.value()):
            continue
        if isinstance(metric, Histogram):
            quantiles = zip(
                ("min", "p50", "p95", "max"), np.quantile(metric.values, [0.0, 0.5, 0.95, 1.0]), strict=True
            )
            values |= {f"{name}/{key}": number for key, number in (("mean", value), *quantiles)}
        else:
            values[name] = value
    return values


def to_histograms(metrics: StepMetrics) -> dict[str, Counts]:
    """The histograms among the metrics of a step."""
    histograms = {}
    for name, metric in metrics.items():
        if isinstance(metric, Histogram) and metric.values:
            histograms[f"{name}/histogram"] = counts_of(metric.values)
        elif isinstance(metric, Binned) and metric.counts.any():
            histograms[name] = (metric.counts, metric.edges)
    return histograms
