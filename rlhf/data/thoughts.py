"""Finds the marks of a model's thoughts in its tokenizer and chat template; `answers/thoughts.py` uses them."""

from __future__ import annotations

from typing import Any

from rlhf.answers.thoughts import Marks, marks_in
from rlhf.config.data import TemplateName
from rlhf.data.templates import template_source


def marks_of(tokenizer: Any, template: TemplateName) -> Marks:
    """The marks of a model's thoughts, for `split_thoughts` and `answer_of`; () if it has none: tags still count."""
    return marks_in(
        template_source(template, tokenizer), [token.content for token in tokenizer.added_tokens_decoder.values()]
    )


def tokens_to_drop(tokenizer: Any, marks: Marks) -> frozenset[int]:
    """The ids of special tokens that are no part of a mark; marks are kept to tell a thought from the answer.

    transformers lists only named tokens as special, but a tokenizer drops all that were added as special (gpt-oss).
    """
    written = "\n".join(mark for form in marks for mark in form.begins + form.ends)
    special = {id: token.content for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return frozenset(id for id, text in special.items() if text not in written)
