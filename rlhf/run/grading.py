"""Rollouts -> graded rollouts: decoded, graded by the verifiers, scored by the reward model."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward import ENVIRONMENT_PART, MODEL_PART
from rlhf.config.roles import REWARD_MODEL
from rlhf.data.load import LoadedPrompts
from rlhf.data.order import PromptStream
from rlhf.data.thoughts import marks_of, tokens_to_drop
from rlhf.environments.turns import CALL_LIMIT
from rlhf.rewards.grade import FAILED, NOT_JUDGED, OK, too_large
from rlhf.rewards.model_client import Conversation, RewardModelClient, conversation, endpoint_scorer
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.requests import SamplingSettings
from rlhf.rollout.sampler import Sampler
from rlhf.run.state import RunState
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout

if TYPE_CHECKING:
    from rlhf.cluster.actors import ActorGroup
    from rlhf.learner.reward_scorer import RewardScorer


class Grading:
    """Turns the rollouts of a prompt into graded ones; the `grade` of a Sampler."""

    def __init__(
        self, config: GRPOConfig, scorer: Scorer, tokenizer: Any, reward_model: RewardModelClient | None = None
    ) -> None:
        self.reward_model = reward_model
        self._config, self._scorer, self._tokenizer = config, scorer, tokenizer
        self._marks = marks_of(tokenizer, config.data.template)
        self._dropped = tokens_to_drop(tokenizer, self._marks)

    async def __call__(
        self, prompt: Prompt, rollouts: Sequence[Rollout], settings: SamplingSettings, *, trains: bool
    ) -> tuple[ScoredRollout, ...]:
        ended = [rollout for rollout in rollouts if rollout.outcome is None or rollout.outcome.status == OK]
        texts = [self.text(rollout, settings) for rollout in ended]
        metric = None if trains else self._config.metric_of(prompt.source)
        graded = await self._scorer.score_group(prompt, ended, texts, self._marks, metric=metric) if ended else ()
        if ended and self.reward_model is not None:
            scored = await self.reward_model.add_to(RolloutGroup(prompt, graded))
            graded = tuple(map(self._check_model_score, scored.samples))
        if not self._config.uses_environment_or_tools:
            return graded
        by_sample = {sample.rollout.sample: sample for sample in graded}
        return tuple(self._add_outcome(rollout, by_sample.get(rollout.sample)) for rollout in rollouts)

    def _add_outcome(self, rollout: Rollout, graded: ScoredRollout | None) -> ScoredRollout:
        """Add the environment's outcome to a graded rollout; `graded` is None if only the environment judges it."""
        outcome, environment = rollout.outcome, self._config.environment
        assert outcome is not None, "a rollout with an environment has an outcome"
        if graded is None:
            reward = environment.failed_reward if outcome.status == CALL_LIMIT else None
            return ScoredRollout(rollout, last_assistant_text(rollout), "", reward, {}, outcome.status)
        parts: dict[str, float | None] = dict(graded.reward_parts)
        parts |= {} if outcome.reward is None else {ENVIRONMENT_PART: outcome.reward}
        environment_reward = environment.weight * (outcome.reward or 0.0)
        from_parts = graded.reward
        if graded.status == NOT_JUDGED and outcome.reward is not None:  # only its environment judges it
            from_parts, graded = 0.0, dataclasses.replace(graded, status=OK)
        reward = None if from_parts is None else from_parts + environment_reward
        total = max(environment_reward, reward or 0.0, key=abs)
        if problem := self._too_large(ENVIRONMENT_PART, outcome.reward, total, outcome.parts, rollout):
            facts = {**rollout.facts, "ended_by": CALL_LIMIT, "error": problem}
            over = dataclasses.replace(outcome, status=CALL_LIMIT, error=problem)
            ended = dataclasses.replace(rollout, finish_reason="stop", facts=facts, outcome=over)
            return ScoredRollout(ended, last_assistant_text(rollout), "", environment.failed_reward, {}, CALL_LIMIT)
        parts |= {f"{ENVIRONMENT_PART}/{name}": value for name, value in outcome.parts.items()}
        return dataclasses.replace(graded, reward=reward, reward_parts=parts)

    def _check_model_score(self, sample: ScoredRollout) -> ScoredRollout:
        """Check a rollout that has a score of the reward model; it is unscorable if its reward is too large."""
        score = sample.reward_parts[MODEL_PART]
        if not self._too_large(MODEL_PART, score, sample.reward or 0.0, {}, sample.rollout):
            return sample
        parts = {**sample.reward_parts, MODEL_PART: None}
        return dataclasses.replace(sample, reward=None, reward_parts=parts, status=FAILED)

    def _too_large(
        self, part: str, value: float | None, total: float, numbers: Mapping[str, float | None], rollout: Rollout
    ) -> str:
        """Call `too_large` for a part that the scorer does not grade, and let the scorer count the error."""
        bound = self._config.reward.bound
        if problem := too_large(value or 0.0, total, numbers, bound=bound, row=rollout.prompt_id):
            self._scorer.note(part, problem)
        return problem

    def text(self, rollout: Rollout, settings: SamplingSettings) -> str:
        """The text of a rollout that is graded, shown and logged: with an environment, the assistant's last message.

        Without one, it is the sampled text with the marks of thoughts and without other special tokens.
        """
        if rollout.outcome is not None:
            return last_assistant_text(rollout)
        ids = [id for id in settings.graded(rollout.response_ids).tolist() if id not in self._dropped]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def silent_rewards(
    config: GRPOConfig, scorer: Scorer, groups: Sequence[RolloutGroup], *, step: int
) -> tuple[list[str], list[str]]:
    """Find parts of the reward that gave no response of a step a value, for each list of parts (`reward.by_source`).

    Returns warnings (every reward was None, or every call of a built-in part failed), and notes (one part gave no
    value, but other parts did).
    """
    warnings, notes = [], []
    by_source: dict[str, list[ScoredRollout]] = {}
    for group in groups:
        source = group.prompt.source if group.prompt.source in config.reward.by_source else ""
        ended = (each.rollout.outcome is None or each.rollout.outcome.status == OK for each in group.samples)
        by_source.setdefault(source, []).extend(itertools.compress(group.samples, ended))
    for source, samples in ((source, samples) for source, samples in by_source.items() if samples):
        key, prompts_note = (f"reward.by_source.{source}", f" for prompts of {source}") if source else ("reward", "")
        parts = config.reward.parts_of(source)
        values = {part.name: sum(s.reward_parts.get(part.name) is not None for s in samples) for part in parts}
        silent = {part.name: scorer.missing_value_reason(part) for part in parts if not values[part.name]}
        if config.learns_from_rewards and all(sample.reward is None for sample in samples):
            silent |= _silent_others(config, samples)
            reasons = "; ".join(f"{name}: {why}" for name, why in silent.items())
            shares = ", ".join(f"{name} {count} of {len(samples)}" for name, count in values.items())
            warnings.append(
                f"{key}: every reward of step {step}{prompts_note} was None: "
                f"{reasons or f'no response has a value of each part ({shares})'}. None of these rollouts was trained "
                "on. Repair the reward, or the rows that it reads (docs/rewards.md)."
            )
            continue
        for name, why in silent.items():
            count = f"{len(samples)} responses of step {step}{prompts_note}"
            notes.append(f"{key}: {name} judged none of the {count}: {why}.")
        warnings += [
            f"{scorer.failures(part)}\n  It counts as 0 for each of them."
            for part in parts
            if not part.is_judged_outside and part.name not in silent and scorer.failed_always(part)
        ]
    return warnings, notes


def _silent_others(config: GRPOConfig, samples: Sequence[ScoredRollout]) -> dict[str, str]:
    """The reward model and the environment, with a reason, if they gave no response a value."""
    named = {name for sample in samples for name, value in sample.reward_parts.items() if value is not None}
    others = {
        MODEL_PART: (config.reward_model, "it gave no score"),
        ENVIRONMENT_PART: (config.environment.parts, "it gave no reward"),
    }
    return {name: why for name, (is_there, why) in others.items() if is_there and name not in named}


def last_assistant_text(rollout: Rollout) -> str:
    """The content of the last message that the model wrote; empty if it wrote none."""
    written = [turn for turn in rollout.turns if turn["role"] == "assistant"]
    return str(written[-1].get("content") or "") if written else ""


def reward_model_client(config: GRPOConfig, cluster: Any) -> RewardModelClient | None:
    """The client of the config's reward model, in actors of the cluster or behind an endpoint; None without one."""
    model = config.reward_model
    if model is None:
        return None
    if model.path is None:
        return RewardModelClient([endpoint_scorer(model)] * model.replicas, weight=model.weight)

    async def score(copy: int, conversations: list[Conversation]) -> list[float | None]:
        what = f"{len(conversations)} responses"
        models: ActorGroup[RewardScorer] = cluster.group(REWARD_MODEL)
        return await models.call_one(copy, lambda model: model.score(conversations), what=what)

    scorers = [partial(score, copy) for copy in range(model.replicas)]
    return RewardModelClient(scorers, weight=model.weight, by_group=config.run.deterministic)


async def normalize_scores(
    grading: Grading, sampler: Sampler, prompts: LoadedPrompts, config: GRPOConfig, state: RunState
) -> None:
    """Set the mean and std of the reward model's scores: from the checkpoint, or measured now on sampled responses."""
    client = grading.reward_model
    if client is None or config.reward_model is None or config.reward_model.reference_samples is None:
        return
    if not state.reward_scale:
        stream = PromptStream(prompts.prompts, rows_per_epoch=prompts.rows_per_epoch, seed=config.run.seed)
        drawn, settings = stream.take(config.reward_model.reference_samples), sampler.training_settings
        sampled = await asyncio.gather(*(sampler.rollouts(prompt, 1, settings) for prompt in drawn))
        pairs = [(prompt, grading.text(rollout, settings)) for prompt, (rollout,) in sampled]
        await client.normalize_on([conversation(prompt, text) for prompt, text in pairs])
        state.reward_scale = {"mean": client.mean, "std": client.std}
    client.mean, client.std = state.reward_scale["mean"], state.reward_scale["std"]
