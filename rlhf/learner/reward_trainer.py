"""One rank of the training of a reward model: Bradley-Terry on preference pairs, through the same DeepSpeed learner."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf.algo.packing import draw_minibatches, filler, pack, pack_microbatches
from rlhf.config.reward_model import RECORD_FILE, RewardTrainingConfig
from rlhf.config.roles import Training
from rlhf.learner.policy_model import DeviceTokens, check_packed
from rlhf.learner.rank import TrainedRank
from rlhf.learner.rank_place import Place
from rlhf.learner.update import on_host
from rlhf.learner.value_model import RewardModel, load_scalar_transformer
from rlhf.log.reductions import Mean, StepMetrics, Sum, merge_metrics, merge_outcomes


@dataclass(frozen=True)
class Pair:
    """A preference: both [L] int32 whole conversations."""

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


def training_on(pairs: int, config: RewardTrainingConfig) -> Training:
    """The training on this many pairs: one step, in which each pass over the pairs is an epoch."""
    updates_per_epoch = math.ceil(pairs / config.learner.pairs_per_update)
    return Training(config.learner, config.run.epochs, updates_per_epoch, steps=1)


def count_updates(config: RewardTrainingConfig, pairs: int) -> int:
    return training_on(pairs, config).total_updates


class RewardTrainer(TrainedRank):
    """The reward model's rank; every rank holds all pairs and takes its part of each minibatch."""

    def __init__(self, config: RewardTrainingConfig, place: Place, pairs: Sequence[Pair]) -> None:
        training = training_on(len(pairs), config)
        super().__init__(place, name="learner", training=training, model=config.model, device=config.cluster.device)
        self.config = config
        self.pairs = pairs
        torch.manual_seed(config.run.seed)  # the head is drawn alike on every rank
        with self.loading():
            transformer = load_scalar_transformer(config.model.path, config.model, key="model.path", new_head="random")
        self.wrap(RewardModel(transformer))
        check_packed(self.engine, self.device, dtype=config.model.dtype, key="model.path", path=config.model.path)

    def train(self) -> Iterator[StepMetrics]:
        """Every update of the run; yields its metrics over all ranks."""
        seed, minibatches = self.config.run.seed, self.training.minibatches_per_epoch
        for epoch in range(self.training.epochs_per_step):
            for indices in draw_minibatches(len(self.pairs), minibatches=minibatches, seed=seed, step=0, epoch=epoch):
                yield self.update([self.pairs[i] for i in indices])

    def update(self, pairs: Sequence[Pair]) -> StepMetrics:
        """One optimizer step on the mean loss of these pairs."""
        microbatches = self._own(pairs)

        def forward(i: int) -> tuple[Tensor, StepMetrics]:
            scores = self._scores(microbatches[i])
            margins = scores[0::2] - scores[1::2]
            loss = pair_loss(margins).sum() / len(pairs) + 0.0 * scores.sum()
            return loss, pair_metrics("train", margins.detach()) | {"train/loss": Sum(loss.detach().double())}

        return merge_outcomes(self._gather(self.take_step(len(microbatches), forward))).metrics

    @torch.no_grad()
    def measure(self, pairs: Sequence[Pair]) -> tuple[StepMetrics, float, float]:
        """Accuracy and margin on pairs, and mean and std of all their scores."""
        own_scores: list[float] = []
        parts: StepMetrics = {}
        for microbatch in self._own(pairs):
            scores = self._scores(microbatch)
            own_scores += scores.tolist()
            margins = scores[0::2] - scores[1::2]
            parts = merge_metrics([parts, pair_metrics("eval", margins), {"eval/loss": _mean(pair_loss(margins))}])
        all_scores = np.concatenate(self._gather(own_scores))
        return merge_metrics(self._gather(on_host(parts))), float(all_scores.mean()), float(all_scores.std())

    def write(self, folder: str, tokenizer_path: str, mean: float, std: float) -> None:
        """Write the model in Hugging Face format, the normalization of its scores and the template of its input."""
        self.export(folder, tokenizer_path)
        if self.place.rank == 0:
            record = {"mean": mean, "std": std, "template": self.config.data.template}
            (Path(folder) / RECORD_FILE).write_text(json.dumps(record) + "\n")

    def _gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        by_rank: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(by_rank, value)
        return by_rank

    def _own(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        plan = pack_microbatches(
            np.array([pair.tokens for pair in pairs], np.int64),
            max_tokens=self.config.learner.max_tokens_per_microbatch,
            ranks=self.place.world_size,
        )
        return [[pairs[i] for i in members] for members in plan[self.place.rank]]

    def _scores(self, pairs: Sequence[Pair]) -> Tensor:
        """[2n] scores, chosen and rejected in turn; empty for a filler, which is still computed."""
        sequences = [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]
        scores: Tensor = self.engine(DeviceTokens.of(pack(sequences) if pairs else filler(), self.device))
        return scores if pairs else scores[:0] + 0.0 * scores.sum()


def pair_loss(margins: Tensor) -> Tensor:
    """[n] -log sigmoid(score of chosen - score of rejected) (Bradley-Terry; arXiv:2203.02155, eq. 1)."""
    return -F.logsigmoid(margins)


def pair_metrics(name: str, margins: Tensor) -> StepMetrics:
    return {f"{name}/accuracy": _mean((margins > 0).float()), f"{name}/margin": _mean(margins)}


def _mean(values: Tensor) -> Mean:
    return Mean(values.double().sum(), float(len(values)))
