"""Which tokens of a row of supervised data are trained, for each kind of template, and which rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.algo.packing import pack
from rlhf.config.data import TemplateName
from rlhf.config.supervised import SFTDataConfig
from rlhf.data.conversations import Examples, SFTEncoder, load_examples, pair_conversations, pair_encoder

TURNS = "{% for m in messages %}[{{ m.role }}]BODY{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = TURNS.replace("BODY", "{{ m.content }}</s>")
TAGGED = TURNS.replace(
    "BODY",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}</s>",
)
# as Qwen3's: a thought is written in the last turn only
FORGETS = TURNS.replace(
    "BODY", "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}</s>"
)


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TALK = [say("user", "1+1?"), say("assistant", "2"), say("user", "sure?"), say("assistant", "yes")]
THOUGHTS = [say("user", "1+1?"), say("assistant", "<think>hm</think>2"), say("user", "sure?")]
THOUGHTS.append(say("assistant", "<think>well</think>yes"))


def trained(tokenizer: Any, row: dict[str, Any], template: TemplateName | None = None) -> str:
    """The text of a row, with its trained parts in angle brackets."""
    encoder = SFTEncoder(tokenizer, template)
    ((ids, mask),) = encoder(row)
    assert (ids.dtype, mask.dtype) == (np.int32, bool)
    return encoder.shown(pack([ids], [mask])).replace(">>>", "<").replace("<<<", ">")


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_every_turn_of_the_assistant_is_trained_with_its_end_and_nothing_else(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    expected = "[user]1+1?</s>[assistant]<2</s>>[user]sure?</s>[assistant]<yes</s>>"
    assert trained(tokenizer, {"messages": TALK}) == expected
    # what follows the last turn has no part in it
    assert trained(tokenizer, {"messages": [*TALK, say("user", "ok")]}) == expected


def test_of_two_turns_in_a_row_the_beginning_of_the_second_is_not_trained() -> None:
    row = {"messages": [*TALK[:2], say("assistant", "yes")]}
    assert trained(byte_tokenizer(PLAIN), row) == "[user]1+1?</s>[assistant]<2</s>>[assistant]<yes</s>>"


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_column_with_the_system_message_is_written_before_the_messages(column: str) -> None:
    tokenizer, brief = byte_tokenizer(PLAIN), {column: "Be brief."}
    expected = "[system]Be brief.</s>[user]1+1?</s>[assistant]<2</s>>"
    shared = [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    for row in (
        {"messages": TALK[:2]},
        {"conversations": [{"from": "system", "value": ""}, *shared]},
        {"messages": [say("system", "Be brief."), *TALK[:2]]},
        {"prompt": TALK[:1], "completion": "2"},
    ):
        assert trained(tokenizer, {**brief, **row}) == expected
        assert trained(tokenizer, {column: "", **row}).endswith("[user]1+1?</s>[assistant]<2</s>>")
    pair = pair_conversations({"prompt": "1+1?", "chosen": "2", "rejected": "3", **brief})
    assert [side[0] for side in pair] == 2 * [say("system", "Be brief.")]
    with pytest.raises(ValueError, match=f"`{column}` is 'Be brief.', but the messages have another system message"):
        trained(tokenizer, {"messages": [say("system", "Be long."), *TALK[:2]], **brief})


def test_a_row_has_arguments_of_its_own_for_the_template() -> None:
    tokenizer = byte_tokenizer("{{ style }}{{ depth }}" + PLAIN)
    encoder = SFTEncoder(tokenizer, None, {"style": "calm", "depth": 1})
    for given in ({"style": "rude", "mood": "x", "none": None}, '{"style": "rude", "mood": "x"}'):
        ((ids, _),) = encoder({"messages": TALK[:2], "chat_template_kwargs": given})
        assert tokenizer.decode(ids).startswith("rude1[user]")
    assert dict(encoder.notes) == {"`chat_template_kwargs` has `mood`, which the template does not read": 2}
    (chosen, _) = pair_encoder(tokenizer, "model")(
        {"prompt": "1+1?", "chosen": "2", "rejected": "3", "chat_template_kwargs": {"style": "rude"}}
    )
    assert tokenizer.decode(chosen.token_ids).startswith("rude[user]")
    for wrong, problem in (
        ({"padding": 1, "tools": [1]}, "has padding, tools, which rlhf pas"),
        ("x", "is 'x', not an object"),
    ):
        with pytest.raises(ValueError, match=problem):
            encoder({"messages": TALK[:2], "chat_template_kwargs": wrong})


@pytest.mark.parametrize("template", [PLAIN, TAGGED, FORGETS])
def test_of_prompt_and_completion_the_turns_of_the_completion_are_trained(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    expected = "[user]1+1?</s>[assistant]2</s>[user]sure?</s>[assistant]<yes</s>>"
    assert trained(tokenizer, {"prompt": TALK[:3], "completion": TALK[3:]}) == expected
    assert trained(tokenizer, {"prompt": TALK[:3], "completion": "yes", "messages": None}) == expected


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_what_a_tool_says_between_two_turns_is_not_trained(template: str) -> None:
    completion = [say("assistant", "f()"), say("tool", "3", name=None), say("assistant", "3.")]
    row = {"prompt": TALK[:1], "completion": completion}
    assert trained(byte_tokenizer(template), row) == (
        "[user]1+1?</s>[assistant]<f()</s>>[tool]3</s>[assistant]<3.</s>>"
    )


FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'


@pytest.mark.parametrize(
    "tools",
    [
        f"[{FUNCTION}]",
        [json.loads(FUNCTION)],
        [json.loads(FUNCTION)["function"]],  # xLAM
        [{"type": "function", **json.loads(FUNCTION)["function"]}],  # the Responses API
        [{"name": "f", "input_schema": {"type": "object"}}],  # Anthropic
    ],
)
def test_tools_are_written_where_the_template_writes_them(tools: Any) -> None:
    tokenizer = byte_tokenizer("{{ tools | tojson }}" + PLAIN)
    row = {"messages": TALK[:2], "tools": tools}
    assert trained(tokenizer, row) == f"[{FUNCTION}][user]1+1?</s>[assistant]<2</s>>"


def test_a_template_that_rewrites_earlier_turns_is_refused_unless_the_last_turn_alone_is_trained(
    tmp_path: Path,
) -> None:
    tokenizer = byte_tokenizer(FORGETS)
    assert trained(tokenizer, {"prompt": THOUGHTS[:3], "completion": THOUGHTS[3:]}) == (
        "[user]1+1?</s>[assistant]2</s>[user]sure?</s>[assistant]<<think>well</think>yes</s>>"
    )
    with pytest.raises(
        ValueError, match=r"data\.train: row 2 of \S+: data\.template=model: .* says: the thought of mes"
    ):
        load(tmp_path, tokenizer, {"messages": THOUGHTS[:2]}, {"messages": THOUGHTS})
    shortens = byte_tokenizer(FORGETS.replace("</think>", "|"))
    with pytest.raises(ValueError, match=r"data\.template=model: .*otherwise") as refusal:
        trained(shortens, {"messages": [say("user", "1+1?"), say("assistant", "hm|2"), *TALK[2:]]})
    assert "'hm|2</s>' becomes '2</s>[user]'. Give only its last turn as completion" in str(refusal.value)
    assert "{% generation %}" in str(refusal.value)


def test_two_texts_are_prompt_completion_and_eos_unless_a_template_is_named() -> None:
    row = {"prompt": "1+1 =", "completion": " 2"}
    assert trained(byte_tokenizer(), row) == "1+1 =< 2</s>>"
    assert trained(byte_tokenizer(adds_bos=True), row) == "<s>1+1 =< 2</s>>"
    assert trained(byte_tokenizer(), {**row, "completion": " 2</s>"}) == "1+1 =< 2</s>>"
    assert trained(byte_tokenizer(), row, "qa") == "Question: 1+1 =\nAnswer:< 2</s>>"
    assert trained(byte_tokenizer(PLAIN), row, "model") == "[user]1+1 =</s>[assistant]< 2</s>>"
    assert trained(byte_tokenizer(), row, "tulu") == "<|user|>\n1+1 =\n<|assistant|>\n< 2</s>\n>"


def test_the_first_token_is_never_trained_since_nothing_predicts_it() -> None:
    assert trained(byte_tokenizer(), {"prompt": "", "completion": "abc"}) == "a<bc</s>>"


def test_texts_whose_tokens_merge_where_they_meet_are_refused_with_what_to_change() -> None:
    tokenizer = byte_tokenizer(merges=[("\u0120", "2")])
    assert trained(tokenizer, {"prompt": "1+1 =", "completion": " 2"}) == "1+1 =< 2</s>>"
    with pytest.raises(ValueError, match=r"^data\.template=raw: .*' '.*' 2</s>'"):
        trained(tokenizer, {"prompt": "1+1 = ", "completion": "2"})


@pytest.mark.parametrize(
    ("row", "template", "problem"),
    [
        ({"messages": TALK[:1]}, None, "no message of the assistant to train on"),
        ({"prompt": TALK, "completion": TALK[:1]}, None, "no message of the assistant to train on"),
        ({"messages": TALK[1:2]}, None, "its first message is the assistant's"),
        ({"messages": []}, None, "`messages` is [], neither text nor messages"),
        (
            {"text": "1+1 = 2", "n": None},
            None,
            "it has no `prompt`, only text. Give each row `messages`, or `prompt` and",
        ),
        ({"prompt": "1+1", "answer": "2"}, None, "it has no `completion`, only prompt, answer"),
        ({"messages": [say("user", "a"), {"from": "gpt"}]}, None, "`messages` holds {'from': 'gpt'}, not a message"),
        ({"messages": [{"role": "user", "content": [1]}]}, None, "a content with the part 1: only text"),
        ({"prompt": "a", "completion": "b\0"}, None, "`completion` holds a NUL"),
        ({"messages": TALK}, "qa", "a row has one answer, at its end"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused(row: dict[str, Any], template: TemplateName | None, problem: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        trained(byte_tokenizer(PLAIN), row, template)
    assert problem in str(refusal.value)


def test_a_template_whose_tags_are_empty_trains_nothing_and_is_refused() -> None:
    tokenizer = byte_tokenizer(
        TAGGED.replace("{{ m.content }}{% endgeneration %}", "{% endgeneration %}{{ m.content }}")
    )
    with pytest.raises(ValueError, match=r"no token of the row is trained: the .* enclose no text"):
        trained(tokenizer, {"messages": TALK})


def load(folder: Path, tokenizer: Any, *rows: dict[str, Any], **settings: Any) -> Examples:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig.model_validate({"train": str(folder / "rows.jsonl"), **settings})
    return load_examples(config, "train", SFTEncoder(tokenizer, config.template))


def test_long_and_bad_rows_are_counted_and_the_others_become_one_flat_array(tmp_path: Path) -> None:
    short, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a"}
    long = {"prompt": "a" * 10, "completion": "b"}
    loaded = load(tmp_path, byte_tokenizer(), short, long, bad, short, max_tokens=9, on_bad_row="skip")
    assert (loaded.rows, loaded.too_long, len(loaded.bad_rows)) == (2, 1, 1)
    assert "row 3 of" in loaded.bad_rows[0]
    assert loaded.tokens.cu_seqlens.tolist() == [0, 3, 6]
    assert loaded.tokens.response_mask.tolist() == [False, True, True] * 2
    with pytest.raises(ValueError, match=r"data\.train: .*\b1\b.*data\.max_tokens=9\b"):
        load(tmp_path, byte_tokenizer(), long, max_tokens=9)


def test_several_files_are_one_set_and_a_bad_row_is_named_with_its_file(tmp_path: Path) -> None:
    for name, rows in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x", "completion": "y"}\n' * rows)
    paths = [str(tmp_path / "a.jsonl"), {"path": str(tmp_path / "b.jsonl")}]
    config = SFTDataConfig.model_validate({"train": paths})
    assert load_examples(config, "train", SFTEncoder(byte_tokenizer(), None)).rows == 5
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"^data\.train\.1: row 1 of \S+b\.jsonl: it has no `prompt`"):
        load_examples(config, "train", SFTEncoder(byte_tokenizer(), None))


def test_rows_in_which_no_end_is_trained_bring_a_warning(tmp_path: Path) -> None:
    talk = {"messages": TALK}
    endless = byte_tokenizer(TURNS.replace("BODY", "{{ m.content }}\n"))
    (warning,) = SFTEncoder(endless, None).warnings(load(tmp_path, endless, talk, talk).tokens)
    assert warning.startswith("data.train: 2 of 2 rows train no '</s>'")
    ending = byte_tokenizer(PLAIN)
    assert not list(SFTEncoder(ending, None).warnings(load(tmp_path, ending, talk).tokens))


BETTER, WORSE = TALK[1:2], [say("assistant", "3")]


@pytest.mark.parametrize(
    "columns",
    [
        {"chosen": TALK[:1] + BETTER, "rejected": TALK[:1] + WORSE},
        {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
        {"prompt": TALK[:1], "chosen": BETTER, "rejected": WORSE},
        {"prompt": TALK[:1], "chosen": "2", "rejected": TALK[:1] + WORSE},
        {"prompt": "1+1?", "chosen": TALK[:1] + BETTER, "rejected": WORSE},
        {"prompt": json.dumps(TALK[:1]), "chosen": json.dumps(BETTER), "rejected": "3"},
        {"prompt": "1+1?", "chosen": BETTER[0], "rejected": {"from": "gpt", "value": "3"}},
    ],
)
def test_a_pair_is_two_whole_conversations_or_two_answers_to_a_prompt(columns: dict[str, Any]) -> None:
    assert pair_conversations(columns) == (TALK[:1] + BETTER, TALK[:1] + WORSE)


def test_a_pair_is_written_with_the_tools_and_the_system_message_of_its_prompt() -> None:
    tokenizer = byte_tokenizer("{{ tools | tojson }}" + PLAIN)
    brief = say("system", "Be brief.")
    row = {"prompt": [brief, *TALK[:1]], "chosen": TALK[:1] + BETTER, "rejected": WORSE, "tools": f"[{FUNCTION}]"}
    chosen, rejected = (tokenizer.decode(side.token_ids) for side in pair_encoder(tokenizer, "model")(row))
    assert chosen == f"[{FUNCTION}][system]Be brief.</s>[user]1+1?</s>[assistant]2</s>"
    assert rejected == chosen.replace("2</s>", "3</s>")
    with pytest.raises(ValueError, match="the template writes no tools"):
        pair_encoder(byte_tokenizer(PLAIN), "model")(row)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"chosen": TALK[:2], "rejected": TALK[2:]}, "different prompts: '1+1?' and 'sure?'"),
        ({"chosen": TALK, "rejected": [*TALK[:2], say("user", "why?"), *BETTER]}, "different prompts: 'sure?' and 'wh"),
        ({"chosen": TALK[:2], "rejected": [say("system", "Be brief."), *TALK[:1], *WORSE]}, "different prompts"),
        ({"prompt": "2+2?", "chosen": TALK[:2], "rejected": TALK[:1] + WORSE}, "`prompt` is '2+2?', but `chosen` has"),
        ({"prompt": TALK[2:3], "chosen": BETTER, "rejected": TALK[:1] + WORSE}, "`prompt` is 'sure?', but `rejected`"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": "2"}, "are equal"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": TALK[:2]}, "are equal"),
        ({"chosen": TALK[:3], "rejected": TALK[:1] + WORSE}, "`chosen` ends with a message of user"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": WORSE + TALK[2:3]}, "`rejected` ends with a message of user"),
        ({"prompt": "1+1?", "chosen": "2", "rejected": " "}, "the answer of `rejected` is empty"),
        ({"chosen": TALK[:2], "rejected": TALK}, "is a prefix of the other"),
        ({"chosen": TALK[:2]}, "it has no `rejected`, only chosen"),
        ({"chosen": "2", "rejected": "3"}, "it has no `prompt`, only chosen, rejected. Give each row `prompt`, or"),
    ],
)
def test_pairs_that_compare_no_two_answers_to_one_prompt_are_refused(columns: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        pair_conversations(columns)
    assert problem in str(refusal.value)
