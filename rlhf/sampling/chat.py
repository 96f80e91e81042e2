"""Reads and refuses requests of chat completions, responses and Anthropic messages.

Imports no vLLM. vLLM's app validates the rest of a request and turns the messages of all three APIs into chat messages,
which the rollout worker reads (`data.messages.read_request`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT_TOKENS, MODELS = "/v1/messages/count_tokens", "/v1/models"
ROUTES = {*(("POST", path) for path in (CHAT, RESPONSES, MESSAGES, COUNT_TOKENS)), ("GET", MODELS)}

MAX_BODY_BYTES = 4 << 20  # 128,000 tokens of text are 0.5 MB, with every character escaped 3 MB
MAX_OBJECTS = 20_000  # in the text of a body: hundreds of thousands of tiny messages would block the process
MAX_VALUES, MAX_PARTS, MAX_DEPTH = 100_000, 8000, 100  # values, objects and lists, levels of a body after parsing
MAX_SHOWN = 100  # characters of a client's text in a message
NAME_OF_KEY = re.compile(r"[\w.-]{1,64}", re.ASCII)  # ignored keys with other names are not reported
MAX_CONNECTIONS = 128  # connections, and running requests, of one rollout
STRANGER_S, MAX_STRANGERS = 5.0, 256  # seconds for a connection's first key; number of connections without a key
CONNECTING = 8  # further connections without a key for each rollout, since many rollouts may start at once

# Keys that the app gets and validates. Every other key is ignored or refused.
KEPT = {
    CHAT: {"model", "messages", "tools", "tool_choice", "stream", "stream_options", "logprobs", "return_token_ids"},
    RESPONSES: {"model", "input", "instructions", "tools", "tool_choice", "stream", "include"},
    MESSAGES: {"model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens"},
    COUNT_TOKENS: {"model", "messages", "system", "tools"},
    MODELS: set(),
}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
SILENT = {*LIMITS, "user", "metadata", "store", "thinking", "reasoning", "reasoning_effort", "context_management"}
BACKLOG = 1024  # connections that wait to be accepted
ENDED = "the rollout of this key has ended"
CHANGES = "it would change the distribution that is sampled from, and trained. Remove it"


class RefusedError(Exception):
    """A request gets no turn; `message` is for its client."""

    def __init__(self, status: HTTPStatus, message: str, *, full_context: bool = False) -> None:
        super().__init__(message)
        self.status, self.message, self.full_context = status, message, full_context

    def body(self, path: str) -> dict[str, Any]:
        """The error as the API of this path writes it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = kinds.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        if path.startswith(MESSAGES):
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        code = "context_length_exceeded" if self.full_context else "invalid_api_key" if self.status == 401 else None
        return {"error": {"message": self.message, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True)
class RequestContents:
    """The contents of a request."""

    path: str
    body: dict[str, Any]  # the part that the app gets
    max_tokens: int | None
    may_call: bool  # calls in the turn are returned as calls, not as text
    ignored: tuple[str, ...]  # names of keys without effect


def error_message(body: bytes) -> str:
    """The message in the body of an error of the app."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return "the request cannot be answered"


def check_size(size: int, most: int = MAX_BODY_BYTES, what: str = "bytes") -> None:
    """Raise RefusedError for a body that has more than `most` of something."""
    if size > most:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has over {most} {what}")


def check_values(body: Any) -> None:
    """Raise RefusedError if a body has too many values or levels for the app to validate quickly."""
    values, parts, level = 0, 0, [body]
    for _ in range(MAX_DEPTH):
        check_size(values := values + sum(map(len, level)), MAX_VALUES, "values")
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [part for each in inner for part in each if isinstance(part, dict | list)]
        check_size(parts := parts + len(level), MAX_PARTS, "objects or lists")
    if level:
        raise RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has over {MAX_DEPTH} levels")


def full_context(most: int) -> RefusedError:
    """The error for a conversation of more than `most` tokens, in words that clients recognize."""
    text = f"This model's maximum context length is {most} tokens. Please reduce the length of the messages."
    return RefusedError(HTTPStatus.BAD_REQUEST, text, full_context=True)


def read_request_body(path: str, body: bytes, model: str) -> RequestContents:
    """Read the body of a request, with `model` in place of the model's name.

    Raises RefusedError if the body is too large, is no JSON object, or asks for another distribution.
    """
    if path == MODELS:
        return RequestContents(path, {}, None, False, ())
    check_size(max(body.count(b"{"), body.count(b"[")), MAX_OBJECTS, "objects or lists")
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "the body is no JSON object")
    check_values(values)
    if (key := _key_that_changes_sampling(values)) is not None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, f"{key}: {CHANGES}.")
    choice = values.get("tool_choice")
    may_call = "none" not in (choice, choice.get("type") if isinstance(choice, dict) else None)
    limits = [values[name] for name in LIMITS if values.get(name) is not None]
    if any(type(limit) is not int or limit < 1 for limit in limits):
        raise RefusedError(
            HTTPStatus.BAD_REQUEST,
            f"{str(limits)[:MAX_SHOWN]}: the maximum number of tokens must be a whole number of at least 1.",
        )
    kept, names = KEPT[path], {name for name, value in values.items() if value is not None}
    return RequestContents(
        path,
        {name: values[name] for name in kept & names} | {"model": model},
        min(limits, default=None),
        may_call,
        tuple(sorted(name for name in names - kept - SILENT if NAME_OF_KEY.fullmatch(name)))[:64],
    )


def _key_that_changes_sampling(values: Mapping[str, Any]) -> str | None:
    """A key that would change the distribution, or that the endpoint does not support."""
    choice, form, text = (values.get(name) for name in ("tool_choice", "response_format", "text"))
    form = form or (text.get("format") if isinstance(text, dict) else None)
    forced = choice.get("type", "") if isinstance(choice, dict) else choice
    if forced not in (None, "auto", "none"):
        return f"tool_choice={str(forced)[:MAX_SHOWN]}"
    if isinstance(form, dict) and form.get("type") != "text":
        return "a response format"
    if values.get("n") not in (None, 1):
        return "n above 1"
    names = ("logit_bias", "structured_outputs", "use_beam_search", "previous_response_id", "background")
    return next((name for name in names if values.get(name)), None)
