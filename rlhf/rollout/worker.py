"""The rollout worker: everything that a rollout needs, and one method that turns a prompt into a graded group.

    rollout_group ─┬─ play ──> engine: continues token ids <──> environment: answers the calls of a turn
                   └─ grade ─> processes of the graders, reward model, the environment's own reward

A worker runs in the driver's process, or as a Ray actor on a node with engines (`cluster/rollout_workers.py`). It gets
engines and graders as objects and starts nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhf.config.grpo import GRPOConfig
from rlhf.config.reward import ENVIRONMENT_PART, MODEL_PART
from rlhf.data.thoughts import marks_of, tokens_to_drop
from rlhf.environments.branches import play_coroutine
from rlhf.environments.rollouts import Environments
from rlhf.environments.turns import (
    CALL_LIMIT,
    CallLimitError,
    FailedError,
    Limits,
    NextTurn,
    failed_rollout,
    play_turns,
)
from rlhf.rewards.grade import FAILED, NOT_JUDGED, OK, too_large
from rlhf.rewards.model_client import RewardModelClient
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import Purpose
from rlhf.sampling.requests import Completion, Generate, SamplingSettings, request_seed
from rlhf.sampling.token_log import TokenLog
from rlhf.types import Prompt, Rollout, RolloutGroup, ScoredRollout


@dataclass(eq=False, repr=False)
class RolloutWorker:
    """Samples, plays and grades groups; any number of them at the same time."""

    config: GRPOConfig
    tokenizer: Any
    generate: Generate  # continues token ids on an engine
    scorer: Scorer  # the verifiers of the config
    environments: Environments | None = None  # None: a rollout is one response
    reward_model: RewardModelClient | None = None  # None: there is no reward model

    def __post_init__(self) -> None:
        self._marks = marks_of(self.tokenizer, self.config.data.template)
        self._dropped = tokens_to_drop(self.tokenizer, self._marks)

    async def rollout_group(self, prompt: Prompt, purpose: Purpose) -> RolloutGroup:
        """Sample the group of a prompt and grade it. With an environment, the group's prompt is that of its reset."""
        if self.environments is None:
            rollouts = await self._respond(prompt, purpose)
        else:
            prompt, rollouts = await self._play_all(prompt, purpose)
        return RolloutGroup(prompt, await self.grade(prompt, rollouts, purpose))

    # --- sampling and acting ---

    async def _respond(self, prompt: Prompt, purpose: Purpose) -> list[Rollout]:
        """One response per rollout; one request, so that the engine computes the prompt once."""
        seed = request_seed(self.config.noise_seed, prompt)
        completions = await self.generate(
            prompt.token_ids, purpose.settings, samples=purpose.samples, seed=seed, what=prompt.id
        )
        return [to_rollout(prompt, sample, completion) for sample, completion in enumerate(completions)]

    async def _play_all(self, prompt: Prompt, purpose: Purpose) -> tuple[Prompt, list[Rollout]]:
        """Play the rollouts of a group concurrently. The group's prompt is that of the first successful reset."""
        tasks = [asyncio.ensure_future(self.play(prompt, sample, purpose)) for sample in range(purpose.samples)]
        try:
            played = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error or a cancellation the other rollouts end and close their sessions
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        first = next((opened for opened, _ in played if opened is not None), prompt)
        return first, [
            rollout
            if opened is None or opened.messages == first.messages
            else replace(rollout, opening=opened.messages)
            for opened, rollout in played
        ]

    async def play(self, prompt: Prompt, sample: int, purpose: Purpose) -> tuple[Prompt | None, Rollout]:
        """Play one rollout with its environment. Returns the prompt after `reset`, None without one, and the rollout.

        A failure of the environment is the rollout's outcome; it is not raised.
        """
        environments, config = self.environments, self.config
        assert environments is not None
        settings = replace(purpose.settings, parsing=environments.parsing)
        limits = Limits(
            max_response_tokens=settings.max_tokens,
            max_rollout_tokens=config.rollout.longest,
            max_turns=config.rollout.max_turns,
            max_rollout_s=config.rollout.max_rollout_s,
            max_sequence_tokens=config.max_sequence_tokens,
            vocabulary=len(self.tokenizer),
        )
        next_turn = self.next_turn_of(prompt, sample, settings)
        how: dict[str, Any] = {"generate": next_turn, "templates": environments.dialogue, "limits": limits}
        try:
            session = await environments.open(prompt, sample)
        except (CallLimitError, FailedError) as error:
            return None, failed_rollout(prompt, sample, FailedError(str(error)))
        try:
            if session.plays:  # a coroutine, a program or a service asks for the turns
                run, trained = environments.runner(session), config.environment.trained_kinds
                return None, await play_coroutine(prompt, sample, run, **how, trained=trained)
            opened = environments.prompt_after_reset(prompt, session)
            return opened, await play_turns(opened, sample, session, **how)
        except FailedError as error:  # the prompt that `reset` made cannot be used
            return None, failed_rollout(prompt, sample, error)
        finally:
            await session.close()

    def next_turn_of(self, prompt: Prompt, sample: int, settings: SamplingSettings) -> NextTurn:
        """A function for the turns of one rollout: each has its own noise, and prefers the engine of the last one."""
        engine: int | None = None

        async def continue_ids(
            token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int, offered: Sequence[Any] | None = None
        ) -> Completion:
            nonlocal engine
            seed = request_seed(self.config.noise_seed, prompt, sample=sample, turn=turn)
            what = f"{prompt.id}, sample {sample}, turn {turn + 1}"
            experts_from = None if settings.experts_from is None else recorded
            turn_settings = replace(settings, max_tokens=max_tokens, experts_from=experts_from)
            if offered is not None and (parsing := settings.parsing) is not None:
                calls = replace(parsing, tools=tuple(offered), tool_parser=parsing.tool_parser if offered else None)
                turn_settings = replace(turn_settings, parsing=calls)
            (completion,) = await self.generate(
                token_ids, turn_settings, samples=1, seed=seed, what=what, prefer=engine
            )
            engine = completion.engine
            return completion

        return continue_ids

    # --- grading ---

    async def grade(self, prompt: Prompt, rollouts: Sequence[Rollout], purpose: Purpose) -> tuple[ScoredRollout, ...]:
        """Grade the rollouts of a prompt, in their order: verifiers, reward model, environment, penalties."""
        if purpose.kind == "texts":
            return tuple(
                ScoredRollout(rollout, self._text(rollout, purpose.settings), "", None, {}, NOT_JUDGED)
                for rollout in rollouts
            )
        ended = [rollout for rollout in rollouts if rollout.outcome is None or rollout.outcome.status == OK]
        texts = [self._text(rollout, purpose.settings) for rollout in ended]
        metric = None if purpose.kind == "training" else self.config.metric_of(prompt.source)
        graded = await self.scorer.score_group(prompt, ended, texts, self._marks, metric=metric) if ended else ()
        if ended and self.reward_model is not None:
            scored = await self.reward_model.add_to(RolloutGroup(prompt, graded))
            graded = tuple(map(self._check_model_score, scored.samples))
        if self.environments is not None:
            by_sample = {sample.rollout.sample: sample for sample in graded}
            graded = tuple(self._add_outcome(rollout, by_sample.get(rollout.sample)) for rollout in rollouts)
        if purpose.kind == "evaluation":
            return graded
        reward, penalty = self.config.rollout.non_stop_reward, self.config.rollout.missing_eos_penalty
        return tuple(penalize_non_stop(sample, reward, penalty) for sample in graded)

    def _add_outcome(self, rollout: Rollout, graded: ScoredRollout | None) -> ScoredRollout:
        """Add the environment's outcome to a graded rollout; `graded` is None if only the environment judges it."""
        outcome, environment = rollout.outcome, self.config.environment
        assert outcome is not None, "a rollout with an environment has an outcome"
        if graded is None:
            reward = environment.failed_reward if outcome.status == CALL_LIMIT else None
            return ScoredRollout(rollout, last_assistant_text(rollout), "", reward, {}, outcome.status)
        parts: dict[str, float | None] = dict(graded.reward_parts)
        parts |= {} if outcome.reward is None else {ENVIRONMENT_PART: outcome.reward}
        environment_reward = environment.weight * (outcome.reward or 0.0)
        from_parts = graded.reward
        if graded.status == NOT_JUDGED and outcome.reward is not None:  # only its environment judges it
            from_parts, graded = 0.0, replace(graded, status=OK)
        reward = None if from_parts is None else from_parts + environment_reward
        total = max(environment_reward, reward or 0.0, key=abs)
        bound = self.config.reward.bound
        if problem := too_large(outcome.reward or 0.0, total, outcome.parts, bound=bound, row=rollout.prompt_id):
            facts = {**rollout.facts, "ended_by": CALL_LIMIT, "error": problem}
            over = replace(outcome, status=CALL_LIMIT, error=problem)
            ended = replace(rollout, finish_reason="stop", facts=facts, outcome=over)
            return _with_failure(
                graded, ENVIRONMENT_PART, problem, rollout=ended, extracted="", reward=environment.failed_reward,
                reward_parts={}, status=CALL_LIMIT,
            )  # fmt: skip
        parts |= {f"{ENVIRONMENT_PART}/{name}": value for name, value in outcome.parts.items()}
        return replace(graded, reward=reward, reward_parts=parts)

    def _check_model_score(self, sample: ScoredRollout) -> ScoredRollout:
        """Check a rollout that has a score of the reward model; it is unscorable if its reward is too large."""
        score, total, bound = sample.reward_parts[MODEL_PART] or 0.0, sample.reward or 0.0, self.config.reward.bound
        if not (problem := too_large(score, total, {}, bound=bound, row=sample.rollout.prompt_id)):
            return sample
        parts = {**sample.reward_parts, MODEL_PART: None}
        return _with_failure(sample, MODEL_PART, problem, reward=None, reward_parts=parts, status=FAILED)

    def _text(self, rollout: Rollout, settings: SamplingSettings) -> str:
        """The text of a rollout that is graded, shown and logged: with an environment, the assistant's last message.

        Without one, it is the sampled text with the marks of thoughts and without other special tokens.
        """
        if rollout.outcome is not None:
            return last_assistant_text(rollout)
        ids = [id for id in settings.graded(rollout.response_ids).tolist() if id not in self._dropped]
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def to_rollout(prompt: Prompt, sample: int, completion: Completion) -> Rollout:
    """Prompt and response as one sequence, id for id."""
    log = TokenLog(prompt.token_ids)
    log.add_sampled(completion)
    return Rollout(prompt.id, prompt.epoch, sample, (log.sequence(),), completion.finish_reason)


def _with_failure(sample: ScoredRollout, part: str, problem: str, **changes: Any) -> ScoredRollout:
    """A graded rollout with the failure of a part that the scorer does not grade."""
    part_status, errors = {**sample.part_status, part: FAILED}, {**sample.errors, part: problem}
    return replace(sample, **changes, part_status=part_status, errors=errors)


def last_assistant_text(rollout: Rollout) -> str:
    """The content of the last message that the model wrote; empty if it wrote none."""
    written = [turn for turn in rollout.turns if turn["role"] == "assistant"]
    return str(written[-1].get("content") or "") if written else ""


def penalize_non_stop(sample: ScoredRollout, reward: float | None, penalty: float = 0.0) -> ScoredRollout:
    """If a response did not stop, replace its reward by `reward` (unless it is None), and subtract `penalty`.

    A rollout of several turns stopped if its last turn did, or if its environment ended it; it is penalized once.
    Unscorable responses are unchanged.
    """
    if sample.rollout.finish_reason == "stop" or sample.reward is None:
        return sample
    return replace(sample, reward=(sample.reward if reward is None else reward) - penalty)
