"""Parsers of letters, indices and LaTeX commands: fractions, roots, functions, sums, brackets, matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf.answers.node import EULER, IMAGINARY, INFINITY, PI, Node, UnsupportedError, number, numeral
from rlhf.answers.tokens import FUNCTIONS, Token, tokenize

if TYPE_CHECKING:
    from rlhf.answers.tree import Parser

CALLABLE_LETTERS = frozenset("fghFGHPQE")  # before a bracket, these are functions, not factors
NUMBER_SETS = {"R": "reals", "N": "naturals", "Z": "integers", "Q": "rationals", "C": "complexes"}


def letter(p: Parser, name: str) -> Node:
    if name in CALLABLE_LETTERS and (label := _function_of_a_letter(p, name)) is not None:
        return label
    return EULER if name == "e" else IMAGINARY if name == "i" else Node("sym", name=name)


def _function_of_a_letter(p: Parser, name: str) -> Node | None:
    """f(2), f'(2), f^{-1}(2) and P(A|B), whose inside is only a name; None if no bracket follows."""
    start = p.position
    while p.accept("op", "'"):
        name += "'"
    if [p.peek(ahead).value for ahead in range(5)] == ["^", "{", "-", "1", "}"]:
        p.position += 5
        name += "^-1"
    if not p.at("op", "(") or p.now.spaced:
        p.position = start
        return None
    inside = p.position
    try:
        return Node("call", p.group(keep=True).args, f"?{name}")
    except UnsupportedError:
        p.position = inside + 1
    depth, words = 1, ""
    while depth and not p.at("end"):
        token = p.take()
        depth += (token.value == "(") - (token.value == ")")
        words += token.value
    return Node("call", (Node("sym", name=words),), f"?{name}")


def indexed(p: Parser, node: Node) -> Node:
    index = _raw(p)
    if node.kind in ("sym", "const"):
        return Node("sym", name=f"{node.name}_{index}")
    if node.kind != "num" or node.value.denominator != 1 or not re.fullmatch(r"\d{1,3}", index, re.ASCII):
        p.fail()
    return Node("base", (node, number(int(index))))


def _raw(p: Parser) -> str:
    """The next token, or the tokens of {...}, as a string: an index."""
    if not p.accept("op", "{"):
        return p.take().value
    depth, text = 1, ""
    while not p.at("end"):
        token = p.take()
        depth += (token.value == "{") - (token.value == "}")
        if depth == 0:
            return text
        text += token.value
    p.fail()


def bars(p: Parser, kind: str, value: str) -> Node:
    """|a|, after its first bar."""
    p.bars += 1
    inner = p.sum()
    p.bars -= 1
    p.expect(kind, value)
    return Node("call", (inner,), "abs")


def _braced(p: Parser) -> Node:
    r"""\{a, b\}, or \{x : condition\}."""
    if p.accept("cmd", "}"):
        return Node("set")
    inner = p.nested(bars=1, colon_ends=True)
    if p.accept("op", ":", "|") or p.accept("cmd", "mid"):
        inner = Node("builder", (inner, p.nested(colon_ends=True)))
    p.expect("cmd", "}")
    if inner.kind == "builder":
        return inner
    return Node("set", inner.args if inner.kind == "list" else (inner,))


def _argument(p: Parser) -> Node:
    """The argument of a LaTeX command: a group, one digit of a number, or one primary."""
    if p.at("num") and p.now.value.isdigit() and len(p.now.value) > 1:
        digits = p.now.value
        p.tokens[p.position] = Token("num", digits[1:], False)
        return numeral(digits[0])
    return p.primary()


def function(p: Parser, name: str) -> Node:
    power = base = None
    while mark := p.accept("op", "^", "_"):
        if mark.value == "^":
            power = p.script()
        else:
            base = _argument(p)
    arguments = _function_arguments(p)
    if name in ("sin", "cos", "tan") and power is not None and power.kind == "neg" and power.args[0].value == 1:
        name, power = "arc" + name, None
    if name == "exp" and base is None and len(arguments) == 1:
        node = Node("pow", (EULER, *arguments))
    else:
        node = Node("call", (*arguments, base) if base is not None else arguments, name)
    return node if power is None else Node("pow", (node, power))


def _function_arguments(p: Parser) -> tuple[Node, ...]:
    if p.at("op", "("):
        return p.group(keep=True).args
    if p.at("matrix"):
        return (p.primary(),)
    node = p.signed_factor()
    while p.starts_factor() and not (p.at("cmd") and p.now.value in FUNCTIONS):
        node = Node("mul", (node, p.factor()))
    return (Node("degree", (node,)) if p.accept("cmd", "degree") else node,)


def _summation(p: Parser, name: str) -> Node:
    """A sum or product over an index that runs between whole bounds."""
    p.expect("op", "_")
    p.expect("op", "{")
    start = p.relation()
    p.expect("op", "}")
    p.expect("op", "^")
    end = p.script()
    body = p.product()
    if start.kind != "relation" or start.name != "=" or start.args[0].kind not in ("sym", "const"):
        p.fail()
    return Node("call", (start.args[0], start.args[1], end, body), name)


def matrix(p: Parser, source: str) -> Node:
    kind, _, body = source.partition("|")
    if kind == "array":
        body = re.sub(r"^\s*\{[^{}]*\}", "", body)
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", body.replace("\\hline", "")) if row.strip()]
    cells = [
        Node("row", tuple(type(p)(tokenize(cell), p.depth + 1).answer() for cell in row.split("&"))) for row in rows
    ]
    if len({len(row.args) for row in cells}) != 1:
        raise UnsupportedError("ragged matrix")
    node = Node("matrix", tuple(cells))
    return Node("call", (node,), "det") if kind == "vmatrix" else node


def _root(p: Parser) -> Node:
    degree = number(2)
    if p.accept("op", "["):
        degree = p.sum()
        p.expect("op", "]")
    # \sqrt10 is meant as the root of ten, although LaTeX reads it as the root of 1, then 0
    radicand = p.group(keep=False) if p.at("op", "(") else numeral(p.take().value) if p.at("num") else _argument(p)
    return Node("call", (radicand, degree), "root")


def _delimited(closing: str, name: str) -> Callable[[Parser], Node]:
    def read(p: Parser) -> Node:
        inner = p.nested()
        p.expect("cmd", closing)
        if name == "angle":
            return Node("group", inner.args if inner.kind == "list" else (inner,), "()")
        return Node("call", (inner,), name)

    return read


def _number_set(p: Parser) -> Node:
    return Node("numbers", name=NUMBER_SETS.get(_raw(p)) or p.fail())


COMMANDS: dict[str, Callable[[Parser], Node]] = {
    "frac": lambda p: Node("div", (_argument(p), _argument(p))),
    "sqrt": _root,
    **dict.fromkeys(("binom", "dbinom", "tbinom"), lambda p: Node("call", (_argument(p), _argument(p)), "binomial")),
    "{": _braced,
    "langle": _delimited("rangle", "angle"),
    "lfloor": _delimited("rfloor", "floor"),
    "lceil": _delimited("rceil", "ceil"),
    "lvert": _delimited("rvert", "abs"),
    "vert": lambda p: bars(p, "cmd", "vert"),
    "mathbb": _number_set,
    **dict.fromkeys(("emptyset", "varnothing"), lambda p: Node("set")),
    "infty": lambda p: INFINITY,
    "pi": lambda p: PI,
    "sum": lambda p: _summation(p, "sum"),
    "prod": lambda p: _summation(p, "product"),
}
SYMBOLS = frozenset([
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma",
    "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
])  # fmt: skip
