"""The dataclasses that flow through a step, each stage with its own type, and the reductions that metrics carry.

    Prompt --sample--> Rollout --score--> ScoredRollout --gather--> RolloutGroup
           --pack--> PackedTokens, in a Minibatch --targets--> PolicyTargets --update--> StepMetrics

Arrays are numpy: they cross process boundaries without torch. `x[t]` describes token t everywhere, so that
`rollout_logprobs[t]` is the log-probability with which token t itself was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of a data set, tokenized once; `token_ids` [P] int32 is what the engines are given."""

    id: str
    epoch: int
    token_ids: np.ndarray
    messages: tuple[dict[str, str], ...]
    answer: str
    source: str
    columns: dict[str, Any] = field(default_factory=dict)


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a rollout were sampled with the weights of this version (completed training steps)."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Rollout:
    """One sampled response with its prompt, id for id as the engine saw and sampled it.

    Attributes:
        token_ids: [L] int32, prompt and response.
        response_mask: [L] bool, True where the policy sampled the token; may have holes.
        rollout_logprobs: [L] float32, what the engine reported at sampling; 0 outside the mask.
        version_spans: cover the tokens of the mask, in order.
        finish_reason: `stop` (an end-of-sequence id or a stop string), `length`, or `abort`.
    """

    prompt_id: str
    epoch: int
    sample: int
    token_ids: np.ndarray
    response_mask: np.ndarray
    rollout_logprobs: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str

    @property
    def response_length(self) -> int:
        return int(self.response_mask.sum())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one; all of them where none was sampled."""
        return int(np.argmax(self.response_mask)) if self.response_mask.any() else len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True)
class ScoredRollout:
    """A graded rollout; `reward` None means that it could not be scored and takes no part in baseline or loss.

    Attributes:
        text: the decoded response. extracted: the answer that was graded, "" if none was found.
        reward_parts: value of every part of the reward by name, before its weight.
        status: of the grading, `ok` where nothing is to be said.
    """

    rollout: Rollout
    text: str
    extracted: str
    reward: float | None
    reward_parts: dict[str, float | None]
    status: str


@dataclass(frozen=True)
class RolloutGroup:
    """The G samples of one prompt, in sample order; never mixed with another prompt's, never silently smaller."""

    prompt: Prompt
    samples: tuple[ScoredRollout, ...]

    @property
    def oldest_version(self) -> int:
        return min(sample.rollout.oldest_version for sample in self.samples)


@dataclass(frozen=True)
class PackedTokens:
    """Several sequences in one row without padding: one microbatch of one learner.

    A sequence that begins like the one before it is computed from where they differ, so their order matters for speed.

    Attributes:
        token_ids, position_ids: [T] int32; positions restart at every sequence.
        response_mask: [T] bool, True at the tokens that are trained.
        rollout_logprobs: [T] float32.
        cu_seqlens: [S+1] int32; sequence s is rows cu_seqlens[s] to cu_seqlens[s+1].
        rows: [S] int32, which rollout of the step each sequence is; -1 for a filler that only keeps ranks in step.
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    response_mask: np.ndarray
    rollout_logprobs: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class PolicyTargets:
    """What the policy loss needs beside the tokens; all [T] float32, 0 where no rollout token stands."""

    advantages: np.ndarray
    old_logprobs: np.ndarray
    ref_logprobs: np.ndarray


@dataclass(frozen=True)
class ValueTargets:
    """What the value loss needs beside the tokens; both [T] float32."""

    old_values: np.ndarray
    returns: np.ndarray


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole minibatch over all ranks, fixed before the first backward.

    `tokens` counts trained response tokens, `sequences` the responses that have any.
    """

    tokens: int
    sequences: int


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step: microbatches[rank] are that learner's, equally many for each, and the global denominators."""

    microbatches: tuple[tuple[PackedTokens, ...], ...]
    denominators: Denominators


# --- metrics: a value that knows how to combine with the same metric of another microbatch, rank or minibatch ---


@dataclass(frozen=True)
class Mean:
    """Weighted mean: `total` over `weight`; the mean of no weight at all is NaN and is left out of the log."""

    total: float
    weight: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        return self.total / self.weight if self.weight else float("nan")


@dataclass(frozen=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True)
class Max:
    maximum: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.maximum, other.maximum))

    def value(self) -> float:
        return self.maximum


@dataclass(frozen=True)
class Last:
    """The newest value wins, as of a learning rate or a counter."""

    newest: float

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float:
        return self.newest


@dataclass(frozen=True)
class EffectiveSampleFraction:
    """Kish's effective sample size over n, (sum w)^2 / (n sum w^2), of importance ratios w."""

    samples: float
    ratio_sum: float
    ratio_square_sum: float

    def merge(self, other: EffectiveSampleFraction) -> EffectiveSampleFraction:
        return EffectiveSampleFraction(
            self.samples + other.samples,
            self.ratio_sum + other.ratio_sum,
            self.ratio_square_sum + other.ratio_square_sum,
        )

    def value(self) -> float:
        return self.ratio_sum**2 / (self.samples * self.ratio_square_sum) if self.samples else float("nan")


@dataclass(frozen=True)
class Histogram:
    """The values themselves; `value` is their mean, sinks that can draw a distribution use `values`."""

    values: tuple[float, ...]

    def merge(self, other: Histogram) -> Histogram:
        return Histogram(self.values + other.values)

    def value(self) -> float:
        return float(np.mean(self.values)) if self.values else float("nan")


Metric = Mean | Sum | Max | Last | EffectiveSampleFraction | Histogram
StepMetrics = dict[str, Metric]


def merge_metrics(parts: list[StepMetrics]) -> StepMetrics:
    """Combine the metrics of several microbatches, ranks or minibatches; each name keeps one kind of reduction."""
    merged: StepMetrics = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name].merge(metric) if name in merged else metric  # type: ignore[arg-type]
    return merged
