"""Proof that the engines hold the learner's weights: both score the same sequences at temperature 1.

At start-up every tensor is perturbed, because one update at lr 1e-6 is far below the noise of bfloat16: an engine that
silently keeps some old tensor would agree with the learner for many steps. The engines must follow the perturbed
weights, and the true ones are sent back. After that the canary runs after every transfer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.cluster import Cluster
from rlhf.types import Prompt

# Mean |log-prob difference|. Measured at 1M parameters: 2e-5 and 2e-3; a large model in bfloat16 has more noise, so
# the tolerance is the larger of this and NOISE_FACTOR times what the untouched weights show, up to MAX_TOLERANCE.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
MAX_TOLERANCE = 0.1
NOISE_FACTOR = 3.0
SEQUENCES = 8
SEQUENCE_TOKENS = 64
MOVED = 5.0  # the perturbation must move log-probs by this many tolerances, or following it would prove nothing


class Canary:
    """Fixed sequences, judged by the mean absolute log-prob difference between learner and each engine."""

    def __init__(self, prompts: Sequence[Prompt], *, vocabulary: int, dtype: str, max_tokens: int, seed: int) -> None:
        self.tolerance = TOLERANCE[dtype]
        generator = np.random.default_rng([seed, 7])
        length = min(SEQUENCE_TOKENS, max_tokens - 1)
        self.sequences = [_extend(prompt.token_ids, length, vocabulary, generator) for prompt in prompts[:SEQUENCES]]

    async def measure_noise(self, cluster: Cluster) -> None:
        """Learn what two implementations differ by on the same weights: those of model.path, which both have loaded.

        Raises:
            ClusterError: they differ by more than any rounding.
        """
        expected = (await cluster.learners.call("canary", self.sequences))[0]
        seen = await cluster.engines.call("canary", self.sequences)
        noise = max(_difference(expected, logprobs)[0] for logprobs in seen)
        if not noise * NOISE_FACTOR <= MAX_TOLERANCE:
            _, worst = max((_difference(expected, logprobs) for logprobs in seen), key=lambda found: found[0])
            raise ClusterError(
                f"canary: learner and engine disagree on the untouched weights of model.path: mean |log-prob "
                f"difference| {noise:.4g}, at most {MAX_TOLERANCE / NOISE_FACTOR:.2g} is rounding; {worst}. One of "
                "them does not compute this model as it was trained."
            )
        self.tolerance = max(self.tolerance, NOISE_FACTOR * noise)

    async def check_start(self, cluster: Cluster, version: int) -> dict[str, float]:
        """Send perturbed weights, see the engines follow, and send the true ones back.

        Raises:
            ClusterError: an engine does not hold what it was sent.
        """
        true = (await cluster.learners.call("canary", self.sequences))[0]
        await cluster.learners.call("perturb_weights")
        try:
            perturbed = (await cluster.learners.call("canary", self.sequences))[0]
            moved, _ = _difference(true, perturbed)
            if moved < MOVED * self.tolerance:
                raise ClusterError(
                    f"canary: perturbing every weight moved log-probs by {moved:.2g} only, too little against the "
                    f"tolerance of {self.tolerance}. The model's head may be constant; its weights cannot be verified."
                )
            await cluster.send_weights(version)
            seen = await cluster.engines.call("canary", self.sequences)
            self._compare(perturbed, seen, "perturbed weights at start-up")
        finally:
            await cluster.learners.call("restore_weights")
        await cluster.send_weights(version)
        return await self.check(cluster, version)

    async def check(self, cluster: Cluster, version: int) -> dict[str, float]:
        """Compare after a transfer; metrics of the difference.

        Raises:
            ClusterError: naming the worst token and both values.
        """
        (expected, *_), seen = await asyncio.gather(
            cluster.learners.call("canary", self.sequences), cluster.engines.call("canary", self.sequences)
        )
        return {"sync/canary_difference": self._compare(expected, seen, f"weights of version {version}")}

    def _compare(self, expected: list[np.ndarray], by_engine: list[list[np.ndarray]], what: str) -> float:
        largest = 0.0
        for engine, seen in enumerate(by_engine):
            mean, worst = _difference(expected, seen)
            if not mean <= self.tolerance:
                raise ClusterError(
                    f"canary: engine {engine} does not hold the {what}: mean |log-prob difference| {mean:.4g} over "
                    f"{sum(len(s) - 1 for s in expected)} tokens, tolerance {self.tolerance}; {worst}."
                )
            largest = max(largest, mean)
        return largest


def _extend(prompt: np.ndarray, length: int, vocabulary: int, generator: np.random.Generator) -> np.ndarray:
    """A prompt's beginning, then random ids: real text alone leaves rare embeddings untested."""
    start = prompt[: length // 2]
    return np.concatenate([start, generator.integers(0, vocabulary, length - len(start))]).astype(np.int32)


def _difference(learner: Sequence[np.ndarray], engine: Sequence[np.ndarray]) -> tuple[float, str]:
    """Mean absolute difference over all tokens but the first ones, and a sentence that names the worst token."""
    differences = [np.abs(a[1:] - b[1:]) for a, b in zip(learner, engine, strict=True)]
    mean = float(np.concatenate(differences).mean())
    sequence = int(np.argmax([np.nan_to_num(d, nan=np.inf).max() for d in differences]))
    token = int(np.argmax(np.nan_to_num(differences[sequence], nan=np.inf))) + 1
    return mean, (
        f"worst at token {token} of sequence {sequence}: learner {learner[sequence][token]:.6f}, "
        f"engine {engine[sequence][token]:.6f}"
    )
