"""What a session takes from a request of any API, and what it refuses before the app of vLLM sees it."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import pytest

from rlhf.sampling.chat import (
    CHAT,
    MAX_BODY_BYTES,
    MESSAGES,
    RESPONSES,
    RefusedError,
    check_size,
    error_message,
    read_request_body,
)

USER = {"role": "user", "content": "q"}


def asked(path: str = CHAT, **values: Any) -> Any:
    return read_request_body(path, json.dumps(values).encode(), "policy")


def test_the_session_decides_the_sampling_and_says_what_it_ignores() -> None:
    taken = asked(model="gpt-9", messages=[USER], temperature=0.1, top_p=0.5, seed=3, stream=True, max_tokens=7)
    assert taken.body == {"model": "policy", "messages": [USER], "stream": True}
    assert taken.ignored == ("seed", "temperature", "top_p")
    assert taken.max_tokens == 7


@pytest.mark.parametrize(
    "values",
    [
        {"n": 2},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_object"}},
        {"text": {"format": {"type": "json_schema"}}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tool_choice": {"type": "any"}},
        {"structured_outputs": {"regex": "a"}},
        {"previous_response_id": "resp_1"},
        {"max_tokens": 0},
        {"max_tokens": "8"},
        {"max_output_tokens": True},
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_what_would_change_the_distribution_is_refused(path: str, values: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        asked(path, messages=[USER], **values)
    assert refused.value.status == HTTPStatus.BAD_REQUEST


@pytest.mark.parametrize("values", [{"n": 1}, {"tool_choice": "auto"}, {"response_format": {"type": "text"}}])
def test_what_changes_nothing_is_not_refused(values: dict[str, Any]) -> None:
    assert asked(messages=[USER], **values).body["messages"] == [USER]


def test_a_choice_of_no_tool_keeps_calls_text() -> None:
    assert not asked(messages=[USER], tool_choice="none").may_call
    assert not asked(MESSAGES, messages=[USER], tool_choice={"type": "none"}).may_call
    assert asked(messages=[USER]).may_call


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 9000, b'{"a": ' * 9000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedError):
        read_request_body(CHAT, body, "policy")


def test_many_tiny_messages_and_long_bodies_are_refused_before_they_are_read() -> None:
    with pytest.raises(RefusedError) as refused:
        read_request_body(CHAT, b'{"messages": [' + b"{}," * 400_000 + b"{}]}", "policy")
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    with pytest.raises(RefusedError):
        check_size(MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b'{"messages": [' + b"1," * 1_000_000 + b"1]}", "100000 values"),
        (b"{" + b",".join(b'"k%d":1' % number for number in range(200_000)) + b"}", "100000 values"),
        (b'{"messages": [' + b"{}," * 9000 + b"{}]}", "8000 objects or lists"),
        (b'{"tools": ' + b'{"a": ' * 150 + b"1" + b"}" * 150 + b"}", "100 levels"),
    ],
    ids=["numbers", "keys", "messages", "levels"],
)
def test_a_body_of_many_parts_is_refused_before_the_app_validates_it(body: bytes, most: str) -> None:
    with pytest.raises(RefusedError, match=f"over {most}") as refused:
        read_request_body(CHAT, body, "policy")
    assert refused.value.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE


def test_a_long_conversation_with_calls_is_read() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{" * 5 + "}" * 5}}
    turns = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}] * 1000
    assert len(asked(messages=turns).body["messages"]) == 2000


def test_names_of_ignored_keys_can_be_shown_and_messages_are_short() -> None:
    names = {"top_k", "x" * 65, "\x1b[31m", "a\nb", "\u202e", "", *(f"k{number:03}" for number in range(200))}
    sent: dict[str, Any] = dict.fromkeys(names, 1)
    ignored = asked(messages=[USER], **sent).ignored
    assert set(ignored) < {"top_k", *(f"k{number:03}" for number in range(200))}
    assert len(ignored) == 64
    for values in ({"max_tokens": ["x" * 1_000_000]}, {"tool_choice": "x" * 1_000_000}):
        with pytest.raises(RefusedError) as refused:
            asked(messages=[USER], **values)
        assert len(refused.value.message) < 300


def test_an_error_has_the_form_of_its_api() -> None:
    full = RefusedError(HTTPStatus.BAD_REQUEST, "too long", full_context=True)
    assert full.body(CHAT)["error"]["code"] == "context_length_exceeded"
    assert full.body(MESSAGES) == {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}
    unknown = RefusedError(HTTPStatus.UNAUTHORIZED, "no key")
    assert unknown.body(CHAT)["error"]["code"] == "invalid_api_key"
    assert unknown.body(MESSAGES)["error"]["type"] == "authentication_error"


def test_what_the_app_says_of_an_error_is_kept() -> None:
    assert error_message(b'{"error": {"message": "no"}}') == "no"
    assert error_message(b"<html>") == error_message(b"[]") == "the request cannot be answered"
