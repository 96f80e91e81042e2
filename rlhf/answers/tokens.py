"""A cleaned answer -> tokens of mathematics."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf.answers.node import UnsupportedError
from rlhf.answers.units import SYMBOLS

MAX_TOKENS = 20_000

FUNCTIONS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg",
    "exp", "sqrt", "max", "min", "gcd", "lcm", "abs", "floor", "ceil", "det",
])  # fmt: skip
# Spellings of a token: kind -> value -> commands, signs and words
SPELLINGS = {
    "rel": {
        "=": r"= == \equiv", "<": r"< \lt", ">": r"> \gt", "<=": r"<= =< \le \leq \leqslant",
        ">=": r">= => \ge \geq \geqslant", "!=": r"!= \ne \neq", "in": r"\in in", "~": r"\approx \simeq \sim",
    },
    "op": {"*": r"* \cdot \times \ast times", "/": r"/ \div", ":": r": \colon to", "^": "^ **"},
    "sep": {",": ", ;", "and": r"and \land \wedge", "or": r"or \lor \vee"},
    "cmd": {
        "pi": "pi", "infty": "infinity inf oo", "bmod": r"mod \mod", "cup": "cup union", "sqrt": "sqrt", "frac": "frac",
        "abs": "abs", "{": r"\lbrace", "}": r"\rbrace", "theta": "theta", "alpha": "alpha", "beta": "beta",
    },
}  # fmt: skip
MEANINGS = {
    spelling: (kind, value)
    for kind, values in SPELLINGS.items()
    for value, spellings in values.items()
    for spelling in spellings.split()
}
TEXTS = {
    **{"to": ("op", ":"), "is": ("rel", "="), "equals": ("rel", "=")},
    **dict.fromkeys(("and", "et", "und"), ("sep", "and")),
    **dict.fromkeys(("or", "and/or", "ou", "oder"), ("sep", "or")),
}
TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<matrix>\\begin\s*\{(?:[pbBvV]?matrix|smallmatrix|array)\})
    |(?P<text>\\text\s*\{(?P<inside>(?:[^{}]|\{[^{}]*\})*)\})
    |(?P<num>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d\d?(?:,\d\d)+,\d{3}(?!\d)|\d+)(?:\.\d+|\.(?!\.|[a-zA-Z]))?(?:[eE][-+]?\d{1,5}(?![\d.]))?|\.\d+(?:[eE][-+]?\d{1,5})?)
    |(?P<cmd>\\(?:[a-zA-Z]+|[{}|%$&_\\\#]))
    |(?P<word>[A-Za-z]+)
    |(?P<op><=|>=|!=|==|=<|=>|\*\*|.)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """kind: num, cmd, let, word, text, sep, rel, op or matrix; `spaced`: white space comes before it."""

    kind: str
    value: str
    spaced: bool


def tokenize(text: str, *, thousands: bool = True) -> list[Token]:
    """Tokens of a cleaned answer. With `thousands`, `1,234` outside of brackets is one number.

    Raises UnsupportedError if the answer is too long, or has an unfinished matrix.
    """
    tokens: list[Token] = []
    position, depth, spaced = 0, 0, False
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None  # the last alternative takes anything
        kind, value, position = match.lastgroup or "", match[0], match.end()
        if kind == "num" and "," in value and (depth > 0 or not thousands):
            value = value[: value.index(",")]
            position = match.start() + len(value)
        if kind == "matrix":
            end = text.find("\\end", position)
            if end < 0:
                raise UnsupportedError("unfinished matrix")
            value = match[0][6:].strip(" {}") + "|" + text[position:end]
            position = text.find("}", end) + 1 or len(text)
        depth += (value in ("(", "[", "\\{")) - (value in (")", "]", "\\}"))
        if kind != "space":
            meanings = _meanings(kind, match["inside"].strip() if kind == "text" else value, tokens, spaced=spaced)
            tokens += [Token(*meaning, spaced and not index) for index, meaning in enumerate(meanings)]
        spaced = kind == "space"
        if len(tokens) > MAX_TOKENS:
            raise UnsupportedError("too long")
    return tokens


def _meanings(kind: str, value: str, before: list[Token], *, spaced: bool) -> list[tuple[str, str]]:
    """The kind and value of each token that one match of TOKEN stands for."""
    match kind:
        case "num":
            return [("num", value.replace(",", ""))]
        case "text":
            return [TEXTS.get(value.strip(" ,.").lower(), ("text", value))] if value else []
        case "word":
            return _meanings_of_word(value, before, spaced=spaced)
        case "cmd" if value not in MEANINGS:
            return [("cmd", value[1:])]
    return [MEANINGS.get(value, (kind, value))]


def _meanings_of_word(word: str, before: list[Token], *, spaced: bool) -> list[tuple[str, str]]:
    """A word as a known name, a unit, a product of variables or prose."""
    follows_value = bool(before) and (before[-1].kind in ("num", "let") or before[-1].value in ("}", ")"))
    if (word == "in" and before and before[-1].kind == "num") or (
        len(word) == 2 and word.lower() in SYMBOLS and word.lower() not in MEANINGS and follows_value
    ):
        return [("text", word)]
    if word.lower() in MEANINGS:
        return [MEANINGS[word.lower()]]
    if word in FUNCTIONS:
        return [("cmd", word)]
    is_product = word.isupper() or sorted(word) == list(word)
    if len(word) <= 2 or (len(word) == 3 and is_product and not (spaced and follows_value)):
        return [("let", letter) for letter in word]
    return [("text", word)]
