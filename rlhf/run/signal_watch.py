"""Steps that teach the policy nothing: a warning after a few in a row, the end of the run after many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.log.reductions import StepMetrics, to_values
from rlhf.rewards.grade import NO_ANSWER
from rlhf.types import RolloutGroup, ScoredRollout

FLAT_STEPS = 3  # a single step of few prompts can have equal rewards by chance
NOTHING_TRAINED = "no rollout was trained on"
ALL_SKIPPED = "every optimizer step was skipped"
NO_SIGNAL = "no group had a signal"


class UselessRunError(RuntimeError):
    """The last steps taught the policy nothing, and more of them would not either."""


def no_group_has_a_signal(groups: Sequence[RolloutGroup], advantages: np.ndarray) -> bool:
    """Whether the rewards of a step give the policy nothing to learn from.

    PPO's advantages also depend on the critic: there a step has no signal if all of its rewards are equal.
    """
    return not advantages.any() or len({sample.reward for group in groups for sample in group.samples}) <= 1


def updates_taken(updates: Sequence[StepMetrics]) -> int:
    """How many of these optimizer steps were taken: those of the policy, and of a critic that learns alone.

    A skipped one has no finite gradient norm.
    """
    policy = any(name.startswith("learner/") for update in updates for name in update)
    norm = "learner/grad_norm" if policy else "critic/grad_norm"
    return sum(norm in to_values(update) for update in updates)


class SignalWatch:
    """Counts steps in a row that taught the policy nothing.

    Args:
        steps: training steps that this process has to take; if they are few, all of them decide about the warning.
    """

    def __init__(self, config: GRPOConfig, *, steps: int) -> None:
        self._config = config
        self._patience = min(FLAT_STEPS, steps)
        budget = config.run.max_useless_steps
        self._budget = None if budget is None else min(budget, config.run.steps)
        self._useless: list[str] = []  # the reason of each
        self._last: list[Sequence[RolloutGroup]] = []  # of the last useless steps
        self._warned = False

    def after_step(
        self, groups: Sequence[RolloutGroup], advantages: np.ndarray, *, trained: int, updates_taken: int
    ) -> str | None:
        """Count a step; a warning, once, when enough in a row had no signal, else None.

        Args:
            trained: rollouts of the step that count in the loss.
            updates_taken: optimizer steps of the step, those skipped as not finite left out.
        """
        if not trained:
            reason = NOTHING_TRAINED
        elif not updates_taken:
            reason = ALL_SKIPPED
        elif no_group_has_a_signal(groups, advantages):
            reason = NO_SIGNAL
        else:
            self._useless.clear()
            self._last.clear()
            return None
        self._useless.append(reason)
        self._last = [*self._last, groups][-self._patience :]
        if self._warned or len(self._useless) < self._patience or ALL_SKIPPED in self._useless[-self._patience :]:
            return None
        self._warned = True
        return (
            f"in the last {self._patience} steps no group had a signal, its rewards being equal. "
            f"{self._advice(self._samples())}"
        )

    def check(self) -> None:
        """End the run if its last `run.max_useless_steps` steps taught the policy nothing.

        Raises:
            UselessRunError: how many, why, and what to change.
        """
        if self._budget is None or len(self._useless) < self._budget:
            return
        counts = Counter(self._useless).most_common()
        reasons = ", ".join(f"{reason} ({count})" for reason, count in counts)
        raise UselessRunError(
            f"run.max_useless_steps={self._config.run.max_useless_steps}: the last {len(self._useless)} steps taught "
            f"the policy nothing: {reasons}. {self._remedy(counts[0][0])}"
        )

    def _remedy(self, reason: str) -> str:
        samples = self._samples()
        unscorable = sum(sample.reward is None for sample in samples)
        if reason == ALL_SKIPPED:
            return (
                "Lower learner.optimizer.lr or learner.max_grad_norm, or go back to an earlier checkpoint; skipped/ in "
                "the run folder has the batches."
            )
        if reason == NOTHING_TRAINED and 2 * unscorable < len(samples):
            return (
                f"{len(samples) - unscorable} of {len(samples)} responses were cut off: raise rollout."
                f"max_response_tokens={self._config.rollout.max_response_tokens}, or set algo.mask_truncated=false."
            )
        return self._advice(samples)

    def _samples(self) -> list[ScoredRollout]:
        return [sample for step in self._last for group in step for sample in group.samples]

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
        if not rewards:
            (status, _), *_ = Counter(s.status for s in samples).most_common(1)
            return f"{counted}No response could be scored ({status}): repair the reward, or the data that it reads."
        mean = f"The mean reward was {np.mean(rewards):.3g}"
        dynamic = "" if rollout.dynamic_sampling else ", or rollout.dynamic_sampling=true"
        return (
            f"{counted}{mean}: use data that the model gets right now and then (data.train), a larger "
            f"rollout.samples_per_prompt{dynamic}."
        )
