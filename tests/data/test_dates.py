"""data.date: every conversation of a run is written with one day, whenever and by whom it is written."""

from __future__ import annotations

import datetime
import pickle
import re
from functools import partial
from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.config.load import parse_override, validated
from rlhf.config.supervised import SFTDataConfig
from rlhf.data.conversations import SFTEncoder, pair_encoder
from rlhf.data.dialogue import Dialogue
from rlhf.data.templates import conversation_ids, reads_date, render

# as gpt-oss, Llama 3.2, SmolLM3 and Mistral Small ask for it: in a macro, behind `is defined`, in several forms
DATED = (
    "{% macro head() %}{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}"
    "{% set today = 'unknown' %}{% endif %}<{{ today }}, {{ strftime_now('%A %H:%M') }}>{% endmacro %}{{ head() }}"
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}TAG{{ m.content }}END{% else %}{{ m.content }}"
    "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
HEAD = "<02 Jan 2026, Friday 00:00>"
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
TAGS = (("", ""), ("{% generation %}", "{% endgeneration %}"))


def data(**values: Any) -> SFTDataConfig:
    return validated(SFTDataConfig, {"train": "x.jsonl", "date": "2026-01-02", **values}, section="data")


@pytest.mark.parametrize("tags", TAGS)
def test_every_conversation_of_a_run_is_written_with_its_day(tags: tuple[str, str]) -> None:
    config, tokenizer = data(), byte_tokenizer(DATED.replace("TAG", tags[0]).replace("END", tags[1]))
    assert reads_date("model", tokenizer)
    arguments = pickle.loads(pickle.dumps(config.template_arguments))  # for learners, which read them in a process
    written = [render(TALK[:1], "model", tokenizer, arguments=arguments)]
    encoders = [SFTEncoder(tokenizer, None, arguments), pair_encoder(tokenizer, "model", config.clock)]
    rows: Any = [{"messages": TALK}, {"chosen": TALK, "rejected": [*TALK[:-1], {**TALK[-1], "content": "worse"}]}]
    ids = [part.token_ids for encode, row in zip(encoders, rows, strict=True) for part in encode(row)]
    ids.append(conversation_ids(TALK, tokenizer, template="model", key="reward_model.template", arguments=config.clock))
    talk = Dialogue(tokenizer, "model", arguments, stop_ids={tokenizer.eos_token_id})
    written += [tokenizer.decode(each.tolist()) for each in (*ids, talk.prompt(TALK[:1]))]
    assert len(written) == 6
    assert [text[: len(HEAD)] for text in written] == [HEAD] * 6


def test_prompts_of_a_template_that_writes_no_day_are_the_same_with_and_without_one() -> None:
    tokenizer = byte_tokenizer()
    prompt = partial(render, TALK[:1], "model", tokenizer)
    assert prompt(arguments=data().template_arguments) == prompt(arguments=data(date=None).template_arguments)
    assert not reads_date("model", tokenizer)
    assert not reads_date("raw", byte_tokenizer(DATED))


def test_a_day_is_an_iso_date_and_the_clock_is_no_argument_of_the_user() -> None:
    given = parse_override("data.date=2026-01-02")["data"]
    assert data(**given).date == datetime.date(2026, 1, 2)
    for wrong in ("02.01.2026", "2026-02-30", "today", 20260102):
        with pytest.raises(ValueError, match=rf"^data\.date={re.escape(str(wrong))}: .*valid date.*YYYY-MM-DD"):
            data(date=wrong)
    with pytest.raises(ValueError, match=r"strftime_now: rlhf passes it itself"):
        data(chat_template_kwargs={"strftime_now": "2026"})
