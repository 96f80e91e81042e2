"""The driver's handle of one trained module, policy or critic: sends a step to all ranks and merges their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from rlhf.cluster.actors import ActorGroup
from rlhf.log.reductions import StepMetrics, UpdateOutcome, merge_metrics, merge_outcomes
from rlhf.types import Minibatch, PackedTokens, PolicyTargets, StepBatch, ValueTargets


class RankGroup(ActorGroup):
    """The ranks of one module. `start_step` comes first in every step; rows and tokens are numbered as in its batch.

    Attributes:
        changed: whether an update began since the engines were sent the weights.
        shared: [S] int64, rank after rank: the leading tokens of each sequence that are shared with the previous one.
    """

    changed = False
    shared: np.ndarray
    _tokens: PackedTokens
    _epochs: Sequence[Sequence[Minibatch]] = ()

    @property
    def update_deadline_s(self) -> float:
        """For calls that ranks may answer only after an update; `step_deadline_s` bounds one pass over the rollouts."""
        return self.deadline_s * (1 + len(self._epochs))

    async def start_step(self, batch: StepBatch, epochs: Sequence[Sequence[Minibatch]]) -> None:
        """Send the tokens of a step and its minibatches; the ranks keep them until the next step."""
        self._tokens, self._epochs = batch.tokens, epochs
        self.shared = np.concatenate(await self.call("start_step", ray.put(batch.tokens), ray.put(epochs)))

    async def compute(self, method: str, *arguments: Any) -> list[np.ndarray | None]:
        """Columns [N] float32 of the step, as `method` computes them on the microbatches of the first epoch.

        Rows that are not computed are 0. A column is None if the ranks return None for it.
        """
        by_rank = await self.call(method, *arguments)
        return [None if parts[0] is None else self._column(parts) for parts in zip(*by_rank, strict=True)]

    def _column(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[N] float32 of the step, from the outputs of each rank, row after row."""
        column, bounds = np.zeros(len(self._tokens.token_ids), np.float32), self._tokens.cu_seqlens.tolist()
        for rank, part in enumerate(parts):
            read = 0
            for row in rows_of_rank(self._epochs[:1], rank).tolist():
                start, end = bounds[row], bounds[row + 1]
                column[start:end] = part[read : read + end - start]
                read += end - start
            assert read == len(part)
        return column

    async def update(self, targets: PolicyTargets | ValueTargets) -> list[UpdateOutcome]:
        """Run every optimizer step of the training step; metrics are merged over all ranks."""
        self.changed = True
        by_rank = await self.call("update", ray.put(targets), deadline_s=self.update_deadline_s)
        return [merge_outcomes(ranks) for ranks in zip(*by_rank, strict=True)]

    async def hold(self, train: PackedTokens, held_out: PackedTokens | None) -> None:
        """Send all examples to the ranks of a supervised training."""
        await self.call("hold", ray.put(train), ray.put(held_out))

    async def train(self, step: int) -> UpdateOutcome:
        """The optimizer step of a supervised training after `step` others; metrics are merged over all ranks."""
        return merge_outcomes(await self.call("train", step))

    async def evaluate(self) -> StepMetrics:
        """The metrics of the held-out examples over all ranks."""
        return merge_metrics(await self.call("evaluate"))

    async def skip_updates(self) -> list[UpdateOutcome]:
        """Count every optimizer step of the training step as skipped, on all ranks."""
        by_rank = await self.call("skip_updates", sum(map(len, self._epochs)))
        return [merge_outcomes(ranks) for ranks in zip(*by_rank, strict=True)]


def rows_of_rank(epochs: Sequence[Sequence[Minibatch]], rank: int) -> np.ndarray:
    """[S] int64, the rows that a rank computes, in its order."""
    rows = [rows for epoch in epochs for minibatch in epoch for rows in minibatch.microbatches[rank]]
    return np.concatenate([np.zeros(0, np.int64), *rows])
