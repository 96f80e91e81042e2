"""The critic's rank: values of the step's states, and updates towards their returns."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.algo import losses
from rlhf.config.ppo import PPOConfig
from rlhf.learner.policy_model import DeviceTokens
from rlhf.learner.reward_scorer import recorded_normalization
from rlhf.learner.step import StepRank
from rlhf.learner.update import masked_mean
from rlhf.learner.value_model import HEAD, ValueModel, load_scalar_transformer
from rlhf.log.reductions import StepMetrics, Sum, UpdateOutcome
from rlhf.types import Denominators, ValueTargets, World


class Critic(StepRank):
    """One rank of the critic, hosted by an actor of `rlhf.cluster.actors`."""

    def __init__(self, config: PPOConfig, world: World) -> None:
        training, device = config.critic_training, config.cluster.device
        super().__init__(world, name="critic", training=training, model=config.model, device=device)
        self.clip = config.critic.value_clip
        key, path = config.critic_model
        with self.loading():
            # every value is 0 before the first update, as in the original RLHF code
            transformer = load_scalar_transformer(path, config.model, key=key, new_head="zeros")
        _, std = recorded_normalization(path)
        head = transformer.get_parameter(HEAD)
        with torch.no_grad(), self.whole(head, modify=True):
            head.div_(std)  # rewards are normalized scores, and so are their values
        self.wrap(ValueModel(transformer))
        self.check_packed(self.deepspeed, key=key, path=path)

    def values(self) -> tuple[np.ndarray]:
        """Values on the microbatches of the first epoch."""
        return (self.run_passes(self.deepspeed),)

    def update(self, targets: ValueTargets) -> list[UpdateOutcome]:
        return self.run_updates(targets, functools.partial(value_microbatch, self.deepspeed, clip=self.clip))


def value_microbatch(
    model: nn.Module, tokens: DeviceTokens, targets: ValueTargets, denominators: Denominators, *, clip: float | None
) -> tuple[Tensor, StepMetrics]:
    """This microbatch's share of the value loss, the mean over the response tokens of the minibatch."""
    mask = tokens.response_mask
    old_values, returns = (torch.from_numpy(x).to(mask.device) for x in (targets.old_values, targets.returns))
    values = model(tokens)
    terms = losses.value_loss(values, old_values, returns, mask, clip=clip)
    loss = losses.aggregate(
        terms.loss, mask, tokens.cu_seqlens, tokens.rollout_tokens,
        aggregation="token_mean", tokens=denominators.tokens, rollouts=denominators.rollouts,
    )  # fmt: skip
    loss = loss + 0.0 * values.sum()  # keeps a microbatch without a trained token in the graph
    return loss, {
        "critic/loss": Sum(loss.detach().double()),
        "critic/clip_fraction": masked_mean(terms.clipped.float(), mask),
        "critic/value": masked_mean(values.detach(), mask),
    }
