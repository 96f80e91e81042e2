"""Prompts -> graded groups: the least busy engine samples, and the scorer grades each response as it arrives."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rlhf.cluster.cluster import Cluster
from rlhf.cluster.replacement import EngineLostError
from rlhf.config.grpo import GRPOConfig
from rlhf.data.load import LoadedPrompts
from rlhf.data.model_files import truncate_token_id
from rlhf.data.order import PromptStream
from rlhf.rewards.model_client import RewardModelClient, conversation, endpoint_scorer
from rlhf.rewards.scorer import Response, Scorer
from rlhf.rollout.buffer import GROUPS_PER_PLACE
from rlhf.rollout.requests import SamplingSettings
from rlhf.run.state import RunState
from rlhf.step.batch import penalize_non_stop
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout

CHANNEL_MARKS = {"<|channel|>", "[THINK]"}  # special tokens that say where a thought begins


def groups_at_engines(config: GRPOConfig) -> int:
    """How many groups keep the batches of all engines full, with some to spare."""
    places = config.cluster.engines * config.rollout.max_concurrent_sequences / config.rollout.samples_per_prompt
    return math.ceil(GROUPS_PER_PLACE * places)


class BusyMeter:
    """Sampled tokens, and the seconds in which any engine had a request; idle time does not lower the rate."""

    def __init__(self) -> None:
        self.tokens = 0
        self._running = 0
        self._since = 0.0
        self._busy_s = 0.0

    def begin(self) -> None:
        if self._running == 0:
            self._since = time.monotonic()
        self._running += 1

    def end(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._busy_s += time.monotonic() - self._since

    def take(self) -> tuple[float, float]:
        """(tokens per busy second, busy seconds) since the last call; evaluations are included."""
        now = time.monotonic()
        if self._running:
            self._busy_s += now - self._since
            self._since = now
        rate, busy_s = self.tokens / self._busy_s if self._busy_s else 0.0, self._busy_s
        self.tokens, self._busy_s = 0, 0.0
        return rate, busy_s


class Sampler:
    """Samples and grades groups on all engines of a cluster."""

    def __init__(self, config: GRPOConfig, cluster: Cluster, scorer: Scorer, tokenizer: Any) -> None:
        self.meter = BusyMeter()
        self._config = config
        self._cluster = cluster
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._truncate_token = truncate_token_id(config.rollout, tokenizer)
        self._reward_model = _reward_model_client(config, cluster) if cluster.trains else None
        self._in_flight = [0] * len(cluster.engines.actors)

    async def for_training(self, prompt: Prompt) -> RolloutGroup:
        """Sample a group by the `rollout` section, with the whole reward: verifiers, reward model, penalties."""
        rollout = self._config.rollout
        settings = self._settings(rollout.temperature, rollout.max_response_tokens)
        group = await self.sample(prompt, rollout.samples_per_prompt, settings)
        if self._reward_model is not None:
            group = await self._reward_model.add_to(group)
        samples = tuple(
            penalize_non_stop(sample, rollout.non_stop_reward, rollout.missing_eos_penalty) for sample in group.samples
        )
        return RolloutGroup(group.prompt, samples)

    async def for_evaluation(self, prompt: Prompt) -> RolloutGroup:
        """Sample a group by the settings of its evaluation set. The verifiers, or else the reward model, grade it."""
        evaluation = self._config.evaluations[prompt.source]
        longest = evaluation.max_response_tokens or self._config.rollout.max_response_tokens
        settings = replace(self._settings(evaluation.temperature, longest), top_p=evaluation.top_p)
        group = await self.sample(prompt, evaluation.samples_per_prompt, settings)
        if self._reward_model is not None and not self._config.reward.parts_of(prompt.source):
            group = await self._reward_model.add_to(group)
        return group

    async def normalize_scores(self, prompts: LoadedPrompts, state: RunState) -> None:
        """Set mean and std of the reward model's scores: those of the run, or measured now on sampled responses.

        A resumed run keeps the scale that it began with.
        """
        client, config = self._reward_model, self._config
        if client is None or config.reward_model is None or config.reward_model.reference_samples is None:
            return
        if not state.reward_scale:
            settings = self._settings(config.rollout.temperature, config.rollout.max_response_tokens)
            stream = PromptStream(prompts.prompts, rows_per_epoch=prompts.rows_per_epoch, seed=config.run.seed)
            drawn = stream.take(config.reward_model.reference_samples)
            rollouts = await asyncio.gather(*(self._rollouts(prompt, 1, settings) for prompt in drawn))
            texts = self._texts([rollout for (rollout,) in rollouts], settings)
            await client.normalize_on([conversation(p, text) for p, text in zip(drawn, texts, strict=True)])
            state.reward_scale = {"mean": client.mean, "std": client.std}
        client.mean, client.std = state.reward_scale["mean"], state.reward_scale["std"]

    def _settings(self, temperature: float, max_tokens: int) -> SamplingSettings:
        rollout = self._config.rollout
        return SamplingSettings(
            temperature,
            max_tokens,
            rollout.stop,
            self._truncate_token,
            rollout.truncate_after,
            self._config.noise_seed,
            whole=rollout.truncate == "graded_text",
        )

    async def sample(self, prompt: Prompt, samples: int, settings: SamplingSettings) -> RolloutGroup:
        """Sample a group on the engine with the fewest groups, and grade its responses."""
        rollouts = await self._rollouts(prompt, samples, settings)
        return RolloutGroup(prompt, await self._graded(prompt, rollouts, settings))

    def _texts(self, rollouts: Sequence[Rollout], settings: SamplingSettings) -> list[str]:
        """The text of each response that is graded."""
        ids = [settings.graded(rollout.token_ids[rollout.response_mask]).tolist() for rollout in rollouts]
        plain = not CHANNEL_MARKS & set(self._tokenizer.all_special_tokens)  # without them no thought could be told
        return [self._tokenizer.decode(each, skip_special_tokens=plain) for each in ids]

    async def _sample_once(self, prompt: Prompt, samples: int, settings: SamplingSettings) -> list[Rollout]:
        engine = await self._cluster.next_engine(self._in_flight)
        self._in_flight[engine] += 1
        self.meter.begin()
        try:
            return await self._cluster.sample_group(engine, prompt, samples, settings)
        finally:
            self._in_flight[engine] -= 1
            self.meter.end()

    async def _rollouts(self, prompt: Prompt, samples: int, settings: SamplingSettings) -> list[Rollout]:
        """Sample a group on the engine with the fewest groups."""
        rollouts = None
        while rollouts is None:
            with contextlib.suppress(EngineLostError):  # it is being replaced: another engine samples the group
                rollouts = await self._sample_once(prompt, samples, settings)
        self.meter.tokens += sum(rollout.response_length for rollout in rollouts)
        return rollouts

    async def _graded(
        self, prompt: Prompt, rollouts: Sequence[Rollout], settings: SamplingSettings
    ) -> tuple[ScoredRollout, ...]:
        texts = self._texts(rollouts, settings)
        responses = [Response(t, r.finish_reason, r.response_length) for t, r in zip(texts, rollouts, strict=True)]
        scores = await self._scorer.score_group(prompt, responses)
        return tuple(
            ScoredRollout(rollout, text, score.extracted, score.reward, score.parts, score.status)
            for rollout, text, score in zip(rollouts, texts, scores, strict=True)
        )


def _reward_model_client(config: GRPOConfig, cluster: Cluster) -> RewardModelClient | None:
    model = config.reward_model
    if model is None:
        return None
    if model.path is None:
        return RewardModelClient([endpoint_scorer(model)] * model.replicas, weight=model.weight)
    scorers = [partial(cluster.score_conversations, copy) for copy in range(model.replicas)]
    return RewardModelClient(scorers, weight=model.weight, by_group=config.run.deterministic)
