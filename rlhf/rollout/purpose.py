"""What a group of rollouts is sampled for: a training step, an evaluation, or the scale of the reward model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from rlhf.config.grpo import GRPOConfig
from rlhf.sampling.requests import SamplingSettings


@dataclass(frozen=True)
class Purpose:
    """How many samples a group has, how they are sampled, and how they are graded."""

    # `training` grades with verifiers, reward model and penalties; `evaluation` has no penalties, and answers that are
    # equal get the same vote; `texts` grades nothing.
    kind: Literal["training", "evaluation", "texts"]
    samples: int
    settings: SamplingSettings


def training_purpose(config: GRPOConfig, truncate_token: int | None) -> Purpose:
    """The groups of a training step, with the settings of `rollout`."""
    rollout = config.rollout
    settings = _settings(config, truncate_token, rollout.temperature, rollout.max_response_tokens, rollout.restriction)
    if config.learner.replays_experts:
        settings = replace(settings, experts_from=0)
    return Purpose("training", rollout.samples_per_prompt, settings)


def texts_purpose(config: GRPOConfig, truncate_token: int | None) -> Purpose:
    """One ungraded response per prompt, sampled as in a training step."""
    return replace(training_purpose(config, truncate_token), kind="texts", samples=1)


def evaluation_purpose(config: GRPOConfig, truncate_token: int | None, source: str) -> Purpose:
    """The groups of an evaluation set, with its own settings."""
    evaluation = config.evaluations[source]
    longest = evaluation.max_response_tokens or config.rollout.max_response_tokens
    settings = _settings(config, truncate_token, evaluation.temperature, longest, evaluation.restriction)
    return Purpose("evaluation", evaluation.samples_per_prompt, settings)


def _settings(
    config: GRPOConfig, truncate_token: int | None, temperature: float, max_tokens: int, restriction: dict[str, Any]
) -> SamplingSettings:
    rollout = config.rollout
    ends = rollout.stop, truncate_token, rollout.truncate_after, rollout.truncate == "graded_text"
    return SamplingSettings(temperature, max_tokens, *ends, **restriction)
