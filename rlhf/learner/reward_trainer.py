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
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.learner.messages import Place
from rlhf.learner.model import DeviceTokens, check_packed
from rlhf.learner.rank import TrainedRank, Training
from rlhf.learner.reward_scorer import NORMALIZATION_FILE
from rlhf.learner.value_model import RewardModel, load_scalar_transformer
from rlhf.log.metrics import Mean, StepMetrics, Sum, merge_metrics


@dataclass(frozen=True)
class Pair:
    """A preference: both [L] int32 whole conversations."""

    chosen: np.ndarray
    rejected: np.ndarray

    @property
    def tokens(self) -> int:
        return len(self.chosen) + len(self.rejected)


def count_updates(config: RewardTrainingConfig, pairs: int) -> int:
    return config.run.epochs * updates_per_epoch(config, pairs)


def updates_per_epoch(config: RewardTrainingConfig, pairs: int) -> int:
    return math.ceil(pairs / config.learner.pairs_per_update)


class RewardTrainer(TrainedRank):
    """The reward model's rank; every rank holds all pairs and takes its part of each minibatch."""

    def __init__(self, config: RewardTrainingConfig, place: Place, pairs: Sequence[Pair]) -> None:
        total = count_updates(config, len(pairs))
        training = Training(
            name="learner",
            section=config.learner,
            total_updates=total,
            dtype=config.model.dtype,
            device=config.cluster.device,
            trust_remote_code=config.model.trust_remote_code,
        )
        super().__init__(training, place)
        self.config = config
        self.pairs = pairs
        hidden = _hidden_size(config.model.path, config.model.trust_remote_code)
        torch.manual_seed(config.run.seed)  # the head is drawn alike on every rank
        with self.loading():
            transformer = load_scalar_transformer(
                config.model.path,
                key="model.path",
                dtype=config.model.dtype,
                head_std=1 / math.sqrt(hidden + 1),  # as in the original RLHF code
                gradient_checkpointing=config.model.gradient_checkpointing,
                trust_remote_code=config.model.trust_remote_code,
            )
        self.wrap(RewardModel(transformer))
        check_packed(self.engine, self.device, dtype=config.model.dtype, key="model.path", path=config.model.path)

    def train(self) -> Iterator[StepMetrics]:
        """Every update of the run; yields its metrics over all ranks."""
        for epoch in range(self.config.run.epochs):
            drawn = draw_minibatches(
                len(self.pairs),
                minibatches=updates_per_epoch(self.config, len(self.pairs)),
                seed=self.config.run.seed,
                step=0,
                epoch=epoch,
            )
            for indices in drawn:
                yield self.update([self.pairs[i] for i in indices])

    def update(self, pairs: Sequence[Pair]) -> StepMetrics:
        """One optimizer step on the mean loss of these pairs."""
        microbatches = self._own(pairs)

        def forward(i: int) -> tuple[Tensor, StepMetrics]:
            scores = self._scores(microbatches[i])
            margins = scores[0::2] - scores[1::2]
            loss = pair_loss(margins).sum() / len(pairs) + 0.0 * scores.sum()
            return loss, pair_metrics("train", margins.detach()) | {"train/loss": Sum(loss.item())}

        return merge_ranks(self.take_step(len(microbatches), forward), self.place)

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
        by_rank: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(by_rank, own_scores)
        all_scores = np.concatenate(by_rank)
        return merge_ranks(parts, self.place), float(all_scores.mean()), float(all_scores.std())

    def write(self, folder: str, tokenizer_path: str, mean: float, std: float) -> None:
        """The model in Hugging Face format, with the normalization of its scores."""
        self.export(folder, tokenizer_path)
        if self.place.rank == 0:
            (Path(folder) / NORMALIZATION_FILE).write_text(json.dumps({"mean": mean, "std": std}) + "\n")

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
    return Mean(values.double().sum().item(), float(len(values)))


def merge_ranks(metrics: StepMetrics, place: Place) -> StepMetrics:
    by_rank: list[Any] = [None] * place.world_size
    dist.all_gather_object(by_rank, metrics)
    return merge_metrics(by_rank)


def _hidden_size(path: str, trust_remote_code: bool) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code).hidden_size)
