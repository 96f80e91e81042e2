"""Plain decimals; the nodes of the tree of an answer; the two reasons why a tree or a value does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
MAX_DIGITS = 4_000  # CPython refuses to convert longer decimals; such numbers are compared as strings
MAX_EXPONENT = 100_000  # of a number written as 1e5
FLIPPED = {">": "<", ">=": "<="}
MONEY = "dollar"  # the unit of every currency sign


class UnsupportedError(Exception):
    """The parser does not know this notation."""


class UndefinedError(Exception):
    """There is no number: division by zero, an infinity, or a number that is too large."""


@dataclass(frozen=True)
class Node:
    """One expression: its kind and name, its parts in `args`; only numbers have a `value`."""

    kind: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


def exact_number(text: str) -> Fraction | None:
    """The value of a plain decimal, thousands separators allowed; None if the text is anything else."""
    text = text.strip().replace("$", "")
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))
    text = text.rstrip(".")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    return Fraction(text) if len(text) <= MAX_DIGITS and PLAIN.fullmatch(text) else None


def number(value: int | Fraction) -> Node:
    return Node("num", value=Fraction(value))


INFINITY, PI, EULER, IMAGINARY = (Node("const", name=name) for name in ("inf", "pi", "e", "i"))


def free_symbols(node: Node) -> frozenset[str]:
    return frozenset(part.name for part in parts(node) if part.kind == "sym")


def with_symbols(node: Node, values: dict[str, Node]) -> Node:
    """The tree with other nodes in place of symbols."""
    if node.kind == "sym":
        return values.get(node.name, node)
    return replace(node, args=tuple(with_symbols(arg, values) for arg in node.args))


def numeral(digits: str) -> Node:
    """The number with these digits; `name` keeps the digits."""
    mantissa, _, exponent = digits.lower().partition("e")
    if len(mantissa) > MAX_DIGITS or abs(int(exponent or 0)) > MAX_EXPONENT:
        raise UnsupportedError("too many digits")
    return Node("num", value=Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0), name=digits)


def is_proper_fraction(node: Node) -> bool:
    return (
        node.kind == "div"
        and all(part.kind == "num" and part.value.denominator == 1 for part in node.args)
        and 0 < node.args[0].value < node.args[1].value
    )


def mixed(whole: Node, fraction: Node) -> Node:
    """The sum of a whole number and the fraction right after it: 1 1/2."""
    if not is_proper_fraction(fraction) or whole.value.denominator != 1:
        raise UnsupportedError("two numbers side by side")
    return Node("add", (whole, fraction), "mixed")


def parts(node: Node) -> Iterator[Node]:
    """The node and all nodes below it."""
    yield node
    for arg in node.args:
        yield from parts(arg)


def canonical(node: Node) -> Node:
    """The tree without the spelling of numerals, with terms, factors and the items of a list in one order."""
    args = [canonical(arg) for arg in node.args]
    if node.kind in ("add", "mul"):
        args = [part for arg in args for part in (arg.args if arg.kind == node.kind else (arg,))]
    name = "" if node.kind in ("num", "add") else node.name
    if node.kind == "relation" and set(name.split()) <= FLIPPED.keys():  # b > a is a < b
        args, name = args[::-1], " ".join(FLIPPED[operator] for operator in reversed(name.split()))
    if node.kind in ("add", "mul", "list", "set"):
        args.sort(key=hash)  # any order that both sides share; the digits of a number may be too many for repr
    return Node(node.kind, tuple(args), name, node.value)
