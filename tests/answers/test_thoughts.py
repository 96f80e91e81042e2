"""Where thoughts end and the answer begins, for every family of models."""

from __future__ import annotations

import json
import time

import pytest

from rlhf.answers.thoughts import (
    OF_MODELS,
    TAGS,
    ThoughtForm,
    answer_of,
    marks_from_json,
    marks_in,
    opens_thought,
    split_thoughts,
)

FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
FORMS = [form for form in (*TAGS, *OF_MODELS) if not form.first]
FAMILIES = [(begin, end) for form in FORMS for begin in form.begins for end in form.ends]
BY_WORDS = [
    ("Here is my thought process:", "Here's my response:"),  # Granite 3.2
    ("analysis", "assistantfinal"),  # gpt-oss without its marks
    ("<think:6124c78e>", "</think:6124c78e>"),  # Hunyuan
    ("<think:v4.1>", "</think:v4.1>"),
    ("Here are my reasoning steps:\n", "\n[BEGIN FINAL RESPONSE]"),  # Apriel
    ("<|channel|>commentary to=functions.add<|message|>", FINAL),
]


@pytest.mark.parametrize(("begin", "end"), FAMILIES + BY_WORDS)
def test_the_answer_follows_the_thought_and_a_thought_that_was_cut_has_none(begin: str, end: str) -> None:
    thought = r"2 + 40 = \boxed{41}?"
    assert split_thoughts(f"{begin}{thought}{end}So 42.")[1] == answer_of(f"{begin}{thought}{end}So 42.") == "So 42."
    assert answer_of(f"{begin}{thought}") is None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.begins[0])
def test_a_prompt_may_open_the_thought(form: ThoughtForm) -> None:
    assert opens_thought(f"<|assistant|>{form.begins[0]}\n")
    assert not opens_thought(f"<|assistant|>{form.begins[0]}\n{form.ends[0]}\n\n")
    assert not opens_thought(f"Write {form.begins[0]} first.")
    assert split_thoughts(f"hm{form.ends[0]}42", in_thought=True) == ("hm", "42")
    assert split_thoughts("hm 42", in_thought=True) == ("hm 42", None)
    assert split_thoughts(f"{form.begins[0]}hm{form.ends[0]}42", in_thought=True) == ("hm", "42")


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("42", "", "42"),
        ("<think>\nhm\n</think>\n\n42", "\nhm\n", "\n\n42"),
        ("the template opened it</think>42", "the template opened it", "42"),
        ("<think>a</think> b <think>c</think> d", "a</think> b <think>c", " d"),
        ("<think>a</think> b <think>c", "a</think> b <think>c", None),
        ("<think>a <think> b</think> c", "a <think> b", " c"),
        ("<think>a</reasoning> b", "a</reasoning> b", None),  # of another form
        ("<think>a</think> b</think> c", "a</think> b", " c"),
        ("<think>a</think> b</think>\n", "a", " b</think>\n"),  # an end mark too much
        ('<think>is it "b"?</think>"c"', 'is it "b"?', '"c"'),
        ("<think>```\nb\n```</think>```py\nc\n```", "```\nb\n```", "```py\nc\n```"),
        (f"<|channel|>analysis<|message|>a{FINAL}42<|return|>", "a", "42<|return|>"),
        (f"<|channel|>analysis<|message|>a{FINAL}b<|end|><|start|>assistant<|channel|>analysis<|message|>c", ..., None),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final", ..., None),
        ("<|channel>thought\n<channel|>42", "", "42"),  # an empty one
    ],
)
def test_everything_before_the_answer_is_thought(text: str, thought: object, answer: str | None) -> None:
    found = split_thoughts(text)
    assert found == (found[0] if thought is ... else thought, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "42: a thought ends with `</think>`.",
        "42. In `<think>` I reasoned.",
        '42, between "<think>" and "</think>".',
        "42 with “</think>” and '[/THINK]'",
        "Use `re.split('<think>|</think>', s)[-1]` for 42",
        "```python\nwhole = re.sub(r'<think>.*?</think>', '', text)\n```\n42",
        "~~~\n</think>\n~~~\n42",
        "1. so:\n   ```\n   a</think>b\n   ```\n42",
        "gpt-oss writes `<|channel|>analysis<|message|>` and 42",
        '42 (thoughts stand in "<think>...</think>")',
        "42: the format was '<think> thoughts </think>'",
        "42 with 「</think>」, „</think>“, (</think>), \\texttt{</think>} and <code></think></code>",
        "42 用\"</think>\"来结束 and s.split(r'</think>')",
        'ChatML ends a turn with `<|im_end|>`, Llama with "</s>": 42',
        "not <s>41</s> but 42",
        "A call begins with `<tool_call>`; 42",
        '```python\nend = f"{text}<|im_end|></s>"\nre.findall(r"<tool_call>(.*?)</tool_call>", end)\n```',
    ],
)
def test_an_answer_that_quotes_marks_is_whole(answer: str) -> None:
    assert answer_of(answer) == answer
    assert answer_of(f"<think>hm</think>{answer}") == answer
    assert answer_of(f"hm</think>{answer}", in_thought=True) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>I will write `</think>` and then 41. Hm", None),
        ("<think>I will write `</think>`. ```py\nx</think>42 ```b```", "42 ```b```"),  # a block that was not closed
        ("```\n<think>41?", None),
        ("I `quote` and </think>42 `b`", "42 `b`"),
    ],
)
def test_quotes_hide_neither_a_thought_nor_its_end(response: str, answer: str | None) -> None:
    assert answer_of(response) == answer


def test_the_answer_has_no_frame_no_tool_trace_and_nothing_after_the_end_of_the_turn() -> None:
    assert answer_of("<think>a</think>\n<response>\n42\n</response>\n") == "\n42\n"
    assert answer_of("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>42<|END_RESPONSE|>") == "42"
    assert answer_of("<|START_THINKING|>a<|END_THINKING|><|START_TEXT|>42<|END_TEXT|>") == "42"
    assert answer_of("<think>a</think><tool_call>41</tool_call>42<|im_end|>43") == "42"
    assert answer_of("<|channel>thought\n<channel|>42<turn|>\n<|turn>user") == "42"
    assert answer_of("<think>a</think>42</think>\n") == "42"
    assert answer_of("<tool_call>`a`</tool_call>42 `b`<tool_call>") == "42 `b`"
    apriel = marks_in("{{ 'Here are my reasoning steps:\n' }}")
    assert opens_thought("<|assistant|>\nHere are my reasoning steps:\n", apriel)
    assert answer_of("41\n[BEGIN FINAL RESPONSE]\n42\n[END FINAL RESPONSE]", apriel, in_thought=True) == "42\n"
    assert answer_of("hm</think>The analysis$x$", in_thought=True) == "The analysis$x$"


def test_a_model_has_the_marks_of_its_template_and_tokens_and_every_model_has_tags() -> None:
    gemma, cohere = marks_in("{{ '<|channel>thought' }}"), marks_in("", ["<|START_THINKING|>", "<|END_THINKING|>"])
    kimi = marks_in("", ["<|open|>", "<|close|>", "<|sep|>"])
    assert [form.begins[0] for form in (*gemma, *cohere, *kimi)] == [
        "<|channel>thought\n", "<|START_THINKING|>", "<|open|>think<|sep|>",
    ]  # fmt: skip
    assert marks_in("{{ message.content.split('</think>')[-1] }}")[0].begins == ("<think>",)
    assert marks_in("{{ 'analysis' }}") == ()
    foreign = "gpt-oss begins with <|channel|>, so 42"
    assert answer_of(foreign, gemma) == foreign
    assert answer_of(foreign) is answer_of("<think>a", gemma) is answer_of("<thought>a", ()) is None
    assert answer_of("Here is my thought process: 42", ()) is not None  # plain English of any other model
    assert marks_from_json(json.loads(json.dumps(gemma))) == gemma
    assert marks_from_json(None) == OF_MODELS


@pytest.mark.parametrize(
    "repeated",
    ["<think></think>", "`</think>", "```py\n" + "a\n" * 50, "~~~~\n~~~\n", "`a\n", "a<s>", '"<', "「<", "<tool_call>"],
)
def test_the_time_is_linear_in_the_length_of_a_response(repeated: str) -> None:
    response = repeated * (100_000 // len(repeated)) + "</think>"
    started = time.process_time()
    answer_of(response)
    answer_of(f"{response}42</s>")
    assert time.process_time() - started < 2  # about 0.1
