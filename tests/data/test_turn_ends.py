"""Where a turn ends: the ids of the engines, the tokens of the template, and what of them is trained."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_tokenizer import byte_tokenizer
from worlds import make_config

from rlhf.algo.packing import pack
from rlhf.data.conversations import SFTEncoder
from rlhf.data.turns import rollout_warnings, stop_token_ids, tag_warnings, turn_ends

MARKS = ["<im>", "<end>", "<frame>", "<think>", "<return>", "<user>"]
TALK = {"messages": [{"role": role, "content": text} for role, text in (("user", "1+1?"), ("assistant", "2"))]}
FOUR = {"messages": [*TALK["messages"], {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]}


def tokenizer_of(turn: str, *, before: str = "<im>assistant\n", end: str = "") -> Any:
    """A tokenizer whose template writes `turn` for the assistant; `end`: behind the whole conversation."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}BEFORE" + turn + "{% else %}<im>{{ m.role }}\n"
        "{{ m.content }}<end>\n{% endif %}{% endfor %}{% if add_generation_prompt %}BEFORE{% else %}END{% endif %}"
    )
    tokenizer = byte_tokenizer(template.replace("BEFORE", f"{{{{ {before!r} }}}}").replace("END", end))
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    return tokenizer


def ids_of(tokenizer: Any, *tokens: str) -> frozenset[int]:
    return frozenset(tokenizer.convert_tokens_to_ids([*tokens]))


def trained(tokenizer: Any, *stops: str, row: Any = TALK) -> tuple[str, list[str]]:
    """The text of a row from the first answer on, trained parts in braces; and the warnings about it."""
    encoder = SFTEncoder(tokenizer, None, stop_ids=ids_of(tokenizer, *stops))
    ((ids, mask),) = encoder(row)
    tokens = pack([ids], [mask])
    text = encoder.shown(tokens).replace(">>>", "{").replace("<<<", "}")
    return text.partition("<im>assistant")[2].removeprefix("\n"), [*encoder.warnings(tokens)]


TAGGED = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        (TAGGED + "<end>\n", "{2<end>}"),
        ("{% generation %}{{ m.content + '<end>' }}{% endgeneration %}\n", "{2<end>}"),
        (TAGGED + "{{ '\n' }}<end>", "{2\n<end>}"),  # a line break between the tag and the end is sampled too
        (TAGGED + " <frame> <end>", "{2 <frame> <end>}"),  # and so is what the template writes before the end
        ("{% generation %}{{ '<frame>' + m.content + ' ' }}{% endgeneration %}<end>", "{<frame>2 <end>}"),
        ("{{ m.content }}<end>", "{2<end>}"),  # without tags
        ("{{ m.content }}\n<end>\n", "{2\n<end>\n}"),
    ],
)
@pytest.mark.parametrize("stops", [("<end>",), ()])
def test_the_end_of_a_turn_is_trained_though_it_is_not_the_tokenizers_eos(
    turn: str, shown: str, stops: tuple[str, ...]
) -> None:
    text, warnings = trained(tokenizer_of(turn), *stops)
    assert text == shown
    assert not stops or not warnings
    for warning in warnings:  # no file names it, so no engine would stop there
        assert warning.startswith("data.template=model: the template ends a turn with '<end>', where no engine or")
        assert "name '</s>'. " in warning
        assert f"Add {tokenizer_of(turn).convert_tokens_to_ids('<end>')} to eos_token_id" in warning
    assert len(warnings) == (not stops)


def test_every_turn_of_a_conversation_is_trained_with_its_end() -> None:
    text, warnings = trained(tokenizer_of(TAGGED + " <end>\n"), "<end>", row=FOUR)
    assert (text, warnings) == ("{2 <end>}\n<im>user\nsure?<end>\n<im>assistant\n{yes <end>}", [])


def test_rows_without_an_end_are_told_with_the_token_of_the_template() -> None:
    for turn, stops, named in (
        (TAGGED + ".<end>", ("<end>", "<return>"), "'<end>'"),  # other text than spaces is before it
        (TAGGED, ("<return>",), "'</s>' or '<return>'"),
    ):
        _, (warning,) = trained(tokenizer_of(turn), *stops)
        assert warning.startswith(f"data.train: 1 of 1 rows train no {named}, with which a response ends")


@pytest.mark.parametrize(
    ("turn", "end", "stops", "written"),
    [
        ("{{ m.content }}<end>\n", "", (), ["<end>"]),
        ("{{ m.content }}<end>\n", "</s>", ("<end>",), ["<end>"]),  # Phi 3 closes the conversation with eos
        ("{{ m.content }}<frame><end>", "", ("<end>",), ["<frame>", "<end>"]),  # Cohere
        ("{{ m.content }}<end><return>", "", ("<end>",), ["<end>"]),
        ("{{ m.content }}{{ '<return>' if loop.last else '<end>' }}", "", ("<return>",), ["<return>"]),  # gpt-oss
        ("{{ m.content }}", "", ("<im>",), []),  # GLM: the next message's mark ends a turn
        ("{{ m.content }}\n", "", (), []),
        ("{{ raise_exception('no') }}", "", ("<end>",), []),
    ],
)
def test_the_template_says_with_which_control_tokens_a_turn_ends(
    turn: str, end: str, stops: tuple[str, ...], written: list[str]
) -> None:
    tokenizer = tokenizer_of(turn, end=end)
    stop_ids = ids_of(tokenizer, "</s>", *stops)
    ends = turn_ends(tokenizer, "model", None, stop_ids)
    assert tokenizer.convert_ids_to_tokens(list(ends.written)) == written
    assert (ends.unnamed is None) == (not written or written[-1] in ("</s>", *stops))
    assert turn_ends(tokenizer, "raw", None, stop_ids).written == ()


@pytest.mark.parametrize(
    ("turn", "before", "problem"),
    [
        ("{% generation %}{{ m.content }}<end>{% endgeneration %}", "<im>assistant\n", ""),
        ("{% generation %}{{ m.content }}<end>{% endgeneration %}", "<im>assistant\n<think>\n", ""),
        # what a prompt opens a thought with may be trained
        ("{% generation %}<think>\n{{ m.content }}<end>{% endgeneration %}", "<im>assistant\n", ""),
        ("{% generation %}{{ m.content }}<end>{% endgeneration %}", "", "begin too early: '<im>assistant\\n'"),
        ("<im>{% generation %}assistant\n{{ m.content }}<end>{% endgeneration %}", "", "too early: 'assistant\\n'"),
        (
            "{% if loop.last %}" + TAGGED + "{% else %}{{ m.content }}{% endif %}<end>",
            "<im>assistant\n",
            "cover only one of two turns",
        ),
    ],
)
def test_tags_that_cover_the_header_or_leave_out_turns_cause_a_warning(turn: str, before: str, problem: str) -> None:
    head = "" if before else "{% generation %}<im>assistant\n{% endgeneration %}" * turn.startswith("{% gen")
    tokenizer = tokenizer_of(head + turn, before=before)
    if not before:
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "{% if add_generation_prompt %}", "{% if add_generation_prompt %}<im>assistant\n"
        )
    warnings = list(tag_warnings(tokenizer, "model", None))
    assert [problem in warning for warning in warnings] == [True] * bool(problem)


def test_a_header_in_the_tags_causes_a_warning_even_if_the_prompt_opens_a_thought_that_rows_lack() -> None:
    """As TRL's training template of DeepSeek-R1's distilled models."""
    tokenizer = tokenizer_of("{% generation %}<im>{{ m.content }}<end>{% endgeneration %}", before="")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{% if add_generation_prompt %}", "{% if add_generation_prompt %}<im><think>\n"
    )
    (warning,) = tag_warnings(tokenizer, "model", None)
    assert "too early: '<im>'" in warning


def test_tags_around_no_turn_are_refused_and_so_is_an_empty_turn() -> None:
    tokenizer = tokenizer_of("{% generation %}{% endgeneration %}{{ m.content }}<end>")
    with pytest.raises(ValueError, match=r"generation %\} tags of data.template=model enclose no text"):
        trained(tokenizer, "<end>")
    empty = {"messages": [TALK["messages"][0], {"role": "assistant", "content": ""}]}
    with pytest.raises(ValueError, match="messages are empty"):
        trained(tokenizer_of(TAGGED + "<end>"), "<end>", row=empty)


@pytest.mark.parametrize(
    ("config", "generation", "stops"),
    [
        ({"eos_token_id": 7}, None, {1, 7}),
        ({"eos_token_id": 7}, {"eos_token_id": [8, 9]}, {1, 8, 9}),
        ({"eos_token_id": [7, 8]}, {"do_sample": True}, {1}),  # the file stands for the whole generation config
        ({"text_config": {"eos_token_id": [1, 106]}}, None, {1, 106}),
        ({}, {"eos_token_id": None}, {1}),
    ],
)
def test_the_stop_ids_are_those_of_vllm(tmp_path: Path, config: Any, generation: Any, stops: set[int]) -> None:
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    assert stop_token_ids(str(tmp_path), byte_tokenizer()) == stops


def test_a_run_is_warned_if_its_engines_do_not_stop_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("{{ m.content }}<end>")
    end = tokenizer.convert_tokens_to_ids("<end>")
    (warning,) = rollout_warnings(make_config(tmp_path), tokenizer)
    assert "ends a turn with '<end>', where no engine or server stops: " in warning
    for rollout in ({"stop": ["<end>"]}, {"truncate_token": "<end>"}):
        assert not list(rollout_warnings(make_config(tmp_path, rollout=rollout), tokenizer))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    assert not list(rollout_warnings(make_config(tmp_path), tokenizer))


@pytest.mark.slow
def test_templates_of_real_models_end_turns_with_one_token_and_their_training_forms_train_it() -> None:
    trl = pytest.importorskip("trl")
    # their tags cover the header
    own = {"gptoss_training", "muse_glimmer_training", "deepseek_r1_distill_training", "deepseekv3_training"}
    parts = {"idefics3", "llava_next", "smolvlm"}  # they write contents as lists of parts alone
    names = []
    for file in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")):
        name, source = file.stem, file.read_text()
        tokenizer = with_tokens_of(source)
        stops = frozenset([tokenizer.eos_token_id])
        ends = turn_ends(tokenizer, "model", None, stops)
        if name.removesuffix("_training") in parts or name == "glm4moe":
            assert ends.written == ()
            continue
        assert ends.written[-1:] != ()
        names.append(name)
        if not name.endswith("_training"):
            continue
        encoder = SFTEncoder(tokenizer, None, stop_ids=frozenset([*stops, ends.written[-1]]))
        ((ids, mask),) = encoder(TALK)
        assert ids[mask][np.isin(ids[mask], ends.written[-1:])].size, name
        warnings = list(encoder.warnings(pack([ids], [mask])))
        assert ["begin too early" in warning for warning in warnings] == [True] * (name in own), (name, warnings)
    assert len(names) > 60


def with_tokens_of(source: str) -> Any:
    """A byte tokenizer with the control tokens that a template writes."""
    mark = r"<\|[\w/:]+\|>|<\|\w+>|<\w+\|>|<[a-z]+_of_[a-z]+>|<｜[^｜]+｜>|\[/?INST\]|</?think>"
    tokenizer = byte_tokenizer(source)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(mark, source)))})
    return tokenizer
