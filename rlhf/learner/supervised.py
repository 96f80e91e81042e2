"""One rank of a module that learns from fixed examples, all of which it holds.

The minibatch of a step, with its denominators, depends on seed and step alone, not on ranks or the microbatch's budget.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlhf.algo.packing import draw_minibatches, pack_microbatches
from rlhf.config.supervised import SFTConfig, SupervisedConfig
from rlhf.learner.policy_model import load_policy
from rlhf.learner.rank import TrainedRank
from rlhf.learner.step import HeldMicrobatch, make_microbatches
from rlhf.learner.update import on_host
from rlhf.log.reductions import Perplexity, StepMetrics, Sum, UpdateOutcome, merge_metrics
from rlhf.types import Denominators, Minibatch, PackedTokens, World

EVALUATED_AT_ONCE = 32  # microbatches of each shard: a run can be asked to end between two parts of an evaluation


class SupervisedRank(TrainedRank):
    """The base of the trainers of `rlhf.sft` and `rlhf.reward_model`; call `hold` first."""

    _train: PackedTokens
    _held_out: PackedTokens | None

    def __init__(self, config: SupervisedConfig, world: World) -> None:
        training, device = config.training, config.cluster.device
        super().__init__(world, name="learner", training=training, model=config.model, device=device)
        self.config = config

    def hold(self, train: PackedTokens, held_out: PackedTokens | None) -> None:
        """Keep the examples of `sequences_per_example` sequences each. The response mask marks the trained tokens."""
        self._train, self._held_out = train, held_out

    def loss(self, held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
        """This microbatch's share of the minibatch's mean loss, with a graph also for a filler; and further metrics."""
        raise NotImplementedError

    def train(self, step: int) -> UpdateOutcome:
        """Take optimizer step number `step` of the run, from 0. Returns the metrics of this rank."""
        count, seed = self._count(self._train), self.config.run.seed
        minibatches = self.config.updates_per_epoch(count)
        epoch, number = divmod(step, minibatches)
        examples = draw_minibatches(count, minibatches=minibatches, seed=seed, step=0, epoch=epoch)[number]
        microbatches = self._own_microbatches(self._train, examples)
        outcome = self.take_step(microbatches, lambda held: self._loss_and_metrics("train", held))
        index = np.concatenate([held.index[: 0 if held.is_filler else None] for held in microbatches])
        counts: StepMetrics = {"train/tokens": Sum(len(index))}
        if trained := int(self._train.response_mask[index].sum()):
            counts["train/trained_tokens"] = Sum(trained)
        return replace(outcome, metrics=outcome.metrics | counts)

    @torch.no_grad()
    def evaluate(self, part: int) -> StepMetrics | None:
        """The loss and the other metrics on a part of the held-out examples; None after the last part.

        Merged over all data shards and parts, they are the evaluation.
        """
        assert self._held_out is not None
        part_slice = slice(part * EVALUATED_AT_ONCE, (part + 1) * EVALUATED_AT_ONCE)
        microbatches = self._own_microbatches(self._held_out, np.arange(self._count(self._held_out)), part_slice)
        metrics = [self._loss_and_metrics("eval", held)[1] for held in microbatches]
        return on_host(merge_metrics(metrics)) if metrics else None

    def _loss_and_metrics(self, prefix: str, held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
        loss, metrics = self.loss(held)
        metrics = {"loss": Sum(loss.detach().double()), **metrics}
        return loss, {f"{prefix}/{name}": metric for name, metric in metrics.items()}

    def _count(self, data: PackedTokens) -> int:
        return len(data.lengths) // self.config.sequences_per_example

    def _own_microbatches(
        self, data: PackedTokens, examples: np.ndarray, part: slice = slice(None)
    ) -> list[HeldMicrobatch]:
        """The microbatches of this rank's shard of the minibatch `examples` [E]; `part` selects some of them."""
        sequences = self.config.sequences_per_example
        rows = examples[:, None] * sequences + np.arange(sequences)
        max_tokens, shards = self.config.row_tokens, self.config.cluster.data_shards
        packed = pack_microbatches(data.lengths[rows].sum(1), max_tokens=max_tokens, shards=shards)
        trained = data.response_mask[data.token_indices(rows.ravel())]
        minibatch = Minibatch(
            tuple(tuple(rows[np.array(members, np.int64)].ravel() for members in shard[part]) for shard in packed),
            # an example counts as a rollout
            Denominators(tokens=int(trained.sum()), rollouts=len(examples), sequences=rows.size),
        )
        return make_microbatches(data, minibatch, self.put, shard=self.world.shard)


class SFTTrainer(SupervisedRank):
    """The rank of supervised fine-tuning: cross entropy of the trained tokens, by the model and kernels of GRPO."""

    def __init__(self, config: SFTConfig, world: World) -> None:
        super().__init__(config, world)
        model = config.model
        with self.loading():
            policy = load_policy(model, temperature=1.0, seed=config.run.seed)
        self.wrap(policy)
        self.check_packed(self.deepspeed, key="model.path", path=model.path)

    def loss(self, held: HeldMicrobatch) -> tuple[Tensor, StepMetrics]:
        """The mean of -log p(token) over the trained tokens of the minibatch, nats."""
        total = -self.deepspeed(held.tokens).logprobs.sum()
        perplexity = Perplexity(total.detach().double(), held.tokens.response_mask.sum())
        return total / held.denominators.tokens, {"perplexity": perplexity}
