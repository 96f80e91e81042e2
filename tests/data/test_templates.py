"""What the model is given: the text of each template, and its tokens without a second bos."""

from __future__ import annotations

from typing import Any

import pytest
from byte_tokenizer import byte_tokenizer

from rlhf.config.data import TemplateName
from rlhf.data.templates import conversation_ids, render, tokenize

QUESTION = [{"role": "user", "content": "What is 1+1?"}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level, and like Llama's it puts a bos before plain text."""
    return byte_tokenizer(adds_bos=True)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("model", "<s>[user]What is 1+1?[assistant]"),
        ("tulu", "<|user|>\nWhat is 1+1?\n<|assistant|>\n"),
        ("chatml", "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen-math",
            "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
            "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qa", "Question: What is 1+1?\nAnswer:"),
        ("raw", "What is 1+1?"),
    ],
)
def test_a_question_in_every_template_ends_where_the_response_begins(
    tokenizer: Any, template: TemplateName, text: str
) -> None:
    assert render(QUESTION, template, tokenizer) == text


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("model", "<s>[system]Be brief.[user]1+1?[assistant]2[user]2+2?[assistant]"),
        ("tulu", "<|system|>\nBe brief.\n<|user|>\n1+1?\n<|assistant|>\n2</s>\n<|user|>\n2+2?\n<|assistant|>\n"),
        (
            "qwen-math",  # the conversation's own system message replaces the template's
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
            "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qa", "Be brief.\nQuestion: 1+1?\nAnswer: 2\nQuestion: 2+2?\nAnswer:"),
        ("raw", "Be brief.\n\n1+1?\n\n2\n\n2+2?"),
    ],
)
def test_a_conversation_keeps_all_its_messages(tokenizer: Any, template: TemplateName, text: str) -> None:
    assert render(TALK, template, tokenizer) == text


def test_tokens_are_those_of_the_tokenizers_own_chat_template(tokenizer: Any) -> None:
    own = tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    (token_ids,) = tokenize([render(TALK, "model", tokenizer)], "model", tokenizer)
    assert token_ids.tolist() == own
    assert token_ids.dtype == "int32"


@pytest.mark.parametrize(
    ("template", "adds_bos", "bos_count"),
    [("model", True, 1), ("model", False, 1), ("raw", True, 1), ("raw", False, 0), ("qa", True, 1), ("tulu", True, 0)],
)
def test_bos_comes_from_a_chat_template_or_before_plain_text_and_never_twice(
    template: TemplateName, adds_bos: bool, bos_count: int
) -> None:
    tokenizer = byte_tokenizer(adds_bos=adds_bos)
    (token_ids,) = tokenize([render(QUESTION, template, tokenizer)], template, tokenizer)
    assert token_ids.tolist().count(tokenizer.bos_token_id) == bos_count
    assert (token_ids[0] == tokenizer.bos_token_id) == bool(bos_count)


def test_plain_text_gets_no_eos_from_a_tokenizer_that_appends_one() -> None:
    from tokenizers import processors

    tokenizer = byte_tokenizer(adds_bos=False)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    (token_ids,) = tokenize(["ab"], "raw", tokenizer)
    assert tokenizer.decode(token_ids.tolist()) == "<s>ab"


def test_a_model_without_a_chat_template_gets_a_list_of_templates() -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"data\.template=model\b.*chatml, qwen-math, tulu, qa or raw"):
        render(QUESTION, "model", tokenizer)
    assert render(QUESTION, "tulu", tokenizer).startswith("<|user|>")


def test_a_template_that_refuses_a_role_says_which() -> None:
    tokenizer = byte_tokenizer(adds_bos=False)
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"\bsystem, user, .*System role not supported.*data\.system_prompt"):
        render(TALK, "model", tokenizer)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("model", "<s>[system]Be brief.[user]1+1?[assistant]2"),
        ("tulu", "<|system|>\nBe brief.\n<|user|>\n1+1?\n<|assistant|>\n2</s>\n"),
        ("qa", "<s>Be brief.\nQuestion: 1+1?\nAnswer:2"),
        ("raw", "<s>Be brief.\n\n1+1?2"),
    ],
)
def test_a_whole_conversation_is_the_prompt_with_the_response_right_after_it(
    tokenizer: Any, template: TemplateName, text: str
) -> None:
    ids = conversation_ids(TALK[:3], tokenizer, template=template, key="reward_model.template")
    assert tokenizer.decode(ids.tolist()) == text
    if template in ("raw", "qa"):
        (prompt,) = tokenize([render(TALK[:2], template, tokenizer)], template, tokenizer)
        assert ids[: len(prompt)].tolist() == prompt.tolist()
