"""The client of a run's reward model, whose copies are actors or behind an endpoint."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlhf.cluster.actors import ActorGroup
from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward_model import RewardModelConfig
from rlhf.rewards.model_client import Conversation, RewardModelClient, endpoint_scorer

if TYPE_CHECKING:
    from rlhf.learner.reward_scorer import RewardScorer


def reward_model_client(
    config: GRPOConfig, model: RewardModelConfig, models: ActorGroup[RewardScorer] | None
) -> RewardModelClient:
    """The client of a reward model; `models`: its actors; None: it is behind an endpoint."""
    if models is None:
        return RewardModelClient([endpoint_scorer(model)] * model.replicas, weight=model.weight)

    async def score(copy: int, conversations: list[Conversation]) -> list[float | None]:
        what = f"{len(conversations)} responses"
        return await models.call_one(copy, lambda model: model.score(conversations), what=what)

    scorers = [partial(score, copy) for copy in range(model.replicas)]
    return RewardModelClient(scorers, weight=model.weight, by_group=config.run.deterministic)
