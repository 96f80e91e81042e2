"""One rank's part of a step, for policy and critic: `start_step`, then `run_passes`, then `run_updates`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf.algo.packing import FILLER_TOKENS, filler
from rlhf.learner.policy_model import DeviceTokens
from rlhf.learner.rank import TrainedRank
from rlhf.log.reductions import StepMetrics, UpdateOutcome
from rlhf.types import Denominators, Minibatch, PackedTokens, Targets

T = TypeVar("T", bound=Targets)


@dataclass(frozen=True)
class HeldMicrobatch:
    """A microbatch on the device. A filler has no token of the step; its response mask is False everywhere."""

    tokens: DeviceTokens
    index: np.ndarray  # [T] positions of its tokens in the step; of a filler: 0
    is_filler: bool
    denominators: Denominators  # of its minibatch


def make_microbatches(
    tokens: PackedTokens, minibatch: Minibatch, put: Callable[[PackedTokens], DeviceTokens], *, shard: int
) -> list[HeldMicrobatch]:
    """A data shard's microbatches of a minibatch of these sequences, on the device of a rank; `put` moves them."""
    # a loss of the user gets a row of the data for a filler too
    nothing = replace(filler(), prompt_rows=tokens.prompt_rows and tokens.prompt_rows[:1])

    def microbatch(rows: np.ndarray) -> HeldMicrobatch:
        packed = tokens.take(rows) if len(rows) else nothing
        index = tokens.token_indices(rows) if len(rows) else np.zeros(FILLER_TOKENS, np.int64)
        return HeldMicrobatch(put(packed), index, not len(rows), minibatch.denominators)

    return [microbatch(rows) for rows in minibatch.microbatches[shard]]


class StepRank(TrainedRank):
    """One rank of a module that learns from the rollouts of a step."""

    _epochs: list[list[list[HeldMicrobatch]]]  # by epoch and minibatch

    def start_step(self, tokens: PackedTokens, epochs: Sequence[Sequence[Minibatch]]) -> np.ndarray:
        """Keep this rank's microbatches of a step. `tokens` holds the tokens of all rollouts.

        Returns [S] int64, epoch after epoch: how many leading tokens each sequence shares with the previous one.
        """
        self._epochs = []  # first frees the memory of the previous step's microbatches
        put, shard = self.put, self.world.shard
        self._epochs = [[make_microbatches(tokens, x, put, shard=shard) for x in epoch] for epoch in epochs]
        held = [x for epoch in self._epochs for minibatch in epoch for x in minibatch if not x.is_filler]
        return np.concatenate([np.zeros(0, np.int64), *(x.tokens.segments.shared for x in held)])

    @torch.no_grad()
    def run_passes(self, forward: Callable[[DeviceTokens], Tensor]) -> np.ndarray:
        """float32 [T'], the output of `forward` at the tokens of the first epoch, microbatch after microbatch.

        Fillers are computed so that all ranks make the same calls; the result has no entries for them.
        """
        epoch = itertools.chain.from_iterable(self._epochs[0])
        outputs = [forward(held.tokens).float().cpu().numpy()[: 0 if held.is_filler else None] for held in epoch]
        return np.concatenate([np.zeros(0, np.float32), *outputs])

    def update(self, targets: Any) -> list[UpdateOutcome]:
        """One optimizer step for each minibatch of every epoch; each role has targets of its own type."""
        raise NotImplementedError

    def run_updates(
        self, targets: T, loss: Callable[[DeviceTokens, T, Denominators], tuple[Tensor, StepMetrics]]
    ) -> list[UpdateOutcome]:
        """One optimizer step for each minibatch of every epoch; `loss` gets a microbatch's part of the columns [N]."""

        def forward(held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
            return loss(held.tokens, targets.take(held.index), held.denominators)

        return [self.take_step(minibatch, forward) for epoch in self._epochs for minibatch in epoch]
