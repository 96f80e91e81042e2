"""The turns of one rollout: the model writes and its environment answers, until one of them ends the rollout.

    ids of the prompt -> generate -> the turn's tool calls -> session -> their answers, appended -> generate -> ...

The engine is a function and the environment is a session, so tests can replace both. The facts of a rollout say how it
ended:

    finish_reason  ended_by
    stop           answer             the last turn calls no tool
    stop           done               the environment says that it is over
    stop           call_limit         a call that the model asked for went over a limit of its process
    length         max_response_tokens, max_rollout_tokens, max_turns, max_rollout_s
    abort          abort              the engine aborted the last turn
    length         no_stop_token      the turn ended with another token than the template's, so nothing can follow it
    abort          environment_failed the environment's own code failed
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlhf.data.dialogue import Dialogue
from rlhf.sampling.requests import Completion
from rlhf.sampling.token_log import TokenLog
from rlhf.types import Outcome, Prompt, Rollout, TokenSequence

if TYPE_CHECKING:
    from rlhf.environments.sessions import HostedSession

Message = dict[str, Any]

CALL_LIMIT, FAILED = "call_limit", "environment_failed"  # statuses of an outcome besides `ok`
MAX_CHARS_PER_TOKEN = 128  # the longest tokens are runs of so many spaces


class CallLimitError(Exception):
    """A call of the model exceeded its limit of time or memory."""


class FailedError(Exception):
    """The environment's code or its process failed, and the model is not to blame."""


@dataclass(frozen=True)
class Answers:
    """The answers of an environment to the calls of one turn."""

    messages: tuple[Message, ...]
    done: bool = False
    errors: int = 0  # calls that could not be made
    faults: tuple[str, ...] = ()  # errors that the model may not have caused: `tool: file:line: Type: text`


class NextTurn(Protocol):
    """Continues ids [L] by at most `max_tokens`; `turn` counts the requests of the rollout from 0.

    `recorded`: number of first tokens whose experts are known (`TokenLog.recorded`). `offered`: the tools of this turn;
    None means the tools of the environment, and an empty list that no calls are parsed.
    """

    def __call__(
        self, token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int, offered: Sequence[Any] | None = None
    ) -> Awaitable[Completion]: ...


@dataclass(frozen=True)
class Limits:
    """How long a rollout may get; see the keys of `rollout` with these names."""

    max_response_tokens: int
    max_rollout_tokens: int  # everything after the prompt, with the environment's answers
    max_turns: int | None = None
    max_rollout_s: float | None = None
    max_sequence_tokens: int = 2**31 - 1  # one context with its turn, in the engine
    vocabulary: int = 2**31 - 1  # ids that a coroutine may name


# Metrics are made of these facts, so facts of an environment with these names are dropped.
OWN_FACTS = (
    "turns", "tool_calls", "tool_errors", "tool_faults", "calls", "untrained_tokens", "environment_seconds",
    "ended_by", "error",
)  # fmt: skip


@dataclass
class Progress:
    """A rollout while it is played, and how it ended."""

    began: float = field(default_factory=time.monotonic)
    messages: list[Message] = field(default_factory=list)  # after the prompt
    turns: int = 0
    offers_tools: bool = True  # a coroutine makes its calls by itself
    tool_calls: int = 0
    tool_errors: int = 0
    tool_faults: Counter[str] = field(default_factory=Counter)  # number of calls by fault
    calls: dict[str, int] = field(default_factory=dict)  # requests of a coroutine or program, by kind
    untrained_tokens: int = 0  # of sequences that `environment.trained_sequences` leaves out
    environment_s: float = 0.0
    asleep_s: float = 0.0  # of the engines, which do not count towards `max_rollout_s`
    finish_reason: str = "stop"
    ended_by: str = "answer"

    def end(self, finish_reason: str, ended_by: str) -> None:
        self.finish_reason, self.ended_by = finish_reason, ended_by

    def fail(self, error: CallLimitError | FailedError) -> Outcome:
        """End the rollout with an error; returns its outcome."""
        is_limit = isinstance(error, CallLimitError)
        self.end("stop" if is_limit else "abort", CALL_LIMIT if is_limit else FAILED)
        return Outcome(status=self.ended_by, error=str(error))

    def end_cut(self, finish_reason: str, budget: int, limits: Limits) -> None:
        """End the rollout after a turn that used up its budget of tokens, or that the engine aborted."""
        limit = "max_response_tokens" if budget == limits.max_response_tokens else "max_rollout_tokens"
        self.end(finish_reason, limit if finish_reason == "length" else finish_reason)

    def reached_limit(self, limits: Limits) -> str | None:
        """The name of the limit of turns or time that the rollout has reached."""
        if limits.max_turns is not None and self.turns >= limits.max_turns:
            return "max_turns"
        spent_s = time.monotonic() - self.began - self.asleep_s
        return "max_rollout_s" if limits.max_rollout_s is not None and spent_s > limits.max_rollout_s else None

    async def sampled(self, request: Awaitable[Completion]) -> Completion:
        """Wait for a turn, and count the seconds in which its engine slept; turns may be sampled at the same time."""
        before_s = self.asleep_s
        completion = await request
        self.asleep_s = max(self.asleep_s, before_s + completion.asleep_s)
        return completion

    async def timed(self, answer: Awaitable[Any]) -> Any:
        """Wait for the environment, and count the seconds."""
        began = time.monotonic()
        try:
            return await answer
        finally:
            self.environment_s += time.monotonic() - began

    def rollout(self, prompt: Prompt, sample: int, sequences: Sequence[TokenSequence], outcome: Outcome) -> Rollout:
        facts = {
            **{name: fact for name, fact in outcome.facts.items() if name not in OWN_FACTS},
            "turns": self.turns,
            **({"tool_calls": self.tool_calls, "tool_errors": self.tool_errors} if self.offers_tools else {}),
            **({"tool_faults": dict(self.tool_faults)} if self.tool_faults else {}),
            **({"calls": self.calls} if self.calls else {}),
            **({"untrained_tokens": self.untrained_tokens} if self.untrained_tokens else {}),
            "environment_seconds": round(self.environment_s, 3),
            "ended_by": self.ended_by,
            **({"error": outcome.error} if outcome.error else {}),
        }
        return Rollout(
            prompt.id, prompt.epoch, sample, tuple(sequences), self.finish_reason, tuple(self.messages), facts, outcome
        )


async def play_turns(
    prompt: Prompt, sample: int, session: HostedSession, *, generate: NextTurn, templates: Dialogue, limits: Limits
) -> Rollout:
    """Play a rollout from a prompt that includes the text of `reset`. A failure is its outcome; it is never raised."""
    log, progress = TokenLog(prompt.token_ids), Progress()
    try:
        await _turns(log, progress, session, generate, templates, limits)
        outcome = await progress.timed(session.finish())
    except (CallLimitError, FailedError) as error:
        outcome = progress.fail(error)
    return progress.rollout(prompt, sample, [log.sequence()], outcome)


async def _turns(
    log: TokenLog, progress: Progress, session: HostedSession, generate: NextTurn, templates: Dialogue, limits: Limits
) -> None:
    """Continue the log until the rollout ends."""
    while True:
        left = log.room(limits.max_rollout_tokens)
        budget = min(limits.max_response_tokens, left)
        turn = generate(log.token_ids, max_tokens=budget, turn=progress.turns, recorded=log.recorded)
        completion = await progress.sampled(turn)
        log.add_sampled(completion)
        progress.turns += 1
        assert completion.message is not None, "an engine parses the turns of a rollout with an environment"
        message = dict(completion.message)
        progress.messages.append(message)
        if completion.finish_reason != "stop":
            return progress.end_cut(completion.finish_reason, budget, limits)
        calls = message.get("tool_calls") or ()
        if not calls:
            return progress.end("stop", "answer")
        progress.tool_calls += len(calls)
        answers: Answers = await progress.timed(session.call(calls))
        progress.tool_errors += answers.errors
        progress.tool_faults.update(answers.faults)
        ended_by = "done" if answers.done else progress.reached_limit(limits)
        if ended_by is None and not templates.can_go_on(completion.token_ids):
            ended_by = "no_stop_token"
        if ended_by is not None:
            progress.messages += answers.messages
            return progress.end("stop" if answers.done else "length", ended_by)
        room = log.room(limits.max_rollout_tokens) - 1  # for at least one token of the next turn
        try:
            said = templates.fit(answers.messages, room, session.tools, after=log.last_id)
        except Exception as error:  # a template may raise anything about a message
            raise FailedError(f"the answers cannot be rendered: {error}") from None
        if said is None:
            progress.messages += answers.messages
            return progress.end("length", "max_rollout_tokens")
        progress.messages += said.messages
        log.add_said(said.token_ids)


def check_size(messages: Sequence[Mapping[str, Any]], *, most: int, key: str) -> None:
    """Refuse messages that cannot fit `most` tokens, since rendering them would delay every rollout."""
    contents = [message.get("content") or "" for message in messages]
    blocks = ([content] if isinstance(content, str) else map(str, content) for content in contents)
    size = sum(len(text) for texts in blocks for text in texts)
    if size > most * MAX_CHARS_PER_TOKEN:
        raise FailedError(f"{key}={most}: messages of {size:,} characters cannot fit so many tokens. Shorten them.")


def prompt_only_sequence(prompt: Prompt) -> TokenSequence:
    """The sequence of a rollout without any sampled token to train."""
    return TokenLog(prompt.token_ids if len(prompt.token_ids) else np.zeros(1, np.int32)).sequence()


def failed_rollout(prompt: Prompt, sample: int, error: CallLimitError | FailedError) -> Rollout:
    """A rollout that failed before it sampled a token."""
    progress = Progress()
    return progress.rollout(prompt, sample, [prompt_only_sequence(prompt)], progress.fail(error))
