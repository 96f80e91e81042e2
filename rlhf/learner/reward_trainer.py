"""One rank of the training of a reward model: Bradley-Terry on pairs, the chosen conversation and the rejected one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlhf.config.reward_model import RECORD_FILE, RewardTrainingConfig
from rlhf.learner.step import HeldMicrobatch
from rlhf.learner.supervised import SupervisedRank
from rlhf.learner.value_model import RewardModel, load_scalar_transformer
from rlhf.log.reductions import Mean, StepMetrics
from rlhf.types import World

NORMALIZATION_PAIRS = 2048  # evenly spaced; their scores give the mean to about 0.02 of the std


class RewardTrainer(SupervisedRank):
    """The reward model's rank."""

    config: RewardTrainingConfig

    def __init__(self, config: RewardTrainingConfig, world: World) -> None:
        super().__init__(config, world)
        torch.manual_seed(config.run.seed)  # the head is drawn alike on every rank
        with self.loading():
            transformer = load_scalar_transformer(config.model.path, config.model, key="model.path", new_head="random")
        self.wrap(RewardModel(transformer))
        self.check_packed(self.deepspeed, key="model.path", path=config.model.path)

    def loss(self, held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
        """The mean of `pair_loss` over the pairs of the minibatch."""
        scores = self.deepspeed(held.tokens)
        margins = scores[:0] if held.is_filler else scores[0::2] - scores[1::2]
        loss = pair_loss(margins).sum() / held.denominators.rollouts + 0.0 * scores.sum()
        return loss, pair_metrics(margins.detach())

    def export(self, folder: str, tokenizer_path: str) -> str:
        """Write the model, the normalization of its scores, which have to be finite, and the template of its input."""
        mean, std = self._normalization()
        if not math.isfinite(std):
            raise RuntimeError(
                f"learner.optimizer.lr={self.config.learner.optimizer.lr}: the training diverged. The scores are not "
                "finite, and no model is written. Lower lr, or set learner.max_grad_norm."
            )
        warning = super().export(folder, tokenizer_path)
        if self.world.rank == 0:
            record = {"mean": mean, "std": std, "template": self.config.data.template}
            (Path(folder) / RECORD_FILE).write_text(json.dumps(record) + "\n")
        return warning

    @torch.no_grad()
    def _normalization(self) -> tuple[float, float]:
        """Mean and std of the scores of NORMALIZATION_PAIRS training pairs, chosen and rejected."""
        count = self._count(self._train)
        microbatches = self._own_microbatches(self._train, np.arange(0, count, math.ceil(count / NORMALIZATION_PAIRS)))
        scores = [self.deepspeed(held.tokens)[: 0 if held.is_filler else None].tolist() for held in microbatches]
        by_rank: list[Any] = [None] * self.world.size
        dist.all_gather_object(by_rank, np.concatenate(scores))
        every = np.concatenate(by_rank)  # once per rank of each data shard
        return float(every.mean()), float(every.std())


def pair_loss(margins: Tensor) -> Tensor:
    """[n] -log sigmoid(score of chosen - score of rejected) (Bradley-Terry; arXiv:2203.02155, eq. 1)."""
    return -F.logsigmoid(margins)


def pair_metrics(margins: Tensor) -> StepMetrics:
    """The fraction of pairs in the right order, and the mean margin [n]."""
    count = float(len(margins))
    return {"accuracy": Mean((margins > 0).double().sum(), count), "margin": Mean(margins.double().sum(), count)}
