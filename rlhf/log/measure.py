"""What is measured of a step: seconds by phase, who waited, the learners' speed, what rollouts say of themselves."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlhf.algo.packing import FILLER_TOKENS
from rlhf.config.run import GRPOConfig
from rlhf.data.model_files import local_model_config
from rlhf.log.metrics import Histogram, Max, Mean, StepMetrics
from rlhf.plan.model import SUPPORTED, ModelShape, model_shape
from rlhf.types import Minibatch, RolloutGroup, ScoredRollout, StepBatch


class Clock:
    """Seconds by phase, of the whole run (a resumed one goes on counting) and since the last step was logged."""

    def __init__(self, spent: Mapping[str, float]) -> None:
        self.total: dict[str, float] = defaultdict(float, spent)
        self.step: dict[str, float] = {}
        self._step_started = self._window_started = time.monotonic()

    def start_window(self) -> None:
        """Waiting is counted from here on: nothing could be waited for before everything was up."""
        self._window_started = time.monotonic()

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

    def take(self) -> tuple[dict[str, float], float]:
        """Seconds by phase and seconds in all since the last call; evaluation and checkpoint are part of them."""
        now = time.monotonic()
        phases, window_s = self.step, now - self._window_started
        self.step, self._window_started = {}, now
        return phases, window_s


LEARNER_PHASES = ("logprobs", "update", "transfer", "canary", "checkpoint")


def waiting_seconds(phases: Mapping[str, float], window_s: float, engines_busy_s: float) -> dict[str, float]:
    """Who waited for whom: seconds in which no request was with any engine, and in which the learners had no work."""
    learners_busy_s = sum(phases.get(phase, 0.0) for phase in LEARNER_PHASES)
    return {
        "time/engine_idle": max(0.0, window_s - engines_busy_s),
        "time/learner_idle": max(0.0, window_s - learners_busy_s),
    }


# Dense bf16 TFLOP/s by the name of the device, from NVIDIA's data sheets; the first entry whose words the name has.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 6000 Ada": 364.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}


def peak_tflops(device_name: str) -> float | None:
    """Of a device by the name that its driver gives, such as `NVIDIA H100 80GB HBM3` or `NVIDIA A100-SXM4-80GB`."""
    words = set(device_name.replace("-", " ").split())
    return next((peak for name, peak in PEAK_TFLOPS.items() if words.issuperset(name.split())), None)


class LearnerSpeed:
    """Speed of the learners and how well their microbatches are filled, from what they were given to compute."""

    def __init__(self, config: GRPOConfig, device_name: str) -> None:
        self._budget = config.learner.max_tokens_per_microbatch
        self._learners = config.cluster.learners
        self._peak_tflops = config.cluster.peak_tflops or peak_tflops(device_name)
        self._shape: ModelShape | None = None
        described = local_model_config(config.model.path)
        if described is not None and described.get("model_type") in SUPPORTED:
            self._shape = model_shape(described)

    def of_step(
        self, batch: StepBatch, epochs: Sequence[Sequence[Minibatch]], shared: np.ndarray, update_s: float
    ) -> dict[str, float]:
        """Metrics of one step's updates; none where the policy took none, as while a critic warms up.

        learner/mfu, the share of the learners' peak that forward and backward of the computed tokens take, is left out
        where the peak or the model's shape is not known; a critic next to the policy is not counted.
        learner/shared_fraction is the share of the tokens that were computed as the beginning of another sequence.
        learner/padding_fraction is the share of computed positions that belong to no rollout: a packed row has none,
        fillers are nothing else.

        Args:
            shared: [S] of each sequence, in the order of the ranks' work: tokens computed with the sequence before.
        """
        if not epochs:
            return {}
        microbatches = [
            rows
            for rank in range(self._learners)
            for epoch in epochs
            for minibatch in epoch
            for rows in minibatch.microbatches[rank]
        ]
        rows = np.concatenate(microbatches)
        lengths = batch.tokens.lengths[rows]
        tokens = int(lengths.sum())
        computed = tokens - int(shared.sum())
        fillers = FILLER_TOKENS * sum(not len(rows) for rows in microbatches)
        update_s = max(update_s, 1e-9)
        values = {
            "learner/tokens_per_second": tokens / update_s,
            "learner/packing_efficiency": computed / (self._budget * len(microbatches)),
            "learner/padding_fraction": fillers / (computed + fillers),
            "learner/shared_fraction": 1 - computed / max(tokens, 1),
        }
        if self._shape is not None and self._peak_tflops is not None:
            responses = int(batch.response_lengths[rows].sum())
            flops = self._shape.training_flops(lengths.tolist(), responses, shared.tolist())
            values["learner/mfu"] = flops / (update_s * self._peak_tflops * 1e12 * self._learners)
        return values


def rollout_metrics(groups: Sequence[RolloutGroup], advantages: np.ndarray, *, step: int) -> StepMetrics:
    """What the rollouts of a step say of themselves, before any update."""
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
        "rollout/lag_max": Max(float(max(step - group.oldest_version for group in groups))),
        "rollout/lag": Histogram(tuple(float(step - s.rollout.oldest_version) for s in samples)),
        "policy/advantage_abs": Mean(float(np.abs(advantages).sum()), float(len(advantages))),
    }
    metrics |= _lag_of_tokens(samples, step)
    for name in dict.fromkeys(name for sample in samples for name in sample.reward_parts):
        values = [s.reward_parts.get(name) for s in samples]
        known = [v for v in values if v is not None]
        metrics[f"reward/part/{name}"] = Mean(float(sum(known)), float(len(known)))
    return metrics


def _lag_of_tokens(samples: Sequence[ScoredRollout], step: int) -> StepMetrics:
    """rollout/tokens_at_lag/L: the share of the sampled tokens whose weights were L training steps behind."""
    tokens: dict[int, int] = defaultdict(int)
    for sample in samples:
        for span in sample.rollout.version_spans:
            tokens[step - span.version] += span.end - span.start
    total = float(sum(tokens.values()))
    return {f"rollout/tokens_at_lag/{lag}": Mean(float(count), total) for lag, count in sorted(tokens.items())}
