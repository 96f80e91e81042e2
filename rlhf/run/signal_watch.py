"""Warns when the rewards of several steps in a row give the policy nothing to learn from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.rewards.grade import NO_ANSWER
from rlhf.types import RolloutGroup, ScoredRollout

FLAT_STEPS = 3  # a single step of few prompts can have equal rewards by chance


class SignalWatch:
    """Gives one warning when the rewards of several steps in a row were equal within every group."""

    def __init__(self, config: GRPOConfig, *, steps: int) -> None:
        self._config = config
        self._patience = min(FLAT_STEPS, steps)
        self._flat: list[Sequence[RolloutGroup]] = []
        self._warned = False

    def after_step(self, groups: Sequence[RolloutGroup], advantages: np.ndarray) -> str | None:
        """The warning, once enough steps in a row had no signal; else None.

        PPO's advantages also depend on the critic: there a step has no signal if all of its rewards are equal.
        """
        rewards = {sample.reward for group in groups for sample in group.samples}
        if self._warned or (advantages.any() and len(rewards) > 1):
            self._flat.clear()
            return None
        self._flat.append(groups)
        if len(self._flat) < self._patience:
            return None
        self._warned = True
        samples = [sample for step in self._flat for group in step for sample in group.samples]
        flat = f"in the last {len(self._flat)} steps no group had a signal, its rewards being equal. "
        return flat + self._advice(samples)

    def _advice(self, samples: Sequence[ScoredRollout]) -> str:
        """How many responses had an answer, and which key to change."""
        rollout = self._config.rollout
        answered = sum(s.extracted != "" for s in samples)
        asked_for_answer = answered + sum(s.extracted == "" and s.status == NO_ANSWER for s in samples)
        cut_off = sum(s.rollout.finish_reason == "length" for s in samples)
        counted = f"{answered} of {len(samples)} responses held an answer. " if asked_for_answer else ""
        if 2 * answered < asked_for_answer and 2 * cut_off > len(samples):
            return f"{counted}{cut_off} were cut off: raise rollout.max_response_tokens={rollout.max_response_tokens}."
        if 2 * answered < asked_for_answer:
            return (
                f"{counted}Ask for the form that the reward reads with data.prompt_suffix, such as 'Put your final "
                "answer within \\boxed{}.'; rollouts/ has the responses."
            )
        rewards = [s.reward for s in samples if s.reward is not None]
        mean = f"The mean reward was {np.mean(rewards):.3g}" if rewards else "No response could be scored"
        dynamic = "" if rollout.dynamic_sampling else ", or rollout.dynamic_sampling=true"
        return (
            f"{counted}{mean}: use data that the model gets right now and then (data.train), a larger "
            f"rollout.samples_per_prompt{dynamic}."
        )
