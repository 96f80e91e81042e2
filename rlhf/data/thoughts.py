"""The marks of thoughts that a model has, by its tokenizer and chat template; `answers/thoughts.py` reads by them."""

from __future__ import annotations

from typing import Any

from rlhf.answers.thoughts import Marks, marks_in
from rlhf.config.data import TemplateName
from rlhf.data.templates import template_source


def marks_of(tokenizer: Any, template: TemplateName) -> Marks:
    """The marks of a model's thoughts (`split_thoughts`, `answer_of`); () if it has none, where tags hold all the same.

    Args:
        template: data.template.
    """
    return marks_in(template_source(template, tokenizer), [token.content for token in _added(tokenizer).values()])


def tokens_to_drop(tokenizer: Any, marks: Marks) -> frozenset[int]:
    """The ids of special tokens that are no part of a mark: without those a thought could not be told from the answer.

    transformers counts only named tokens as special; a tokenizer drops all that are added as such (gpt-oss).
    """
    written = "\n".join(mark for form in marks for mark in form.begins + form.ends)
    special = {id: token.content for id, token in _added(tokenizer).items() if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return frozenset(id for id, text in special.items() if text not in written)


def _added(tokenizer: Any) -> dict[int, Any]:
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return added
