"""Columns into the ranks of a step and back, over real ranks in this process: no Ray, no DeepSpeed engine.

Arrays arrive as Ray delivers them: read-only.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from worlds import make_config, make_groups, rows_of_minibatch

from rlhf.algo.packing import shared_beginnings
from rlhf.cluster import rank_group
from rlhf.cluster.rank_group import RankGroup
from rlhf.learner.step import StepRank
from rlhf.log.reductions import StepMetrics, Sum, UpdateOutcome, merge_metrics
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import Minibatch, PolicyTargets, StepBatch, World

M = TypeVar("M")

pytestmark = pytest.mark.filterwarnings("error:The given NumPy array is not writable")

LEARNERS = 3  # data shards; in turn each is one rank, and two


def delivered(value: Any) -> Any:
    """A copy whose arrays are read-only views of a buffer, as of Ray's object store."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


class Rank(StepRank):
    """Its outputs are the token ids; `update` checks that the advantages of its microbatch are the ids, too."""

    _group = None

    def __init__(self, rank: int, ranks_per_shard: int) -> None:
        size = LEARNERS * ranks_per_shard
        self.world = World(rank, size, rank, "nowhere", 0, threads=1, sequence_parallel=ranks_per_shard)
        self.device = torch.device("cpu")

    def token_ids(self) -> tuple[np.ndarray, None]:
        return self.run_passes(lambda tokens: tokens.token_ids), None

    def update(self, targets: PolicyTargets) -> list[UpdateOutcome]:
        def loss(tokens: Any, own: PolicyTargets, denominators: Any) -> tuple[torch.Tensor, StepMetrics]:
            mask = tokens.response_mask
            ids = tokens.token_ids[mask]
            assert own.advantages[mask.numpy()].tolist() == ids.tolist()
            return torch.zeros(()), {"ids": Sum(float(ids.sum())), "tokens": Sum(float(mask.sum()))}

        return self.run_updates(targets, loss)

    def take_step(
        self, microbatches: Sequence[M], forward: Callable[[M], tuple[torch.Tensor, StepMetrics]]
    ) -> UpdateOutcome:
        return UpdateOutcome("learner", True, merge_metrics([forward(microbatch)[1] for microbatch in microbatches]))


class LocalRanks(RankGroup):
    def __init__(self, ranks_per_shard: int) -> None:
        super().__init__("learner", [], deadline_s=1.0, ranks_per_shard=ranks_per_shard)
        self._ranks = [Rank(rank, ranks_per_shard) for rank in range(LEARNERS * ranks_per_shard)]

    async def call(self, ask: Callable[[Any], Any], *, deadline_s: float | None = None) -> list[Any]:
        return [delivered(ask(rank)) for rank in self._ranks]


@pytest.fixture(params=[1, 2], ids=["one rank per shard", "two ranks per shard"])
def started(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[LocalRanks, StepBatch, list[list[Minibatch]], np.ndarray]:
    """Two epochs of two minibatches; three of the 12 rollouts are not computed, and some ranks get fillers."""
    monkeypatch.setattr(rank_group, "put", delivered)
    config = make_config(
        Path("nowhere/model"),
        data={"max_prompt_tokens": 12},
        rollout={"max_response_tokens": 40},
        learner={"epochs_per_step": 2, "minibatches_per_epoch": 2, "max_tokens_per_microbatch": 64 // request.param},
        cluster={"device": "cpu", "learners": LEARNERS * request.param, "sequence_parallel": request.param},
    )
    batch = make_batch(make_groups(groups=2, samples=6, vocabulary=99, longest=40, seed=1), mask_truncated=False)
    computed = np.arange(12) >= 3
    epochs = plan_epochs(batch, config, step=0, rows_to_compute=computed)
    assert any(not len(rows) for minibatch in epochs[0] for shard in minibatch.microbatches for rows in shard)
    group = LocalRanks(request.param)
    asyncio.run(group.start_step(batch, epochs))
    return group, batch, epochs, computed


def test_columns_hold_what_the_ranks_computed_at_the_tokens_they_computed_it_for(started: Any) -> None:
    group, batch, _, computed = started
    ids, nothing = asyncio.run(group.compute(lambda rank: rank.token_ids()))
    assert nothing is None
    np.testing.assert_array_equal(ids, np.where(np.repeat(computed, batch.tokens.lengths), batch.tokens.token_ids, 0))


def test_every_update_trains_its_minibatch_with_the_targets_of_its_own_tokens_on_some_rank_once(started: Any) -> None:
    group, batch, epochs, _ = started
    targets = PolicyTargets(batch.tokens.token_ids.astype(np.float32), None, None)
    updates = asyncio.run(group.update(targets))
    minibatches = [minibatch for epoch in epochs for minibatch in epoch]
    assert len(updates) == len(minibatches) == 4
    for update, minibatch in zip(updates, minibatches, strict=True):
        tokens = batch.tokens.take(np.array(rows_of_minibatch(minibatch)))
        assert update.metrics["ids"].value() == tokens.token_ids[tokens.response_mask].sum()
        assert update.metrics["tokens"].value() == tokens.response_mask.sum()


def test_shared_counts_the_common_beginning_of_every_sequence_shard_after_shard(started: Any) -> None:
    group, batch, epochs, _ = started
    expected = [
        shared_beginnings(batch.tokens.take(rows)).tolist()
        for shard in range(LEARNERS)
        for epoch in epochs
        for minibatch in epoch
        for rows in minibatch.microbatches[shard]
        if len(rows)
    ]
    assert group.shared.tolist() == list(itertools.chain(*expected))
    assert group.shared.any()
