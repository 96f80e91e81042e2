"""Keeps control tokens such as <|im_end|> or <think> inside the contents of messages as plain text.

A tokenizer reads the string of an added token as that token, whoever wrote it, so a tool's answer could end or open a
turn. Before a message is rendered, a mark is put into every such string in its contents. The rendered text is split at
the marks, and each piece is tokenized by itself. A text without such strings is tokenized as usual.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

MARK = "\ufdd0"  # a noncharacter of Unicode; if a text already has it, it is doubled
MARKS = re.compile(f"({MARK}{MARK}?)")


class ControlTokens:
    """The control tokens of a tokenizer and its template.

    These are added tokens that are special, that the template writes, or that are not in the vocabulary of plain text.
    Other added tokens, such as runs of spaces or <h1>, are pieces of text.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        words = backend.get_vocab(with_added_tokens=False) if backend is not None else {}
        control = [
            text
            for text, special in added.items()
            if len(text) > 1 and text.strip() and (special or text in template or text not in words)
        ]
        self._any, self._special = _pattern(control), _pattern([text for text in control if added[text]])

    def as_text(self, value: Any, *, special_only: bool = False) -> Any:
        """The value (text, or lists and dicts with text) with marks, after which `split` finds no control token.

        `special_only`: mark special tokens alone, since a message of the model may contain <think>.
        """
        if isinstance(value, str):
            return self._marked(value, self._special if special_only else self._any)
        marked = partial(self.as_text, special_only=special_only)
        if isinstance(value, dict):  # names that are identifiers stay, since templates look them up
            return {name if str(name).isidentifier() else marked(name): marked(each) for name, each in value.items()}
        return [marked(each) for each in value] if isinstance(value, list | tuple) else value

    def _marked(self, text: str, pattern: re.Pattern[str]) -> str:
        if MARK in text:
            text = text.replace(MARK, MARK + MARK)
        # strings may overlap; the end of the first one may then still be a control token
        while pattern.search(text):
            text = pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], text)
        return text


def _pattern(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # the latter matches nothing


@lru_cache(maxsize=16)
def control_tokens(tokenizer: Any, template: str) -> ControlTokens:
    """The control tokens of a tokenizer and the source of a chat template; cached."""
    return ControlTokens(tokenizer, template)


def split(text: str) -> list[str]:
    """The pieces of a rendered text between the marks; each is tokenized by itself."""
    pieces = [""]
    for part in MARKS.split(text):
        if part == MARK:
            pieces.append("")
        else:
            pieces[-1] += MARK if part == MARK + MARK else part
    return pieces


def without_marks(text: str) -> str:
    """A rendered text as a person reads it."""
    return "".join(split(text))
