"""Parsers of LaTeX commands: fractions, roots, functions, sums, delimiters, number sets, matrices."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf.answers.node import INFINITY, PI, Node, UnsupportedError, number, numeral
from rlhf.answers.tokens import FUNCTIONS

if TYPE_CHECKING:
    from rlhf.answers.tree import Parser

NUMBER_SETS = {"R": "reals", "N": "naturals", "Z": "integers", "Q": "rationals", "C": "complexes"}


def function(p: Parser, name: str) -> Node:
    power = base = None
    while mark := p.accept("op", "^", "_"):
        if mark.value == "^":
            power = p.script()
        else:
            base = p.argument()
    arguments = _function_arguments(p)
    if name in ("sin", "cos", "tan") and power is not None and power.kind == "neg" and power.args[0].value == 1:
        name, power = "arc" + name, None
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
    cells = [Node("row", tuple(p.inner(cell) for cell in row.split("&"))) for row in rows]
    if len({len(row.args) for row in cells}) != 1:
        raise UnsupportedError("ragged matrix")
    node = Node("matrix", tuple(cells))
    return Node("call", (node,), "det") if kind == "vmatrix" else node


def _fraction(p: Parser) -> Node:
    numerator = p.argument()
    return Node("div", (numerator, p.argument()))


def _root(p: Parser) -> Node:
    degree = number(2)
    if p.accept("op", "["):
        degree = p.sum()
        p.expect("op", "]")
    # \sqrt10 is meant as the root of ten, although LaTeX reads it as the root of 1, then 0
    radicand = p.group(keep=False) if p.at("op", "(") else numeral(p.take().value) if p.at("num") else p.argument()
    return Node("call", (radicand, degree), "root")


def _binomial(p: Parser) -> Node:
    upper = p.argument()
    return Node("call", (upper, p.argument()), "binomial")


def _delimited(closing: str, name: str) -> Callable[[Parser], Node]:
    def read(p: Parser) -> Node:
        inner = p.nested()
        p.expect("cmd", closing)
        if name == "angle":
            return Node("group", inner.args if inner.kind == "list" else (inner,), "()")
        return Node("call", (inner,), name)

    return read


def _number_set(p: Parser) -> Node:
    letter = p.raw_group() if p.at("op", "{") else p.take().value
    if letter not in NUMBER_SETS:
        p.fail()
    return Node("numbers", name=NUMBER_SETS[letter])


COMMANDS: dict[str, Callable[[Parser], Node]] = {
    "frac": _fraction,
    "sqrt": _root,
    "binom": _binomial,
    "dbinom": _binomial,
    "tbinom": _binomial,
    "{": lambda p: p.braced(),
    "langle": _delimited("rangle", "angle"),
    "lfloor": _delimited("rfloor", "floor"),
    "lceil": _delimited("rceil", "ceil"),
    "lvert": _delimited("rvert", "abs"),
    "vert": lambda p: p.bars_until("cmd", "vert"),
    "mathbb": _number_set,
    "emptyset": lambda p: Node("set"),
    "varnothing": lambda p: Node("set"),
    "infty": lambda p: INFINITY,
    "pi": lambda p: PI,
    "sum": lambda p: _summation(p, "sum"),
    "prod": lambda p: _summation(p, "product"),
}
SYMBOLS = frozenset(
    [
        "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota",
        "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "upsilon", "phi", "varphi", "chi", "psi", "omega",
        "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar",
    ]
)  # fmt: skip
