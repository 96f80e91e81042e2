"""A cleaned answer -> tokens of mathematics."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf.rewards.answers.errors import UnsupportedError
from rlhf.rewards.answers.units import SYMBOLS

MAX_TOKENS = 20_000

FUNCTIONS = frozenset(
    [
        "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln",
        "lg", "exp", "sqrt", "max", "min", "gcd", "lcm", "abs", "floor", "ceil", "det",
    ]
)  # fmt: skip
WORDS = {
    "pi": ("cmd", "pi"), "infinity": ("cmd", "infty"), "inf": ("cmd", "infty"), "oo": ("cmd", "infty"),
    "mod": ("cmd", "bmod"), "and": ("sep", "and"), "or": ("sep", "or"), "theta": ("cmd", "theta"),
    "alpha": ("cmd", "alpha"), "beta": ("cmd", "beta"), "times": ("op", "*"), "in": ("rel", "in"), "to": ("op", ":"),
    "sqrt": ("cmd", "sqrt"), "frac": ("cmd", "frac"), "cup": ("cmd", "cup"), "union": ("cmd", "cup"),
}  # fmt: skip
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "=<": "<=", "=>": ">=", "!=": "!=", "==": "=",
    "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\lt": "<",
    "\\gt": ">", "\\ne": "!=", "\\neq": "!=", "\\in": "in", "\\approx": "~", "\\simeq": "~", "\\sim": "~",
    "\\equiv": "=",
}  # fmt: skip
TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<matrix>\\begin\s*\{(?:[pbBvV]?matrix|smallmatrix|array)\})
    |(?P<text>\\text\s*\{(?P<inside>(?:[^{}]|\{[^{}]*\})*)\})
    |(?P<num>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|\.(?!\.|[a-zA-Z]))?(?:[eE][-+]?\d{1,5}(?![\d.]))?|\.\d+(?:[eE][-+]?\d{1,5})?)
    |(?P<cmd>\\(?:[a-zA-Z]+|[{}|%$&_\\\#]))
    |(?P<word>[A-Za-z]+)
    |(?P<rel><=|>=|!=|==|=<|=>|[=<>])
    |(?P<op>\*\*|.)""",
    re.VERBOSE | re.DOTALL,
)


class Token(NamedTuple):
    """kind: num, cmd, let, word, text, sep, rel, op or matrix; `spaced`: white space comes before it."""

    kind: str
    value: str
    spaced: bool


def tokenize(text: str, *, thousands: bool = True) -> list[Token]:
    """Tokens of a cleaned answer.

    Args:
        thousands: read `1,234` outside of brackets as one number.

    Raises:
        UnsupportedError: too long, or with an unfinished matrix.
    """
    tokens: list[Token] = []
    position, depth, spaced = 0, 0, False
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None  # the last alternative takes anything
        kind, value, position = match.lastgroup or "", match[0], match.end()
        if kind == "inside":
            kind = "text"
        if kind == "space":
            spaced = True
            continue
        if kind == "num" and "," in value and (depth > 0 or not thousands):
            value = value[: value.index(",")]
            position = match.start() + len(value)
        if kind == "matrix":
            end = text.find("\\end", position)
            if end < 0:
                raise UnsupportedError("unfinished matrix")
            tokens.append(Token("matrix", match[0][6:].strip(" {}") + "|" + text[position:end], spaced))
            position = text.find("}", end) + 1 or len(text)
        else:
            depth += (value in ("(", "[", "\\{")) - (value in (")", "]", "\\}"))
            _add(tokens, kind, value, match["inside"] or "", spaced)
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise UnsupportedError("too long")
    return tokens


def _add(tokens: list[Token], kind: str, value: str, inside: str, spaced: bool) -> None:
    if kind == "num":
        tokens.append(Token("num", value.replace(",", ""), spaced))
    elif kind == "text":
        word = inside.strip(" ,.").lower()
        if word == "to":
            tokens.append(Token("op", ":", spaced))
        elif word in ("is", "equals"):
            tokens.append(Token("rel", "=", spaced))
        elif word in ("and", "or", "and/or"):
            tokens.append(Token("sep", "or" if "or" in word else "and", spaced))
        elif inside.strip():
            tokens.append(Token("text", inside.strip(), spaced))
    elif kind == "cmd":
        if value in RELATIONS:
            tokens.append(Token("rel", RELATIONS[value], spaced))
        elif value == "\\colon":
            tokens.append(Token("op", ":", spaced))
        elif value in ("\\lor", "\\vee", "\\land", "\\wedge"):
            tokens.append(Token("sep", "or" if value in ("\\lor", "\\vee") else "and", spaced))
        else:
            tokens.append(Token("cmd", value[1:], spaced))
    elif kind == "rel":
        tokens.append(Token("rel", RELATIONS[value], spaced))
    elif kind == "word":
        _add_word(tokens, value, spaced)
    elif value in (",", ";"):
        tokens.append(Token("sep", ",", spaced))
    else:
        tokens.append(Token("op", "^" if value == "**" else value, spaced))


def _add_word(tokens: list[Token], word: str, spaced: bool) -> None:
    """Add a word as a known name, a unit, a product of variables or prose."""
    if word == "in" and tokens and tokens[-1].kind == "num":
        tokens.append(Token("text", word, spaced))
    elif word.lower() in WORDS and len(word) > 1:
        tokens.append(Token(*WORDS[word.lower()], spaced))
    elif word in FUNCTIONS:
        tokens.append(Token("cmd", word, spaced))
    elif len(word) == 2 and word.lower() in SYMBOLS and _ends_a_value(tokens):
        tokens.append(Token("text", word, spaced))
    elif len(word) <= 2 or (
        len(word) == 3 and not (spaced and _ends_a_value(tokens)) and (word.isupper() or sorted(word) == list(word))
    ):
        for index, letter in enumerate(word):
            tokens.append(Token("let", letter, spaced and index == 0))
    else:
        tokens.append(Token("text", word, spaced))


def _ends_a_value(tokens: list[Token]) -> bool:
    return bool(tokens) and (tokens[-1].kind in ("num", "let") or tokens[-1].value in ("}", ")"))
