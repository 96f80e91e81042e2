"""The rollout of a coroutine or a program, which asks for turns, one after another or many at once.

Each request names its context, as messages or as ids. A request that continues the last turn of a log is appended to
that log. A request that continues an earlier turn, or a turn that another request has continued, starts a new sequence
with the ids up to that turn; they are its prompt, so each token is trained once. Any other context is rendered and
starts a new sequence.

    play: generate([user]) ──> log 1: prompt, turn 1
          generate([user, turn 1, critique])  ──> log 1 goes on: critique, turn 2
          generate([user, turn 1, question])  ──> log 2: the ids of log 1 up to turn 1, question, turn 2'

Each request is counted by its kind in the facts (`calls`); docs/environments.md explains the kinds, and
`environment.trained_sequences` chooses among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf.config.environment import KINDS
from rlhf.data.dialogue import Dialogue
from rlhf.data.messages import joined, read_message
from rlhf.environments import turns
from rlhf.environments.turns import CallLimitError, FailedError, Message
from rlhf.sampling.requests import Completion
from rlhf.sampling.token_log import TokenLog
from rlhf.types import Outcome, Prompt, Rollout

MAX_RENDERED = 1000  # new messages of a request
MAX_REFUSED = 1000  # turns past a limit that a coroutine may ask for; a coroutine that ignores limits never ends
UNNOTICED_S = 0.005  # a context that takes the event loop longer delays the next context of its rollout


class TooLongError(FailedError):
    """A context is longer than a sequence may be."""


# Runs the coroutine or program to its end. Raises CallLimitError or FailedError.
Play = Callable[["Branches"], Awaitable[Outcome]]


@dataclass(frozen=True)
class Turn:
    """The answer to a request."""

    message: Message
    completion: Completion | None  # None for a turn past a limit, which is empty
    prompt_ids: np.ndarray  # [P] int32, the tokens before the turn


@dataclass
class _Context:
    """The end of a turn, which a request may continue: the first `length` ids of a log."""

    log: TokenLog
    length: int
    messages: tuple[str, ...] | None  # the units up to here (`_units`); None: the request named ids
    continued: bool = False

    def is_continued_by(self, request: Mapping[str, Any], messages: tuple[str, ...]) -> bool:
        """Whether the request's context starts with this context."""
        if "token_ids" in request:
            return np.array_equal(request["token_ids"][: self.length], self.log.token_ids[: self.length])
        return self.messages is not None and messages[: len(self.messages)] == self.messages


@dataclass
class Branches:
    """The contexts and turns of one rollout."""

    generate: turns.NextTurn
    templates: Dialogue
    limits: turns.Limits
    trained: Collection[str]  # kinds of requests whose sequences are trained
    progress: turns.Progress = field(default_factory=lambda: turns.Progress(offers_tools=False))
    logs: list[TokenLog] = field(default_factory=list)  # of these sequences
    contexts: list[_Context] = field(default_factory=list)
    sampled: int = 0  # tokens of all turns
    promised: int = 0  # tokens that the turns in progress may still get
    refused: int = 0  # turns past a limit
    kinds: Counter[str] = field(default_factory=Counter)
    asked: set[tuple[str, ...]] = field(default_factory=set)  # the units of every request
    calls: dict[str, Any] = field(default_factory=dict)  # calls in its turns by id, in a comparable form
    answering: set[asyncio.Task[Any] | None] = field(default_factory=set)
    turn_ended: asyncio.Condition = field(default_factory=asyncio.Condition)
    read: asyncio.Lock = field(default_factory=asyncio.Lock)
    ended: bool = False

    async def answer(self, request: Mapping[str, Any]) -> Message:
        """The turn for a coroutine: a message with finish_reason and token_ids."""
        turn = await self.turn(request)
        sampled = turn.completion
        reason, token_ids = ("length", []) if sampled is None else (sampled.finish_reason, sampled.token_ids.tolist())
        return {**turn.message, "finish_reason": reason, "token_ids": token_ids}

    async def turn(self, request: Mapping[str, Any]) -> Turn:
        """The turn for a request; `all_answered` waits for it."""
        if self.ended:
            raise FailedError("the coroutine has ended")
        task = asyncio.current_task()
        self.answering.add(task)
        try:
            return await self._answer(request)
        finally:
            self.answering.discard(task)

    async def all_answered(self) -> None:
        """Wait for turns that the coroutine did not wait for: no engine may work for a rollout that has ended."""
        self.ended = True
        if waiting := [task for task in self.answering if task is not None]:
            await asyncio.wait(waiting)

    async def _answer(self, request: Mapping[str, Any]) -> Turn:
        """Sample the turn after the request's `messages` (with `tools`) or `token_ids`."""
        if not self.kinds:
            self.progress.began = time.monotonic()  # the wait for a process and the client's imports do not count
        most, asked = self.limits.max_response_tokens, request.get("max_tokens")
        if asked is not None:
            if not isinstance(asked, int) or asked < 1:
                raise FailedError(f"`generate` was called with max_tokens={asked!r}. Use a whole number of at least 1.")
            most = min(most, asked)
        async with self._reading(most):
            if limit := "max_rollout_tokens" if self._left() < 1 else self.progress.reached_limit(self.limits):
                return self._refuse(limit)
            budget = min(most, self._left())
            try:
                key = "data.max_prompt_tokens + rollout.max_rollout_tokens"
                messages = request.get("messages") or ()
                turns.check_size(messages, most=self.limits.max_sequence_tokens, key=key)
                units = self._units(messages)
                log = self._log_of(request, units)
            except FailedError:
                raise
            except Exception as error:  # the context is the coroutine's, and a template may raise anything about it
                raise FailedError(f"`generate` was called with a context that cannot be read: {error}") from None
        if log is None:
            return self._refuse("max_rollout_tokens")
        budget = min(budget, self.limits.max_sequence_tokens - len(log))
        prompt_ids, texts = log.token_ids, tuple(text for text, _ in units)
        completion = await self._sampled(request, log, budget)
        message = dict(completion.message or {"role": "assistant", "content": ""})
        self.calls |= {call["id"]: self._call(call) for call in message.get("tool_calls") or ()}
        if completion.finish_reason != "stop" and len(completion.token_ids) != asked:  # not cut by max_tokens
            self.progress.end_cut(completion.finish_reason, budget, self.limits)
        before = max((i for i, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
        self.progress.messages += [*map(_with_text, messages[before + 1 :]), message]  # since the model's last turn
        if "token_ids" in request:
            self.contexts.append(_Context(log, len(log.token_ids), None))
        elif self.templates.can_go_on(completion.token_ids):  # messages can be joined here
            ended = (*texts, *(text for text, _ in self._units([message])))
            self.contexts.append(_Context(log, len(log.token_ids), ended))
        return Turn(message, completion, prompt_ids)

    async def _sampled(self, request: Mapping[str, Any], log: TokenLog, budget: int) -> Completion:
        """Have the next turn of a log sampled, and append it."""
        turn = self.progress.turns
        self.progress.turns += 1
        self.promised += budget
        try:
            offered = {"offered": request["offered"]} if "offered" in request else {}
            asked = self.generate(log.token_ids, max_tokens=budget, turn=turn, recorded=log.recorded, **offered)
            completion = await self.progress.sampled(asked)
            log.add_sampled(completion)
            self.sampled += len(completion.token_ids)
        finally:
            self.promised -= budget
            async with self.turn_ended:
                self.turn_ended.notify_all()
        return completion

    @contextlib.asynccontextmanager
    async def _reading(self, most: int = 0) -> AsyncIterator[None]:
        """Wait until `most` tokens are left, then read a context.

        Reading blocks the event loop of all rollouts, so the rollout's next context waits as long as this one took.
        """
        await self.read.acquire()
        began = float("inf")  # waiting for tokens, which may be cancelled, blocks no other rollout
        try:
            async with self.turn_ended:  # running turns may return some of their promised tokens
                await self.turn_ended.wait_for(lambda: not self.promised or self._left() >= most)
            began = time.monotonic()
            yield
        finally:
            seconds = time.monotonic() - began
            if seconds < UNNOTICED_S:
                self.read.release()
            else:
                asyncio.get_running_loop().call_later(seconds, self.read.release)

    async def count(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> int:
        """The number of tokens of a conversation; nothing is sampled."""
        async with self._reading():
            try:
                return len(self._ids({"messages": messages, "tools": tools}))
            except Exception as error:  # a template may raise anything about messages
                raise FailedError(f"the messages cannot be rendered: {error}") from None

    def _left(self) -> int:
        """Tokens of the rollout that are neither sampled nor promised."""
        return self.limits.max_rollout_tokens - self.sampled - self.promised

    def _refuse(self, why: str) -> Turn:
        """An empty turn past the limit `why`."""
        self.progress.end("length", why)
        self.refused += 1
        if self.refused > MAX_REFUSED:
            raise FailedError(
                f"the coroutine goes on asking for turns after {why}. End it when a turn's finish_reason is `length`."
            )
        return Turn({"role": "assistant", "content": ""}, None, np.empty(0, np.int32))

    def _log_of(self, request: Mapping[str, Any], units: Sequence[tuple[str, int]]) -> TokenLog | None:
        """The log that the engine continues for this request, with the request's ids; None if no token has room.

        Raises FailedError if the engine would refuse the ids.
        """
        texts = tuple(text for text, _ in units)
        known = [context for context in self.contexts if context.is_continued_by(request, texts)]
        context = max(known, key=lambda context: context.length, default=None)
        said: list[Message] = []  # the messages after the context
        if context is not None and (rest := units[len(context.messages or ()) :]) and "token_ids" not in request:
            said = [_with_text(message) for message in request["messages"][rest[0][1] :]]
            if any(message["role"] == "assistant" for message in said):
                context = None  # a later turn was cut or changed, so its text becomes part of a prompt
        if context is None:
            more = self._ids(request)
        elif "token_ids" in request:
            more = np.asarray(request["token_ids"][context.length :], np.int32)
        else:
            after = int(context.log.token_ids[context.length - 1])
            tools = request.get("tools")
            more = self.templates.suffix(_few(said), tools, after=after) if said else np.empty(0, np.int32)
        if (context is None and not len(more)) or ((more < 0) | (more >= self.limits.vocabulary)).any():
            raise FailedError("`generate` was called with no tokens, or with ids that the tokenizer does not have.")
        token_ids = more if context is None else np.concatenate([context.log.token_ids[: context.length], more])
        if len(token_ids) >= self.limits.max_sequence_tokens:
            if self.sampled:
                return None
            raise TooLongError(
                f"`generate` was called with {len(token_ids)} tokens; a sequence has at most "
                f"{self.limits.max_sequence_tokens}. Raise data.max_prompt_tokens or rollout.max_rollout_tokens."
            )
        asked = texts or (str(list(request["token_ids"])),)
        kind = self._kind(context, asked)
        self.kinds[kind] += 1
        self.asked.add(asked)
        if context is None or context.continued:
            log = TokenLog(token_ids.astype(np.int32))
            self.logs += [log] if kind in self.trained else []
            return log
        context.continued = True
        if len(more):
            context.log.add_said(more)
        return context.log

    def _ids(self, request: Mapping[str, Any]) -> np.ndarray:
        if "token_ids" in request:
            return np.asarray(request["token_ids"], np.int32)
        return self.templates.prompt(list(map(_with_text, _few(request["messages"]))), request.get("tools"))

    def _kind(self, context: _Context | None, texts: tuple[str, ...]) -> str:
        """The kind of a request (`KINDS`, or "continued"), given the earlier requests."""
        if context is not None and not context.continued:
            return "continued"
        if not self.kinds:
            return "first"
        if self.promised:
            return "parallel"
        if texts in self.asked:
            return "retried"
        if context is not None:
            return "branched"
        opening = _opening(texts)
        return "rewritten" if any(_opening(other) == opening for other in self.asked) else "separate"

    def _units(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
        """Parts of messages that can be compared, each with the number of its message.

        Clients add and drop fields, strip spaces after the model's text, omit its thoughts, and join messages of a
        user. So a unit is a block of text with the message's role and calls. A call is known by its id.
        """
        return [
            (json.dumps([message["role"], text, calls], sort_keys=True), number)
            for number, message in enumerate(messages)
            for calls in [[self._call(call) for call in message.get("tool_calls") or ()]]
            for text in _texts(message)
        ]

    def _call(self, call: Mapping[str, Any]) -> Any:
        if (id_ := call.get("id")) in self.calls:
            return self.calls[id_]
        arguments = call["function"].get("arguments")
        with contextlib.suppress(ValueError, TypeError):  # no JSON, or no text
            arguments = json.loads(arguments)
        return {"name": call["function"]["name"], "arguments": arguments}


async def play_coroutine(
    prompt: Prompt,
    sample: int,
    play: Play,
    *,
    generate: turns.NextTurn,
    templates: Dialogue,
    limits: turns.Limits,
    trained: Collection[str] = KINDS,
) -> Rollout:
    """Run a coroutine or program to its end. A failure is the rollout's outcome; it is never raised.

    The rollout leaves out sequences that requests of other kinds than `trained` started; its reward does not change.
    """
    branches = Branches(generate, templates, limits, trained)
    progress = branches.progress
    try:
        outcome = await play(branches)
        await branches.all_answered()
        if not branches.sampled:
            raise FailedError("the model was asked for nothing, so there is nothing to train on.")
    except (CallLimitError, FailedError) as error:
        outcome = progress.fail(error)
    await branches.all_answered()
    sequences = [sequence for log in branches.logs if (sequence := log.sequence()).response_length]
    progress.calls = dict(branches.kinds)
    progress.untrained_tokens = branches.sampled - sum(sequence.response_length for sequence in sequences)
    return progress.rollout(prompt, sample, sequences or [turns.prompt_only_sequence(prompt)], outcome)


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content.strip() if message["role"] == "assistant" else content]
    if isinstance(content, list) and all(isinstance(text, str) for text in content):
        return list(content)
    return [json.dumps(content, sort_keys=True, default=str)]  # blocks of another form; the template reads them


def _with_text(message: Mapping[str, Any]) -> Message:
    """The message for a template: parts of its content are joined to one text."""
    read = read_message(message)
    content = read["content"]
    return read if isinstance(content, str) else {**read, "content": joined(content, read["role"])}


def _few(messages: list[Any]) -> list[Any]:
    """The messages, if they are few; the time of some templates (Gemma 4's) grows with the square of their number."""
    if len(messages) > MAX_RENDERED:
        raise FailedError(f"a request has {len(messages)} new messages, but at most {MAX_RENDERED} are accepted.")
    return messages


def _opening(texts: tuple[str, ...]) -> str | None:
    """The first unit that is no system prompt, since some agents rewrite the system prompt at every call."""
    return next((text for text in texts if not text.startswith('["system"')), None)
