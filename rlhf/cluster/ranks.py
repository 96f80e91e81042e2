"""The ranks of one trained module, policy or critic, as the loop sees them: columns out of a step, updates into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ray

from rlhf.cluster.actors import ActorGroup
from rlhf.log.metrics import StepMetrics, merge_metrics
from rlhf.types import Minibatch, PackedTokens, PolicyTargets, StepBatch, ValueTargets


class RankGroup(ActorGroup):
    """Every rank is sent the step once; rows and columns are numbered as in its batch.

    Attributes:
        shared: [S] int64 of all sequences of the step, rank after rank: the first tokens that are computed with the
            sequence before.
    """

    shared: np.ndarray
    _tokens: PackedTokens
    _epochs: Sequence[Sequence[Minibatch]]

    async def start_step(self, batch: StepBatch, epochs: Sequence[Sequence[Minibatch]]) -> None:
        """Send the tokens of a step and its minibatches; the ranks keep them until the next step."""
        self._tokens, self._epochs = batch.tokens, epochs
        self.shared = np.concatenate(await self.call("start_step", ray.put(batch.tokens), ray.put(epochs)))

    async def columns(self, method: str) -> list[np.ndarray | None]:
        """What `method` computes on the microbatches of the first epoch, as columns [N] float32 of the step.

        0 at rows that are not computed; None where the ranks return None.
        """
        by_rank = await self.call(method)
        return [None if parts[0] is None else self._column(parts) for parts in zip(*by_rank, strict=True)]

    def _column(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[N] float32 of the step from what each rank computed, its rows one after another."""
        column, bounds = np.zeros(len(self._tokens.token_ids), np.float32), self._tokens.cu_seqlens.tolist()
        for rank, part in enumerate(parts):
            filled = 0
            for row in rows_of_rank(self._epochs[:1], rank).tolist():
                start, end = bounds[row], bounds[row + 1]
                column[start:end] = part[filled : filled + end - start]
                filled += end - start
            assert filled == len(part)
        return column

    async def update(self, targets: PolicyTargets | ValueTargets) -> list[StepMetrics]:
        """Every optimizer step of the step; the metrics of each, over all ranks."""
        by_rank = await self.call("update", ray.put(targets))
        return [merge_metrics(list(parts)) for parts in zip(*by_rank, strict=True)]


def rows_of_rank(epochs: Sequence[Sequence[Minibatch]], rank: int) -> np.ndarray:
    """[S] int64, the rows that a rank computes, in its order."""
    rows = [rows for epoch in epochs for minibatch in epoch for rows in minibatch.microbatches[rank]]
    return np.concatenate([np.zeros(0, np.int64), *rows])
