"""How fast the learners compute, and how well their microbatches are filled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf.algo.packing import FILLER_TOKENS
from rlhf.check.model_shape import shape_at
from rlhf.config.cards import peak_tflops
from rlhf.config.grpo import GRPOConfig
from rlhf.types import Minibatch, StepBatch


class LearnerSpeed:
    """Metrics of the learners' speed and of how full their microbatches are."""

    def __init__(self, config: GRPOConfig, device_name: str) -> None:
        self._budget, self._cluster = config.row_tokens, config.cluster
        self._peak_tflops = config.cluster.peak_tflops or peak_tflops(device_name)
        self._shape, self._frozen = shape_at(config.model.path), config.model.lora is not None

    def step_metrics(
        self, batch: StepBatch, epochs: Sequence[Sequence[Minibatch]], shared: np.ndarray, update_s: float
    ) -> dict[str, float]:
        """Metrics of the policy's updates in one step; empty without updates, for example while a critic warms up.

        learner/mfu: forward and backward FLOPs of the computed tokens, divided by the peak of the learners. Not logged
            if the peak or the shape of the model is unknown. A critic is not counted.
        learner/shared_fraction: share of tokens that were not computed, because the previous sequence begins the same.
        learner/padding_fraction: share of computed positions that belong to no rollout: those of fillers. The few by
            which learners round up their equal parts of a row are not counted.

        Args:
            shared: [S] how many first tokens of each sequence were computed with the previous one, in the order in
                which the data shards compute.
            update_s: seconds that the updates took.
        """
        if not epochs:
            return {}
        minibatches = [minibatch for epoch in epochs for minibatch in epoch]
        shards = range(self._cluster.data_shards)
        microbatches = [rows for x in shards for minibatch in minibatches for rows in minibatch.microbatches[x]]
        rows = np.concatenate(microbatches)
        lengths = batch.tokens.lengths[rows]
        tokens = int(lengths.sum())
        computed = tokens - int(shared.sum())
        fillers, update_s = FILLER_TOKENS * sum(not len(rows) for rows in microbatches), max(update_s, 1e-9)
        values = {
            "learner/tokens_per_second": tokens / update_s,
            "learner/packing_efficiency": computed / (self._budget * len(microbatches)),
            "learner/padding_fraction": fillers / (computed + fillers),
            "learner/shared_fraction": 1 - computed / max(tokens, 1),
        }
        if self._shape is not None and self._peak_tflops is not None:
            responses = int(batch.response_lengths[rows].sum())
            flops = self._shape.training_flops(lengths.tolist(), responses, shared.tolist(), frozen=self._frozen)
            values["learner/mfu"] = flops / (update_s * self._peak_tflops * 1e12 * self._cluster.learners)
        return values
