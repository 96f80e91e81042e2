"""The mean and std of the scores of a run's reward model."""

from __future__ import annotations

import asyncio

from rlhf.cluster.rollout_workers import RolloutWorkers
from rlhf.config.grpo import GRPOConfig
from rlhf.data.load import LoadedPrompts
from rlhf.data.order import PromptStream
from rlhf.rewards.model_client import conversation
from rlhf.rollout.purpose import Purpose
from rlhf.run.state import RunState


async def normalize_scores(
    workers: RolloutWorkers, purpose: Purpose, prompts: LoadedPrompts, config: GRPOConfig, state: RunState
) -> None:
    """Set the mean and std of the reward model's scores: from the checkpoint, or measured now on sampled responses."""
    client = workers.reward_model
    if client is None or config.reward_model is None or config.reward_model.reference_samples is None:
        return
    if not state.reward_scale:
        stream = PromptStream(prompts.prompts, rows_per_epoch=prompts.rows_per_epoch, seed=config.run.seed)
        drawn = stream.take(config.reward_model.reference_samples)
        groups = await asyncio.gather(*(workers.rollout_group(prompt, purpose) for prompt in drawn))
        await client.normalize_on(
            [conversation(group.prompt, sample.text) for group in groups for sample in group.samples]
        )
        state.reward_scale = {"mean": client.mean, "std": client.std}
    workers.set_scale(state.reward_scale["mean"], state.reward_scale["std"])
