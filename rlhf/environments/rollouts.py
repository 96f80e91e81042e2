"""Groups with an environment: each rollout opens a session, adds the text of `reset` to its prompt, and plays turns."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlhf.answers.thoughts import opens_thought
from rlhf.config.grpo import GRPOConfig
from rlhf.data.dialogue import Dialogue
from rlhf.environments.branches import Play, play_coroutine
from rlhf.environments.endpoint import Endpoint
from rlhf.environments.nodes import Spread
from rlhf.environments.sessions import HostedSession, Sessions
from rlhf.environments.turns import (
    FAILED,
    CallLimitError,
    FailedError,
    Limits,
    Message,
    NextTurn,
    Progress,
    check_size,
    failed_rollout,
    play_turns,
    prompt_only_sequence,
)
from rlhf.rollout.requests import Completion, Parsing, SamplingSettings, request_seed
from rlhf.rollout.sampler import Generate
from rlhf.types import Prompt, Rollout

RESET_S = 30.0  # limit of a reset in the trial of rewards before a run
MAX_ERRORS, MAX_WARNINGS = 5, 10  # errors shown when a run ends; warnings about errors in a run
REPAIR_TOOL = "Repair the tool; if the call is wrong, let it raise a ValueError that says why: the model reads it."
END_TOKENS = 64  # last tokens of a prompt in which a thought may be opened


class Environments:
    """Plays the rollouts of a Sampler that have an environment or tools.

    Args:
        parsing: how the engines read tool calls in responses.
        tokenizer: decodes the end of a prompt that `reset` made.
        endpoint: where programs reach the model; None without programs.
    """

    def __init__(
        self,
        config: GRPOConfig,
        hosts: Spread,
        templates: Dialogue,
        parsing: Parsing,
        tokenizer: Any,
        endpoint: Endpoint | None = None,
    ) -> None:
        self._config, self._hosts, self._templates, self._tokenizer = config, hosts, templates, tokenizer
        self._parsing, self._vocabulary = parsing, len(tokenizer)
        self._endpoint = endpoint

    async def __call__(
        self, prompt: Prompt, samples: int, settings: SamplingSettings, generate: Generate
    ) -> tuple[Prompt, list[Rollout]]:
        """Play the rollouts of a group concurrently. The group's prompt is that of the first successful reset."""
        tasks = [asyncio.ensure_future(self._rollout(prompt, n, settings, generate)) for n in range(samples)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after an error or a cancellation the other rollouts end and close their sessions
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        first = next((opened for opened, _ in results if opened is not None), prompt)
        return first, [
            rollout
            if opened is None or opened.messages == first.messages
            else replace(rollout, opening=opened.messages)
            for opened, rollout in results
        ]

    async def _rollout(
        self, prompt: Prompt, sample: int, settings: SamplingSettings, generate: Generate
    ) -> tuple[Prompt | None, Rollout]:
        """The prompt after `reset`, None if it failed, and the rollout."""
        turns = next_turn(self._config, prompt, sample, replace(settings, parsing=self._parsing), generate)
        rollout = self._config.rollout
        limits = Limits(
            max_response_tokens=settings.max_tokens,
            max_rollout_tokens=rollout.longest,
            max_turns=rollout.max_turns,
            max_rollout_s=rollout.max_rollout_s,
            max_sequence_tokens=self._config.max_sequence_tokens,
            vocabulary=self._vocabulary,
        )
        try:
            session = await self._hosts.open(row_for_reset(prompt), self.seeds(prompt, sample))
        except (CallLimitError, FailedError) as error:
            return None, failed_rollout(prompt, sample, FailedError(str(error)))
        try:
            how: dict[str, Any] = {"generate": turns, "templates": self._templates, "limits": limits}
            if session.plays:
                trained = self._config.environment.trained_kinds
                return None, await play_coroutine(prompt, sample, self._play(session), **how, trained=trained)
            opened = self.prompt_after_reset(prompt, session)
            return opened, await play_turns(opened, sample, session, **how)
        except FailedError as error:  # the prompt that `reset` made cannot be used
            return None, failed_rollout(prompt, sample, error)
        finally:
            await session.close()

    def _play(self, session: HostedSession) -> Play:
        """How to run a coroutine, or a program behind the endpoint."""
        if (endpoint := self._endpoint) is not None and session.is_program:
            return lambda branches: endpoint.play(branches, session.run)
        return lambda branches: session.play(branches.answer)

    def seeds(self, prompt: Prompt, sample: int) -> dict[str, int]:
        """The seeds of a rollout. Members of a group start in the same state; a resumed run repeats the seeds."""
        key = f"{self._config.run.seed}/{prompt.epoch}/{prompt.id}"
        return {"group": int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest()), "sample": sample}

    def prompt_after_reset(self, prompt: Prompt, session: HostedSession) -> Prompt:
        """The prompt with the session's tools and the text of its reset. Raises FailedError if it cannot be used."""
        messages = messages_after_reset(prompt, session.opening, session.text, self._config)
        check_size(messages, most=self._config.data.max_prompt_tokens, key="data.max_prompt_tokens")
        try:
            token_ids = self._templates.prompt(messages, session.tools)
        except Exception as error:  # a template may raise anything about a message
            raise FailedError(f"the prompt that reset made cannot be rendered: {error}") from None
        if len(token_ids) > (longest := self._config.data.max_prompt_tokens):
            raise FailedError(
                f"the prompt has {len(token_ids)} tokens after reset, more than data.max_prompt_tokens={longest}. "
                "Raise it, or shorten the text of reset and the descriptions of the tools."
            )
        end = self._tokenizer.decode(token_ids[-END_TOKENS:].tolist(), skip_special_tokens=False)
        in_thought = opens_thought(end, self._parsing.marks)
        return replace(prompt, messages=tuple(messages), token_ids=token_ids, in_thought=in_thought)


def row_for_reset(prompt: Prompt) -> dict[str, Any]:
    """The row for `reset`: its columns, and the messages of its prompt, if it has one, as `prompt`."""
    return {**prompt.columns, **({"prompt": list(prompt.messages)} if prompt.messages else {})}


async def rollout_with_answer(
    hosts: Sessions, prompt: Prompt, text: str, config: GRPOConfig
) -> tuple[Prompt, Rollout] | None:
    """The prompt after reset, and the rollout of a model that answers with this text and calls no tool.

    None for coroutines and programs, which need a model, and if the environment fails.
    """
    progress = Progress(messages=[{"role": "assistant", "content": text}], turns=1)
    try:
        session = await asyncio.wait_for(hosts.open(row_for_reset(prompt), {"group": 0, "sample": 0}), RESET_S)
        try:
            if session.plays:
                return None
            messages = messages_after_reset(prompt, session.opening, session.text, config)
            rollout = progress.rollout(prompt, 0, [prompt_only_sequence(prompt)], await session.finish())
            return replace(prompt, messages=tuple(messages)), rollout
        finally:
            await session.close()
    except (CallLimitError, FailedError, TimeoutError):
        return None


def messages_after_reset(
    prompt: Prompt, opening: Sequence[Message] | None, text: str, config: GRPOConfig
) -> list[Message]:
    """The messages of the prompt after reset. Raises FailedError if neither the row nor reset has a prompt."""
    messages = [dict(message) for message in (prompt.messages if opening is None else opening)]
    if text and messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += text
    elif text:
        messages.append({"role": "user", "content": text})
    if not messages:
        raise FailedError("the row has no prompt, and reset returned none. Return a text from reset.")
    if config.data.system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.data.system_prompt})
    return messages


def next_turn(
    config: GRPOConfig, prompt: Prompt, sample: int, settings: SamplingSettings, generate: Generate
) -> NextTurn:
    """A function for the turns of one rollout. Each turn has its own noise and prefers the engine of the last turn."""
    engine: int | None = None

    async def continue_ids(
        token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int, offered: Sequence[Any] | None = None
    ) -> Completion:
        nonlocal engine
        seed = request_seed(config.noise_seed, prompt, sample=sample, turn=turn)
        what = f"{prompt.id}, sample {sample}, turn {turn + 1}"
        experts_from = None if settings.experts_from is None else recorded
        turn_settings = replace(settings, max_tokens=max_tokens, experts_from=experts_from)
        if offered is not None and (parsing := settings.parsing) is not None:
            calls = replace(parsing, tools=tuple(offered), tool_parser=parsing.tool_parser if offered else None)
            turn_settings = replace(turn_settings, parsing=calls)
        (completion,) = await generate(token_ids, turn_settings, samples=1, seed=seed, what=what, prefer=engine)
        engine = completion.engine
        return completion

    return continue_ids


class FailedEnvironments:
    """Counts the rollouts of a step whose environment failed, by error; `allowed_fraction` of them may fail."""

    def __init__(self, allowed_fraction: float) -> None:
        self._allowed_fraction = allowed_fraction
        self._warned = set[str]()

    def check(self, rollouts: Sequence[Rollout]) -> tuple[list[str], str]:
        """Warnings about new errors in the rollouts of a step; and the reason to end the run, or an empty string."""
        outcomes = [rollout.outcome for rollout in rollouts if rollout.outcome is not None]
        errors = Counter(" ".join(outcome.error.split()) for outcome in outcomes if outcome.status == FAILED)
        faults = Counter[str]()
        for rollout in rollouts:
            faults.update(rollout.facts.get("tool_faults"))
        texts = [f"{errors[error]} of {len(rollouts)} rollouts failed: {error}" for error in self._new(errors)]
        for fault in self._new(faults):
            tool, _, error = fault.partition(": ")
            texts.append(f"the tool {tool} failed ({faults[fault]} x): {error.removesuffix('.')}. {REPAIR_TOOL}")
        warnings = [f"environment: {each}" for each in texts]
        if not errors or errors.total() <= self._allowed_fraction * len(rollouts):
            return warnings, ""
        shown = "\n".join(f"  {count} x {error}" for error, count in errors.most_common(MAX_ERRORS))
        return warnings, (
            f"environment: {errors.total()} of {len(rollouts)} rollouts of a step failed, more than "
            f"environment.max_failed_fraction={self._allowed_fraction:g} allows:\n{shown}\nRepair the environment, or "
            "raise the fraction."
        )

    def _new(self, errors: Iterable[str]) -> list[str]:
        """Errors that no warning has named yet, as long as a run has few warnings."""
        new = [error for error in errors if error not in self._warned][: MAX_WARNINGS - len(self._warned)]
        self._warned.update(new)
        return new
