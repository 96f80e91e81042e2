"""A response becomes an assistant message by vLLM's parsers, whatever the model wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf.answers.thoughts import marks_in
from rlhf.learner.tiny_model import make_tokenizer
from rlhf.sampling.requests import Completion, Parsing

pytestmark = pytest.mark.slow

ADD = {"type": "integer"}
TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": ADD, "b": ADD}, "required": ["a", "b"]}}
SCHEMAS = ({"type": "function", "function": TOOL},)
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|tool_response>", "<|turn>", "<turn|>")
HERMES_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'

Say = Callable[..., dict[str, Any]]


def speaker(tools: str | None, marks: tuple[str, ...] = (), schemas: tuple[Any, ...] = SCHEMAS) -> Say:
    """A function from text to its message; the marks are control tokens, as the tokens of turns are."""
    from tokenizers import AddedToken

    from rlhf.sampling.messages import MessageReader

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    parsing = Parsing(tools, schemas, marks=marks_in("", marks))
    config = SimpleNamespace(model="model", hf_config=SimpleNamespace(model_type="qwen2"))
    reader = MessageReader(parsing, tokenizer, config)

    def say(text: str, *, prompt: str = "<|assistant|>", finish_reason: str = "stop", **options: Any) -> dict[str, Any]:
        ids, prompt_ids = (np.array(tokenizer(each)["input_ids"], np.int32) for each in (text, prompt))
        return reader.message(Completion(ids, np.zeros(len(ids)), finish_reason, ()), prompt_ids, **options)

    return say


@pytest.mark.parametrize(
    ("parsers", "text", "reasoning", "content"),
    [
        (("hermes",), f"I add. {HERMES_CALL}<|end|>", None, "I add. "),
        (("hermes", THINK + CALL), f"<think>Add!</think>{HERMES_CALL}<|end|>", "Add!", ""),
        (
            ("qwen3_coder", THINK + CALL),
            "<think>Add!</think>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n"
            "</parameter>\n</function>\n</tool_call><|end|>",
            "Add!",
            "",
        ),
        (
            ("gemma4", GEMMA),
            "<|channel>thought\nAdd!<channel|><|tool_call>call:add{a:1,b:2}<tool_call|><|end|>",
            "Add!",
            "",
        ),
        (
            ("llama3_json", ("<|python_tag|>",)),
            '{"name": "add", "parameters": {"a": 1, "b": 2}}<|end|>',
            None,
            "",
        ),
        (("pythonic",), "[add(a=1, b=2)]<|end|>", None, ""),
    ],
    ids=["hermes", "qwen3", "qwen3.5", "gemma4", "llama3", "pythonic"],
)
def test_calls_and_thoughts_are_found_though_their_marks_are_control_tokens(
    parsers: Any, text: str, reasoning: str | None, content: str
) -> None:
    message = speaker(*parsers)(text)
    (call,) = message.pop("tool_calls")
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert call["id"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    assert message == {"role": "assistant", "content": content, **thought}


@pytest.mark.parametrize("schemas", [SCHEMAS, ()], ids=["named tools", "unnamed tools"])
def test_several_calls_have_different_ids(schemas: Any) -> None:
    calls = speaker("hermes", schemas=schemas)(f"{HERMES_CALL}\n{HERMES_CALL}<|end|>")["tool_calls"]
    assert len({call["id"] for call in calls}) == 2


def test_the_id_of_a_call_is_that_of_its_text_and_place_so_that_a_run_can_be_repeated() -> None:
    texts = [f"{HERMES_CALL}<|end|>", f"{HERMES_CALL}\n<|end|>"]
    (first, again, elsewhere), (other, *_) = (
        [speaker("hermes")(text, prompt=prompt)["tool_calls"][0]["id"] for prompt in ("a", "a", "a longer one")]
        for text in texts
    )
    assert first == again
    assert len({first, elsewhere, other}) == 3


@pytest.mark.parametrize("text", ["It is 3.", "I would write `<tool_call>` first.", '{"name": "Ada"}', "[1, 2]", ""])
def test_text_that_is_no_call_is_the_content(text: str, log_records: list[logging.LogRecord]) -> None:
    assert speaker("hermes")(text + "<|end|>") == {"role": "assistant", "content": text}
    assert not log_records  # vLLM would log a traceback for each


ARGUMENTS = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("a", 1), ("b", 2)))
GEMMA_CALL = "<|tool_call>call:add{a:1,b:2}<tool_call|>"
CODER_CALL = f"<tool_call>\n<function=add>\n{ARGUMENTS}</function>\n</tool_call>"
PAIRS = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", 1), ("b", 2)))
GLM_CALL = f"<tool_call>add\n{PAIRS}</tool_call>"
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
LFM_CALL = "<|tool_call_start|>[add(a=1, b=2)]<|tool_call_end|>"
MALFORMED = [  # the parser, a call, and one that cannot be read
    (("hermes",), HERMES_CALL, HERMES_CALL.replace("}}", "}")),
    (("hermes",), HERMES_CALL, HERMES_CALL.replace("arguments", "args")),
    (("hermes",), HERMES_CALL, "<tool_call>add(1, 2)</tool_call>"),
    (("hermes",), HERMES_CALL, "<tool_call>[]</tool_call>"),
    (("hermes",), HERMES_CALL, '<tool_call>{"name": "add", "argum'),
    (("hermes", THINK + CALL), HERMES_CALL, HERMES_CALL.replace('"', "'")),
    (("qwen3_coder", THINK + CALL), CODER_CALL, HERMES_CALL),
    (("glm45", CALL), GLM_CALL, "<tool_call>\n</tool_call>"),
    (("gemma4", GEMMA), GEMMA_CALL, "<|tool_call>add(1, 2)<tool_call|>"),
    (("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")), LFM_CALL, LFM_CALL.replace(")", "")),
    (("llama3_json", ("<|python_tag|>",)), LLAMA_CALL + "; ", LLAMA_CALL.replace("}}", "}") + "; "),
    (("olmo3",), "<function_calls>\nadd(a=1, b=2)\n</function_calls>", "<function_calls>\nadd(1\n</function_calls>"),
]


@pytest.mark.parametrize(("parsers", "good", "bad"), MALFORMED)
def test_a_malformed_call_has_an_error_and_leaves_the_others_of_the_turn(parsers: Any, good: str, bad: str) -> None:
    say = speaker(*parsers)
    for text, errors in [(bad, [True]), (good + bad, [False, True]), (bad + good + good, [True, False, False])]:
        message = say(f"{text}<|end|>")
        calls = message["tool_calls"]
        assert (message["content"], ["error" in call for call in calls]) == ("", errors)
        assert all("Write it again" in call["error"] for call in calls if "error" in call)
        assert all(
            json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2} for call in calls if "error" not in call
        )
        assert len({call["id"] for call in calls}) == len(calls)
    assert "tool_calls" not in say(bad, finish_reason="length")  # a turn that was cut makes no calls anyway


@pytest.mark.parametrize("parsers", [("pythonic",), ("hermes",), ("llama3_json", ("<|python_tag|>",))])
def test_a_call_without_marks_is_known_by_the_name_of_its_tool(parsers: Any) -> None:
    texts = [
        '{"name": "add", "parameters": {"a": 1, "b" 2}}',
        '{"type": "function", "name": "add", "parameters": {"a" 1}}',
    ]
    say = speaker(*parsers)
    for text in texts if parsers[0] != "pythonic" else ["[add(a=1, b=2]"]:
        (call,) = say(f"{text}<|end|>")["tool_calls"]
        assert (call["function"]["name"], "error" in call) == ("add", True)


def test_a_mark_inside_an_argument_begins_no_call() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"text": "write <tool_call> first"}}</tool_call><|end|>'
    (call,) = speaker("hermes")(text)["tool_calls"]
    assert "error" not in call


def test_a_turn_of_marks_alone_is_read_in_a_bounded_time() -> None:
    assert len(speaker("qwen3_coder")(f"{'<tool_call>' * 5000}<|end|>")["tool_calls"]) == 32


def test_a_parser_that_raises_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    def fail(*_: Any) -> Any:
        raise IndexError("list index out of range")

    say = speaker("hermes")
    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", fail)
    (call,) = say(f"{HERMES_CALL}<|end|>")["tool_calls"]
    assert (call["function"]["name"], "error" in call) == ("add", True)
    assert say("It is 3.<|end|>") == {"role": "assistant", "content": "It is 3."}


def test_without_parsers_the_text_is_the_content() -> None:
    assert speaker(None)(f"{HERMES_CALL}<|end|>") == {"role": "assistant", "content": HERMES_CALL}


def test_text_is_a_thought_only_where_one_was_begun() -> None:
    say = speaker(None, THINK)
    assert say("It is 3.<|end|>") == {"role": "assistant", "content": "It is 3."}
    cut = say("It is", prompt="<|assistant|><think>\n", finish_reason="length")
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "It is"}
    whole = say("1 + 2</think>It is 3.<|end|>", prompt="<|assistant|><think>\n")
    assert whole == {"role": "assistant", "content": "It is 3.", "reasoning_content": "1 + 2"}
    empty = say("</think>It is 3.<|end|>", prompt="<|assistant|><think>\n")
    assert empty == {"role": "assistant", "content": "It is 3.", "reasoning_content": ""}


@pytest.mark.parametrize(
    ("parsers", "call", "begin", "end"),
    [
        *((parsers, call, *THINK) for parsers, call in {parsers: call for parsers, call, _ in MALFORMED}.items()),
        (("gemma4", GEMMA), GEMMA_CALL, "<|channel>thought\n", "<channel|>"),
        (("pythonic", ("[THINK]", "[/THINK]")), "[add(a=1, b=2)]", "[THINK]", "[/THINK]"),
    ],
)
def test_a_call_in_a_thought_is_not_made(parsers: Any, call: str, begin: str, end: str) -> None:
    """Also where a prompt teaches the form of thoughts."""
    say = speaker(*parsers)
    for text, prompt in ((f"{begin}Or {call}?", "<|assistant|>"), (f"Or {call}?", f"<|assistant|>{begin}")):
        cut = say(text, prompt=prompt, finish_reason="length")
        assert cut == {"role": "assistant", "content": "", "reasoning_content": f"Or {call}?"}
        whole = say(f"{text}{end}{call}<|end|>", prompt=prompt)
        assert (whole["reasoning_content"], len(whole["tool_calls"])) == (f"Or {call}?", 1)


def test_the_id_that_stops_a_response_is_no_text_but_a_stop_string_is() -> None:
    say = speaker("hermes")
    assert say("3;", keep_last=True)["content"] == "3;"
    assert say("3;")["content"] == "3"
    assert say("3;", finish_reason="length")["content"] == "3;"


def test_a_parser_that_needs_other_control_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rollout\.tool_parser: vLLM's parser llama3_json does not fit this model: "):
        speaker("llama3_json")
