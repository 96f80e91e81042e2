"""Rollouts with an environment and without an engine: a token per character, a script of turns, a session here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf.environments.turns import Answers
from rlhf.sampling.requests import Completion
from rlhf.types import Outcome, Prompt, VersionSpan

STOP = 0  # the token that ends every turn


def ids(text: str) -> np.ndarray:
    return np.array([ord(character) for character in text], np.int32)


def text(token_ids: np.ndarray) -> str:
    return "".join("|" if token == STOP else chr(token) for token in token_ids)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "call", "type": "function", "function": function}


@dataclass
class Fitted:
    messages: list[dict[str, Any]]
    token_ids: np.ndarray


class Templates:
    """`u:question|a:` for a prompt, `t:answer|a:` for what follows a turn."""

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> np.ndarray:
        named = "".join(f"[{tool['function']['name']}]" for tool in tools or ())
        said = [np.append(ids(f"{message['role'][0]}:{message['content']}"), STOP) for message in messages]
        return np.concatenate([ids(named), *said, ids("a:")]).astype(np.int32)

    def suffix(self, messages: Any, tools: Any = None, *, after: int | None = None) -> np.ndarray:
        assert all(message["role"] != "assistant" for message in messages), "the assistant's turns are sampled"
        return self.prompt(messages)

    def fit(self, messages: Any, room: int, tools: Any = None, *, after: int | None = None) -> Fitted | None:
        token_ids = self.suffix(messages)
        return Fitted(list(messages), token_ids) if len(token_ids) <= room else None

    def can_go_on(self, token_ids: np.ndarray) -> bool:
        return len(token_ids) > 0 and int(token_ids[-1]) == STOP


@dataclass
class Script:
    """The turns of a model, one after another: text, or a message with calls; `asked` has what it was to go on from."""

    turns: list[str | dict[str, Any]]
    asked: list[str] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)

    async def __call__(self, token_ids: np.ndarray, *, max_tokens: int, turn: int, recorded: int) -> Completion:
        self.asked.append(text(token_ids))
        self.budgets.append(max_tokens)
        return completion(self.turns.pop(0), max_tokens, version=turn)


def completion(said: str | dict[str, Any], max_tokens: int, *, version: int = 0, engine: int = 0) -> Completion:
    """A turn that ends with the stop token, or is cut; its log-probs are -1, -2 and so on."""
    message = {"role": "assistant", "content": said} if isinstance(said, str) else {"role": "assistant", **said}
    sampled = np.append(ids(message["content"]), STOP).astype(np.int32)[:max_tokens]
    reason = "stop" if sampled[-1:].tolist() == [STOP] else "length"
    logprobs = -np.arange(1, len(sampled) + 1, dtype=np.float32)
    spans = (VersionSpan(0, len(sampled), version),)
    return Completion(sampled, logprobs, reason, spans, engine, message)


def prompt(content: str = "hi", **columns: Any) -> Prompt:
    messages = ({"role": "user", "content": content},) if content else ()
    token_ids = Templates().prompt(messages) if content else np.empty(0, np.int32)
    return Prompt("p/1", 0, token_ids, messages, "", "p", columns)


@dataclass
class LocalSession:
    """A session in this process: `tool` answers each call, or raises what a session raises."""

    tool: Callable[[dict[str, Any]], str] = lambda call: "ok"
    outcome: Outcome = field(default_factory=Outcome)
    done_after: int = 10**9
    tools: list[dict[str, Any]] = field(default_factory=list)
    plays: bool = False
    opening: list[dict[str, Any]] | None = None
    text: str = ""
    faults: tuple[str, ...] = ()  # of each call
    calls: list[str] = field(default_factory=list)
    closed: bool = False
    coroutine: Any = None

    async def call(self, calls: Sequence[Mapping[str, Any]]) -> Answers:
        messages = []
        for each in calls:
            self.calls.append(each["function"]["name"])
            messages.append({"role": "tool", "name": each["function"]["name"], "content": self.tool(dict(each))})
        done = len(self.calls) >= self.done_after
        return Answers(tuple(messages), done=done, errors=len(self.faults), faults=self.faults)

    async def finish(self) -> Outcome:
        return self.outcome

    async def play(self, answer: Any) -> Outcome:
        outcome: Outcome = await self.coroutine(answer)
        return outcome

    async def close(self) -> None:
        self.closed = True
