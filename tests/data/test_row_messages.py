"""What rows and requests hold becomes messages of one form, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf.data.messages import read_messages, read_request

USER = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def read(*messages: Any) -> list[dict[str, Any]]:
    return read_messages(list(messages), "messages", "user")


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"function": {"name": "f", "arguments": {"x": 1}, "description": None}, "id": None, "index": 0},
        {"name": "f", "arguments": '{"x": 1}'},
        {"name": "f", "parameters": {"x": 1}},
        {"type": "tool_use", "name": "f", "input": {"x": 1}},
    ],
)
def test_a_call_in_any_form_has_a_type_and_an_object_of_arguments(call: dict[str, Any]) -> None:
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert read({"role": "assistant", "content": None, "tool_calls": [call]}) == [expected]
    assert read({"role": "assistant", "tool_calls": json.dumps([call])}) == [expected]
    assert read({"from": "function_call", "value": json.dumps(call)}) == [expected]
    assert read({"role": "assistant", "tool_calls": [{**call, "id": "c1"}]})[0]["tool_calls"] == [{"id": "c1", **CALL}]


def test_answers_of_tools_stand_in_the_order_of_their_calls() -> None:
    calls = {"role": "assistant", "tool_calls": [{"id": "a", **CALL}, {"id": 7, **CALL}]}
    answers = [{"role": "tool", "tool_call_id": id, "content": str(id)} for id in (7, "a")]
    assert [message["content"] for message in read(USER, calls, *answers)[2:]] == ["a", "7"]
    assert [message["content"] for message in read_request([USER, calls, *answers])[2:]] == ["a", "7"]
    unknown = {**answers[1], "tool_call_id": "b"}
    assert [message["content"] for message in read(USER, calls, answers[0], unknown)[2:]] == ["7", "a"]
    without = {"role": "assistant", "tool_calls": [CALL, CALL]}
    assert [message["content"] for message in read(USER, without, *answers)[2:]] == ["7", "a"]


def test_the_call_of_an_earlier_api_is_a_call_and_its_answer_that_of_a_tool() -> None:
    first, second = read(
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
        {"role": "function", "name": "f", "content": "2"},
    )
    assert (first["tool_calls"], second) == ([CALL], {"role": "tool", "name": "f", "content": "2"})


@pytest.mark.parametrize(
    ("written", "arguments"), [("", {}), ("{}", {}), (None, {}), ("null", {}), ('{"a": null}', {"a": None})]
)
def test_no_arguments_are_an_empty_object_and_a_null_in_them_stays(written: Any, arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": written}}
    assert read({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("written", ["{'x': 1}", '{"x": 1', "[1]", '"x"', 3, [1]])
def test_arguments_that_are_no_object_are_refused_with_the_call(written: Any) -> None:
    with pytest.raises(ValueError, match=r"`messages` holds a call of f whose arguments are .*, not a JSON object"):
        read({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": written}}]})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_a_thought_has_one_name(name: str) -> None:
    expected = [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    assert read({"role": "assistant", "content": "a", name: "hm"}) == expected
    assert read({"role": "assistant", "content": "a", name: "hm", "reasoning_details": [{"text": "hm"}]}) == expected
    assert read({"role": "assistant", "content": "a", name: None, "reasoning_details": [{"text": "hm"}]}) == expected


@pytest.mark.parametrize(
    "part",
    [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]},
    ],
)
def test_a_thought_in_parts_of_its_own_or_as_a_summary_is_read(part: dict[str, Any]) -> None:
    expected = [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    assert read({"role": "assistant", "content": [part, {"type": "text", "text": "a"}]}) == expected


def test_the_json_text_of_messages_is_read_whatever_name_stands_first() -> None:
    said = [{"name": "Al", "role": "user", "content": "q"}]
    assert read_messages(json.dumps(said), "prompt", "user") == said
    for text in ('[{"name": "Al"}]', "[{x}] is a set?"):
        assert read_messages(text, "prompt", "user") == [{"role": "user", "content": text}]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", None])
def test_the_texts_of_parts_are_joined(kind: str | None) -> None:
    parts = [{"type": kind, "text": "a"}, {"type": kind, "text": "b", "image_url": None}]
    assert read({"role": "user", "content": parts}) == [{"role": "user", "content": "a\nb"}]
    assert read({"role": "assistant", "content": parts}) == [{"role": "assistant", "content": "ab"}]


def test_messages_may_be_json_text_and_other_json_stays_text() -> None:
    assert read_messages(json.dumps([USER]), "prompt", "user") == [USER]
    assert read_messages(json.dumps([{"from": "human", "value": "q"}]), "prompt", "user") == [USER]
    for text in ("[1, 2]", '{"a": 1}', '[{"role": "admin"}]', '[{"content": "x"}]', '{"role": "user", "content": "q"}'):
        assert read_messages(text, "prompt", "user") == [{"role": "user", "content": text}]


@pytest.mark.parametrize("text", ["[{'role': 'user', 'content': 'q'}]", '[{"role": "user", "content": "q"}'])
def test_what_looks_like_messages_and_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^`prompt` is .* looks like messages but is not JSON\. Write a list"):
        read_messages(text, "prompt", "user")


def test_names_of_sharegpt_are_read() -> None:
    said = [("system", "s"), ("human", "q"), ("gpt", "a"), ("observation", "o"), ("tool", "t")]
    found = read(*({"from": who, "value": text} for who, text in said))
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "o"), ("tool", "t")
    ]  # fmt: skip


def test_names_that_parquet_fills_with_null_are_left_out() -> None:
    nothing = {"id": None, "type": None, "function": None}
    empty = {"tool_calls": None, "reasoning": None, "name": None, "content": None, "function_call": {"name": None}}
    assert read({"role": "assistant", **empty, "content": "a"}) == [{"role": "assistant", "content": "a"}]
    assert read({"role": "assistant", "content": "a", "tool_calls": [nothing]}) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (None, "holds None, not a message"),
        ({"role": "human", "content": "q"}, "not a message. Write messages as"),
        ({"role": "user", "content": 3}, "whose content is 3, not text. Write it as text"),
        ({"role": "tool", "content": {"a": 1}}, "whose content is {'a': 1}, not text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "`messages` holds images"),
        ({"role": "user", "content": [{"type": "input_audio", "data": "u"}]}, "`messages` holds images"),
        ({"role": "user", "content": [{"type": "tool_result", "content": "5"}]}, "only text is read"),
        ({"role": "assistant", "content": "a", "thinking": ["hm"]}, "whose thinking is ['hm'], not text"),
        ({"role": "assistant", "content": "a", "thinking": "x", "reasoning": "y"}, "two thoughts that differ"),
        ({"role": "user", "content": "a", "reasoning": "y"}, "only the assistant has them"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "only the assistant has them"),
        ({"role": "assistant", "tool_calls": [{"function": "f(1)"}]}, "not a call. Write calls as"),
        ({"role": "assistant", "tool_calls": '"abc"'}, "not a list of calls, nor the JSON text of one."),
        ({"role": "assistant", "tool_calls": "f(1)"}, "nor the JSON text of one. Write calls as"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]},
            "half a surrogate pair",
        ),
        ({"role": "assistant", "tool_calls": 3}, "`tool_calls` that are 3, not a list"),
        ({"role": "assistant", "tool_calls": "[" * 100_000}, "nor the JSON text of one. Write calls as"),
        ({"role": "assistant", "reasoning_details": "hm"}, "reasoning_details is 'hm', not a list of parts"),
        ({"role": "assistant", "reasoning_details": [{"text": 3}]}, "reasoning_details is 3, not text"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": ["hm"]}]}, "not a list of parts"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": {"a": 1}}]}, "not text"),
        ({"from": ["human"], "value": "q"}, "not a message. Write messages as"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_column_and_the_remedy(message: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^`messages` holds") as refusal:
        read(message)
    assert problem in str(refusal.value)


def test_the_messages_of_a_request_keep_what_templates_read() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert read_request(
        [
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": [block, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
            {"role": "tool", "tool_call_id": "c1", "content": [block]},
            {"role": "assistant", "content": "x", "reasoning": "hm", "annotations": []},
        ]
    ) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": ["a", "b"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        {"role": "tool", "content": "a", "tool_call_id": "c1"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
    ]


def test_arguments_that_the_model_has_written_wrong_stay_as_they_are_in_a_request() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{x"}}
    assert read_request([{"role": "assistant", "content": "", "tool_calls": [call]}])[0]["tool_calls"] == [call]
