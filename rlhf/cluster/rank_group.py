"""The driver's handle of a trained role (policy or critic): calls of all its ranks, and their checkpoints.

Every rank writes its own part of a checkpoint while the run goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlhf.cluster.actors import ActorGroup, ClusterError, Hosted, put
from rlhf.config.roles import LEARNER
from rlhf.log.reductions import StepMetrics, UpdateOutcome, merge_metrics, merge_outcomes
from rlhf.types import Minibatch, PackedTokens, PolicyTargets, StepBatch, ValueTargets, WrittenFile

if TYPE_CHECKING:
    from rlhf.learner.rank import TrainedRank
    from rlhf.learner.step import StepRank
    from rlhf.learner.supervised import SupervisedRank

T = TypeVar("T")

FIRST_POLL_S, LAST_POLL_S = 0.05, 2.0  # seconds between two checks whether the ranks have written their files


class RankGroup(ActorGroup[Hosted]):
    """The ranks of one module. `start_step` comes first in every step; rows and tokens are numbered as in its batch.

    The ranks of a data shard compute the same columns and metrics, so only the first of them is read. Their seconds
    are its own: the others exchange with it in every layer, so that none is far ahead.
    """

    shared: np.ndarray  # [S] int64, shard after shard: leading tokens that each sequence shares with the previous one
    _tokens: PackedTokens

    def __init__(self, name: str, actors: list[Any], *, deadline_s: float, ranks_per_shard: int = 1) -> None:
        super().__init__(name, actors, deadline_s=deadline_s)
        self._ranks_per_shard = ranks_per_shard
        self._epochs: Sequence[Sequence[Minibatch]] = ()

    @property
    def update_deadline_s(self) -> float:
        """The deadline of a call that may have to wait for an update; `step_deadline_s` bounds one pass."""
        return self.deadline_s * (1 + len(self._epochs))

    async def start_step(self: RankGroup[StepRank], batch: StepBatch, epochs: Sequence[Sequence[Minibatch]]) -> None:
        """Send the tokens of a step and its minibatches; the ranks keep them until the next step."""
        self._tokens, self._epochs = batch.tokens, epochs
        self.shared = np.concatenate(await self.by_shard(lambda rank: rank.start_step(put(batch.tokens), put(epochs))))

    async def by_shard(self, ask: Callable[[Hosted], T], **options: Any) -> list[T]:
        """Call all ranks; -> the answer of one rank of each data shard."""
        return (await self.call(ask, **options))[:: self._ranks_per_shard]

    async def compute(self, ask: Callable[[Hosted], Sequence[np.ndarray | None]]) -> list[np.ndarray | None]:
        """Columns [N] float32 of the step, which `ask` computes on the microbatches of the first epoch.

        Rows that are not computed are 0. A column is None if the ranks return None for it.
        """
        by_shard = await self.by_shard(ask)
        return [None if parts[0] is None else self._column(parts) for parts in zip(*by_shard, strict=True)]

    def _column(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """[N] float32 of the step, from the outputs of each data shard, row after row."""
        column = np.zeros(len(self._tokens.token_ids), np.float32)
        for shard, part in enumerate(parts):
            column[self._tokens.token_indices(rows_of_shard(self._epochs[:1], shard))] = part
        return column

    async def update(self: RankGroup[StepRank], targets: PolicyTargets | ValueTargets) -> list[UpdateOutcome]:
        """Run every optimizer step of the training step; metrics are merged over all data shards."""
        by_shard = await self.by_shard(lambda rank: rank.update(put(targets)), deadline_s=self.update_deadline_s)
        return [merge_outcomes(outcomes) for outcomes in zip(*by_shard, strict=True)]

    async def hold(self: RankGroup[Any], train: PackedTokens, held_out: PackedTokens | None) -> None:
        """Send all examples to the ranks of a supervised training."""
        ranks: RankGroup[SupervisedRank] = self
        await ranks.call(lambda rank: rank.hold(put(train), put(held_out)))

    async def train(self: RankGroup[Any], step: int) -> UpdateOutcome:
        """Take optimizer step number `step`, from 0, of a supervised training; metrics are merged over data shards."""
        ranks: RankGroup[SupervisedRank] = self
        return merge_outcomes(await ranks.by_shard(lambda rank: rank.train(step)))

    async def evaluate(self: RankGroup[Any], part: int) -> StepMetrics | None:
        """The metrics of a part of the held-out examples over all data shards; None after the last part."""
        ranks: RankGroup[SupervisedRank] = self
        parts = await ranks.by_shard(lambda rank: rank.evaluate(part))
        return merge_metrics([metrics for metrics in parts if metrics is not None]) if parts[0] is not None else None

    async def skip_updates(self: RankGroup[TrainedRank]) -> list[UpdateOutcome]:
        """Count every optimizer step of the training step as skipped, on all ranks."""
        by_shard = await self.by_shard(lambda rank: rank.skip_updates(sum(map(len, self._epochs))))
        return [merge_outcomes(outcomes) for outcomes in zip(*by_shard, strict=True)]


def rows_of_shard(epochs: Sequence[Sequence[Minibatch]], shard: int) -> np.ndarray:
    """[S] int64, the rows that a data shard computes, in its order."""
    rows = [rows for epoch in epochs for minibatch in epoch for rows in minibatch.microbatches[shard]]
    return np.concatenate([np.zeros(0, np.int64), *rows])


class RoleCheckpoints:
    """Saves all trained roles, one save at a time; `trained` returns the ranks of each role by its name."""

    def __init__(self, trained: Callable[[], Mapping[str, RankGroup[TrainedRank]]]) -> None:
        self._trained = trained
        self._saving = Path()

    async def bytes(self) -> int:
        """Bytes that `save` will write, over all ranks."""
        by_role = [await ranks.call(lambda rank: rank.checkpoint_bytes()) for ranks in self._trained().values()]
        return sum(map(sum, by_role))

    async def save(self, folder: Path) -> None:
        """Begin to write weights and optimizer state of every trained role; `finish_save` waits for the end."""
        self._saving = folder
        for name, ranks in self._trained().items():
            part = folder_of(name, folder)
            part.mkdir(exist_ok=True)
            await ranks.call(lambda rank: rank.save(str(part)))  # noqa: B023

    async def finish_save(self) -> dict[str, WrittenFile]:
        """Wait until every rank has written its files.

        Returns:
            The files by path in the folder.

        Raises:
            OSError: the first rank's error from its disk; no rank is writing any more.
            ClusterError: the deadline of an update has passed, for example on a file system that hangs.
        """
        files: dict[str, WrittenFile] = {}
        errors, wait_s, began = [], FIRST_POLL_S, time.monotonic()
        for name, ranks in self._trained().items():
            deadline_s = ranks.update_deadline_s
            while True:
                reports = await ranks.call(lambda rank: rank.save_report(), deadline_s=deadline_s)
                if None not in reports:
                    break
                if time.monotonic() - began > deadline_s:
                    raise ClusterError(f"{self._saving}: not written within {deadline_s:.0f} s. Check its disk.")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_POLL_S)
            below = folder_of(name, self._saving).relative_to(self._saving.resolve())
            for report in filter(None, reports):
                files |= {(below / file).as_posix(): written for file, written in report.files.items()}
                errors += [report.error] if report.error else []
        if errors:
            raise OSError(errors[0])
        return files


def folder_of(role: str, checkpoint: Path) -> Path:
    """The folder of a role's files: the checkpoint itself for the policy, else a folder in it with the role's name."""
    return checkpoint.resolve() if role == LEARNER else checkpoint.resolve() / role
