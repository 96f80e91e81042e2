"""Each form of row with small templates: all that a row says stands in the rendered text, or the row is refused."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.data.conversations import SFTEncoder, pair_encoder
from rlhf.data.forms import Conversation
from rlhf.data.messages import read_messages
from rlhf.data.templates import render

TURNS = "{% for m in messages %}[{{ m.role }}]BODY</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}ARGUMENTS</call>{% endfor %}"
AS_OBJECT = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_TEXT = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
JOINED_TEXT = CALLS.replace("ARGUMENTS", "{{ '(' + c.function.arguments + ')' }}")
ITEMS = CALLS.replace("ARGUMENTS", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
THINKS = "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}{{ m.content }}"
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def template(body: str, begin: str = "") -> Any:
    return byte_tokenizer(begin + TURNS.replace("BODY", body))


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
        **more,
    }


def read(*messages: Any) -> list[dict[str, Any]]:
    return read_messages(list(messages), "messages", "user")


def trained(tokenizer: Any, *messages: dict[str, Any], last: bool = False, **columns: Any) -> str:
    """The text of a row, with what is trained at its end in brackets."""
    talk = list(messages)
    row = {"prompt": talk[:-1], "completion": talk[-1:]} if last else {"messages": talk}
    ((ids, mask),) = SFTEncoder(tokenizer, None)({**row, **columns})
    start = int(mask.argmax())
    assert mask[start:].all()
    return f"{tokenizer.decode(ids[:start].tolist())}⟦{tokenizer.decode(ids[start:].tolist())}⟧"


@pytest.mark.parametrize("arguments", ['{"a": 2}', {"a": 2}])
@pytest.mark.parametrize(
    ("body", "written"),
    [(AS_OBJECT, '{"a": 2}'), (AS_TEXT, '{"a": 2}'), (JOINED_TEXT, '({"a": 2})'), (ITEMS, "a=2;")],
)
def test_arguments_are_given_as_the_template_writes_json(body: str, written: str, arguments: Any) -> None:
    tokenizer = template("{{ m.content }}" + body)
    expected = f"[user]1+1?</s>[assistant]⟦<call>f{written}</call></s>⟧"
    assert trained(tokenizer, USER, calling(arguments)) == expected
    prompt = render([USER, *read(calling(arguments)), {"role": "tool", "content": "2"}], "model", tokenizer)
    assert prompt == f"[user]1+1?</s>[assistant]<call>f{written}</call></s>[tool]2</s>[assistant]"


def test_calls_that_a_template_writes_for_a_null_content_alone_are_written() -> None:
    tokenizer = template("{% if m.content is none %}" + AS_OBJECT + "{% else %}{{ m.content }}{% endif %}")
    assert "<call>f{}</call>" in trained(tokenizer, USER, calling({}))
    with pytest.raises(
        ValueError, match=r"^data\.template=model: the template leaves out .*: the call of f of message 2"
    ):
        trained(tokenizer, USER, calling({}, content="See:"))


@pytest.mark.parametrize("body", ["{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}<call>{% endif %}"])
def test_a_call_that_a_template_does_not_write_is_refused_in_a_row_and_in_a_prompt(body: str) -> None:
    problem = r"the template leaves out what the row says: the call of f of message 2 and 1 more\. Name a template"
    with pytest.raises(ValueError, match=problem):
        trained(template(body), USER, calling({"a": "x"}), {"role": "tool", "content": "2"}, ANSWER)
    with pytest.raises(ValueError, match=problem):
        render([USER, *read(calling({"a": "x"})), USER], "model", template(body))


def test_a_message_of_a_tool_that_a_template_drops_is_refused_though_its_text_stands_elsewhere() -> None:
    body = "{% if m.role != 'tool' %}{{ m.content }}" + AS_OBJECT + "{% endif %}"
    with pytest.raises(ValueError, match=r"leaves out what the row says: the content of message 3\."):
        trained(template(body), USER, calling({}), {"role": "tool", "content": "2"}, ANSWER)


def test_a_text_that_a_template_cuts_is_refused_with_its_message() -> None:
    body = "{{ m.content.split('||')[-1] }}"
    assert trained(template(body), USER, ANSWER)
    with pytest.raises(ValueError, match=r"leaves out what the row says: the content of message 1\."):
        trained(template(body), {"role": "user", "content": "If a||b?"}, ANSWER)


def test_a_text_is_found_as_a_template_escapes_it() -> None:
    text = ' He said: "x\n  y" \\frac é '
    for body in ("{{ m.content | tojson }}", "{{ m.content | trim }}", "{{ m.content.replace('\\n', ' ') }}",
                 "{{ m.content.replace(\"'\", \"\\\\'\") }}"):  # fmt: skip
        assert trained(template(body), {"role": "user", "content": text + "it's"}, ANSWER)


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking", "inline", "part"])
@pytest.mark.parametrize("known", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_a_thought_is_given_under_the_name_that_the_template_reads(known: str, given: str) -> None:
    turn: dict[str, Any] = {**ANSWER, given: "hm"}
    if given == "inline":
        turn = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}
    elif given == "part":
        turn = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "2"}]}
    tokenizer = template(THINKS.replace("NAME", known))
    assert trained(tokenizer, USER, turn) == "[user]1+1?</s>[assistant]⟦<think>hm</think>2</s>⟧"


def test_a_thought_in_the_content_stays_there_where_the_template_knows_none() -> None:
    turn = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}
    assert trained(template("{{ m.content }}"), USER, turn).endswith("[assistant]⟦<think>\nhm\n</think>\n\n2</s>⟧")
    with pytest.raises(ValueError, match=r"leaves out what the row says: the thought of message 2\. .*<think>"):
        trained(template("{{ m.content }}"), USER, {**ANSWER, "reasoning": "hm"})


def test_tags_that_are_no_thought_of_the_template_stay_in_the_content() -> None:
    turn = {"role": "assistant", "content": "<reasoning>hm</reasoning>2"}
    tokenizer = template(THINKS.replace("NAME", "reasoning_content"))
    assert trained(tokenizer, USER, turn).endswith("⟦<reasoning>hm</reasoning>2</s>⟧")


FORGETS = "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
FIRST = {**ANSWER, "reasoning_content": "hm"}
TWO = [USER, FIRST, {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes", "thinking": "well"}]


def test_thoughts_of_earlier_turns_may_be_dropped_from_a_prompt_and_not_from_what_is_trained() -> None:
    tokenizer = template(FORGETS)
    expected = "[user]1+1?</s>[assistant]2</s>[user]sure?</s>[assistant]⟦<think>well</think>yes</s>⟧"
    assert trained(tokenizer, *TWO, last=True) == expected
    assert render(read(*TWO[:3]), "model", tokenizer) == "[user]1+1?</s>[assistant]2</s>[user]sure?</s>[assistant]"
    with pytest.raises(
        ValueError, match=r"the thought of message 2\. Give only the last turn as completion and the rest"
    ):
        trained(tokenizer, *TWO)


# as DeepSeek-R1's: the prompt opens a thought, and a turn is written without one
STRIPS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] | trim }}"
    + AS_TEXT
    + "</s>{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    "turn",
    [
        {**ANSWER, "reasoning_content": "hm"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "assistant", "content": "hm\n</think>\n\n2"},
    ],
)
@pytest.mark.parametrize("tagged", [False, True])
def test_a_turn_goes_on_where_the_prompt_has_opened_its_thought(turn: dict[str, Any], tagged: bool) -> None:
    source = STRIPS.replace("{{ m.content", "{% generation %}{{ m.content").replace("</s>", "</s>{% endgeneration %}")
    tokenizer = byte_tokenizer(source if tagged else STRIPS)
    assert trained(tokenizer, USER, turn) == "[user]1+1?</s>[assistant]<think>\n⟦hm\n</think>\n\n2</s>⟧"
    later = [USER, turn, {"role": "user", "content": "sure?"}, {**ANSWER, "content": "yes"}]
    assert trained(tokenizer, *later, last=True) == (
        "[user]1+1?</s>[assistant]2</s>[user]sure?</s>[assistant]<think>\n⟦\n</think>\n\nyes</s>⟧"
    )
    assert trained(tokenizer, USER, calling('{"a": 2}', thinking="hm")).endswith(
        '<think>\n⟦hm\n</think>\n\n<call>f{"a": 2}</call></s>⟧'
    )
    with pytest.raises(
        ValueError, match=r"the thought of message 2 and 1 more\. Give only the last turn as completion and the rest"
    ):
        trained(tokenizer, USER, turn, USER, turn)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [TOOLS[0]["function"]]])
def test_tools_that_a_template_does_not_write_are_refused(tools: Any) -> None:
    assert "Adds." in trained(template("{{ m.content }}", "{{ tools | tojson }}"), USER, ANSWER, tools=tools)
    with pytest.raises(ValueError, match=r"^data\.template=model: the template writes no tools, .*take the tools away"):
        trained(template("{{ m.content }}"), USER, ANSWER, tools=tools)
    assert trained(template("{{ m.content }}"), USER, ANSWER, tools=[])


def test_contents_are_given_in_parts_to_a_template_that_writes_no_text() -> None:
    tokenizer = template(
        "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    )
    assert trained(tokenizer, USER, ANSWER) == "[user]1+1?</s>[assistant]⟦2</s>⟧"


def test_ids_of_calls_are_made_where_the_template_asks_for_them() -> None:
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}<call {{ c.id }}>{{ c.function.name }}{% endfor %}"
    body += "{% if m.role == 'tool' %} of {{ m.tool_call_id }}{% endif %}"
    answers = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    twice = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}, {"name": "g", "id": "own"}]}
    prompt = render(read(USER, calling({}), answers[0], twice, *answers), "model", template(body))
    assert prompt == (
        "[user]1+1?</s>[assistant]<call call00000>f</s>[tool]4 of call00000</s>"
        "[assistant]<call call00001>f<call own>g</s>[tool]4 of call00001</s>[tool]5 of own</s>[assistant]"
    )


def test_conversations_that_differ_in_their_texts_and_ids_alone_have_one_structure() -> None:
    def key(text: str, id: str) -> str:
        call = {"id": id, "function": {"name": "f", "arguments": {"a": text}}}
        answer = {"role": "tool", "content": text, "tool_call_id": id}
        return Conversation(read(USER, {"role": "assistant", "tool_calls": [call]}, answer), None, ()).key

    assert key("x", "call_a1") == key("y", "call_b2") != key("y", "call_b22")


def test_ids_of_calls_are_replaced_where_the_template_refuses_them() -> None:
    ids = "{% if i | length != 9 %}{{ raise_exception('length 9!') }}{% endif %}{{ i }}"  # as Mistral's templates do
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}{% set i = c.id %}<call IDS>{% endfor %}"
    body += "{% if m.role == 'tool' %}{% set i = m.tool_call_id %} of IDS{% endif %}"
    calls = [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in ("call_a1", "call_b2")]
    answers = [{"role": "tool", "content": id, "tool_call_id": id} for id in ("call_b2", "call_a1")]
    talk = read(USER, {"role": "assistant", "tool_calls": calls}, *answers)
    with_names = template(body.replace("<call", "<call {{ c.function.name }}").replace("IDS", ids))
    assert render(talk, "model", with_names) == (
        "[user]1+1?</s>[assistant]<call f call00000><call f call00001></s>"
        "[tool]call_a1 of call00000</s>[tool]call_b2 of call00001</s>[assistant]"
    )


def test_a_developer_is_a_system_message_where_the_template_does_not_know_him() -> None:
    told = {"role": "developer", "content": "Be brief."}
    assert render([told, USER], "model", template("{{ m.content }}")).startswith("[system]Be brief.</s>")
    knows = template("{% if m.role == 'developer' %}{% endif %}{{ m.content }}")
    assert render([told, USER], "model", knows).startswith("[developer]Be brief.</s>")


@pytest.mark.parametrize("name", ["raw", "qa"])
def test_plain_text_writes_no_call_and_no_thought(name: str) -> None:
    assert "2" in render([USER, ANSWER, USER], name, byte_tokenizer())
    for message in (calling({}), {"role": "tool", "content": "7"}):
        if name == "raw" and message["role"] == "tool":
            assert "7" in render([USER, message], name, byte_tokenizer())
        else:
            with pytest.raises(ValueError, match=rf"^data\.template={name}"):
                render(read(USER, message, USER), name, byte_tokenizer())


def test_templates_of_the_wheel_write_calls_and_thoughts_as_their_model_does() -> None:
    trl = pytest.importorskip("trl", reason="the bench extra")
    folder = Path(trl.__file__).parent / "chat_templates"
    found = {path.stem: byte_tokenizer(path.read_text()) for path in folder.glob("*.jinja")}
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    for name in ("qwen2_5", "qwen3", "llama3_1", "gptoss", "glm4moe", "qwen3_5_think", "deepseekv3", "nemotron_3_nano"):
        text = trained(found[name], USER, {"role": "assistant", "content": None, "tool_calls": [call]}, last=True)
        assert "add" in text.partition("⟦")[2]
        assert '\\"' not in text.partition("⟦")[2]
    for name in ("qwen3_8", "deepseekv3", "deepseek_r1_distill"):
        text = trained(found[name], USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"})
        assert text.partition("⟦")[0].endswith("<think>\n")
        assert text.partition("⟦")[2].startswith("hm\n</think>\n\n2")
    turn = {"role": "assistant", "content": "<think>hm</think>2"}
    assert "analysis<|message|>hm<|end|>" in trained(found["gptoss"], USER, turn)
    with pytest.raises(ValueError, match=r"does not write this turn behind the prompt .*enable_thinking"):
        trained(found["qwen3_5_nothink"], USER, turn)


@pytest.mark.slow
def test_no_template_of_the_wheel_drops_what_a_row_says_in_silence() -> None:
    pytest.importorskip("trl", reason="the bench extra")
    from tools.template_table import lines

    table = "\n".join(lines())
    assert "SILENT" not in table
    pages = Path(__file__).parents[2].glob("docs/**/*.md")
    assert any(table in page.read_text() for page in pages), "run python tools/template_table.py"


def test_turns_that_are_not_to_be_trained_and_unclear_thoughts_are_refused() -> None:
    tokenizer = template(THINKS.replace("NAME", "reasoning_content"))
    with pytest.raises(
        ValueError, match=r"^message 2 has weight=0, but every assistant turn .* as `prompt`, and the last one as"
    ):
        trained(tokenizer, USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1})
    with pytest.raises(ValueError, match=r"^message 2 has weight=0"):
        SFTEncoder(tokenizer, "raw")({"messages": [USER, {**ANSWER, "weight": 0}]})
    for content in ("<think>a</think>b<think>c</think>d", "Well. <think>a</think>b", "<think>a</think>b</think>c"):
        with pytest.raises(ValueError, match=r"^message 2 has several thoughts, or one that is not at its begin"):
            trained(tokenizer, USER, {"role": "assistant", "content": content})
    quoted = {"role": "assistant", "content": "<think>a</think>It ends with `</think>`."}
    assert "<think>a</think>It ends with `</think>`." in trained(tokenizer, USER, quoted)


def test_what_a_template_does_not_write_of_pairs_is_counted_by_side() -> None:
    notes = Counter[str]()
    encode = pair_encoder(template(FORGETS), "model", notes=notes)
    encode({"prompt": TWO[:3], "chosen": [TWO[3]], "rejected": [{**TWO[3], "content": "no", "toxic": True}]})
    assert dict(notes) == {
        "the template drops thoughts of earlier turns, as it does when the model is asked": 2,
        "messages have `toxic`, which the template does not read": 1,
    }


def test_a_template_that_only_names_tools_is_used_and_said() -> None:
    names = "{% for t in tools or [] %}{{ (t.function or t).name }}{% endfor %}"
    encoder = SFTEncoder(template("{{ m.content }}", names), None)
    encoder({"messages": [USER, ANSWER], "tools": TOOLS})
    assert dict(encoder.notes) == {"the template names tools without their descriptions": 1}


def test_what_a_template_does_not_write_is_counted() -> None:
    encoder = SFTEncoder(template(FORGETS), None)
    encoder({"prompt": TWO[:3], "completion": [{**TWO[3], "toxic": False, "turn": 3}]})
    encoder({"prompt": [{**USER, "name": "Al"}], "completion": [{**ANSWER, "toxic": True}]})
    assert dict(encoder.notes) == {
        "the template drops thoughts of earlier turns, as it does when the model is asked": 1,
        "messages have `name`, which the template does not read": 1,
        "messages have `toxic`, which the template does not read": 2,
        "messages have `turn`, which the template does not read": 1,
    }
    reads = SFTEncoder(template("{{ m['name'] }}: {{ m.content }}"), None)
    reads({"prompt": [{**USER, "name": "Al"}], "completion": [ANSWER]})
    assert not reads.notes
