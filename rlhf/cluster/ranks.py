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
        found: list[np.ndarray | None] = []
        for parts in zip(*by_rank, strict=True):
            column = None if parts[0] is None else np.zeros(len(self._tokens.token_ids), np.float32)
            if column is not None:
                for rank, part in enumerate(parts):
                    column[self._tokens.token_indices(rows_of_rank(self._epochs[:1], rank))] = part
            found.append(column)
        return found

    async def update(self, targets: PolicyTargets | ValueTargets) -> list[StepMetrics]:
        """Every optimizer step of the step; the metrics of each, over all ranks."""
        by_rank = await self.call("update", ray.put(targets))
        return [merge_metrics(list(parts)) for parts in zip(*by_rank, strict=True)]


def rows_of_rank(epochs: Sequence[Sequence[Minibatch]], rank: int) -> np.ndarray:
    """[S] int64, the rows that a rank computes, in its order."""
    rows = [rows for epoch in epochs for minibatch in epoch for rows in minibatch.microbatches[rank]]
    return np.concatenate([np.zeros(0, np.int64), *rows])
