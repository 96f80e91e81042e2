"""Prompts -> graded groups, behind two functions: one continues token ids on an engine, the other grades rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.rollout.requests import Completion, SamplingSettings, request_seed
from rlhf.rollout.token_log import TokenLog
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout


class Generate(Protocol):
    """One request on an engine: `samples` continuations of token ids [P]. See `cluster.engines.Engines.generate`."""

    def __call__(
        self,
        token_ids: np.ndarray,
        settings: SamplingSettings,
        *,
        samples: int,
        seed: int | None,
        what: str,
        prefer: int | None = None,
    ) -> Awaitable[list[Completion]]: ...


class Grade(Protocol):
    """Grades the rollouts of a prompt in their order. `trains` is False in an evaluation."""

    def __call__(
        self, prompt: Prompt, rollouts: Sequence[Rollout], settings: SamplingSettings, *, trains: bool
    ) -> Awaitable[tuple[ScoredRollout, ...]]: ...


# Samples a group with an environment, which may change or make the prompt; see `environments.rollouts`.
Play = Callable[[Prompt, int, SamplingSettings, Generate], Awaitable[tuple[Prompt, list[Rollout]]]]


class Sampler:
    """Samples and grades the groups of a run. Without `play`, which plays environments, a response is one turn."""

    def __init__(
        self, config: GRPOConfig, truncate_token: int | None, generate: Generate, grade: Grade, play: Play | None = None
    ) -> None:
        self._config, self._truncate_token = config, truncate_token
        self._generate, self._grade, self._play = generate, grade, play

    async def for_training(self, prompt: Prompt) -> RolloutGroup:
        """Sample a group with the settings of `rollout`, and grade it with verifiers, reward model and penalties."""
        rollout, settings = self._config.rollout, self.training_settings
        prompt, rollouts = await self.rollouts(prompt, rollout.samples_per_prompt, settings)
        graded = await self._grade(prompt, rollouts, settings, trains=True)
        penalized = (penalize_non_stop(each, rollout.non_stop_reward, rollout.missing_eos_penalty) for each in graded)
        return RolloutGroup(prompt, tuple(penalized))

    async def for_evaluation(self, prompt: Prompt) -> RolloutGroup:
        """Sample a group with the settings of its evaluation set; verifiers, or else the reward model, grade it."""
        evaluation = self._config.evaluations[prompt.source]
        longest = evaluation.max_response_tokens or self._config.rollout.max_response_tokens
        settings = self._settings(evaluation.temperature, longest, evaluation.restriction)
        prompt, rollouts = await self.rollouts(prompt, evaluation.samples_per_prompt, settings)
        return RolloutGroup(prompt, await self._grade(prompt, rollouts, settings, trains=False))

    async def rollouts(self, prompt: Prompt, samples: int, settings: SamplingSettings) -> tuple[Prompt, list[Rollout]]:
        """Sample a group in one request, or with environments, which may change the prompt; nothing is graded."""
        if self._play is not None:
            return await self._play(prompt, samples, settings, self._generate)
        seed = request_seed(self._config.noise_seed, prompt)
        completions = await self._generate(prompt.token_ids, settings, samples=samples, seed=seed, what=prompt.id)
        return prompt, [to_rollout(prompt, sample, completion) for sample, completion in enumerate(completions)]

    @property
    def training_settings(self) -> SamplingSettings:
        rollout = self._config.rollout
        settings = self._settings(rollout.temperature, rollout.max_response_tokens, rollout.restriction)
        return dataclasses.replace(settings, experts_from=0) if self._config.learner.replays_experts else settings

    def _settings(self, temperature: float, max_tokens: int, restriction: dict[str, Any]) -> SamplingSettings:
        rollout, whole = self._config.rollout, self._config.rollout.truncate == "graded_text"
        ends = rollout.stop, self._truncate_token, rollout.truncate_after, whole
        return SamplingSettings(temperature, max_tokens, *ends, **restriction)


def to_rollout(prompt: Prompt, sample: int, completion: Completion) -> Rollout:
    """Prompt and response as one sequence, id for id."""
    log = TokenLog(prompt.token_ids)
    log.add_sampled(completion)
    return Rollout(prompt.id, prompt.epoch, sample, (log.sequence(),), completion.finish_reason)


def penalize_non_stop(sample: ScoredRollout, reward: float | None, penalty: float = 0.0) -> ScoredRollout:
    """If a response did not stop, replace its reward by `reward` (unless it is None), and subtract `penalty`.

    A rollout of several turns stopped if its last turn did, or if its environment ended it; it is penalized once.
    Unscorable responses are unchanged.
    """
    if sample.rollout.finish_reason == "stop" or sample.reward is None:
        return sample
    return dataclasses.replace(sample, reward=(sample.reward if reward is None else reward) - penalty)
