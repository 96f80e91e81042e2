"""Numbers with units, currency, per cent, degrees or a base, and rounded numbers."""

from __future__ import annotations

import re
from fractions import Fraction

from rlhf.rewards.answers.errors import UnsupportedError
from rlhf.rewards.answers.node import MONEY, Node, free_symbols, number
from rlhf.rewards.answers.value import constant, equal

# unit -> (dimension, its size in the base unit)
UNITS: dict[str, tuple[str, Fraction]] = {
    **dict.fromkeys(("mm", "millimeter", "millimetre"), ("length", Fraction(1, 1000))),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), ("length", Fraction(1, 100))),
    **dict.fromkeys(("m", "meter", "metre"), ("length", Fraction(1))),
    **dict.fromkeys(("km", "kilometer", "kilometre"), ("length", Fraction(1000))),
    **dict.fromkeys(("in", "inch", "inche"), ("length", Fraction(254, 10000))),
    **dict.fromkeys(("ft", "foot", "feet"), ("length", Fraction(3048, 10000))),
    **dict.fromkeys(("yd", "yard"), ("length", Fraction(9144, 10000))),
    **dict.fromkeys(("mi", "mile"), ("length", Fraction(1609344, 1000))),
    **dict.fromkeys(("s", "sec", "second"), ("time", Fraction(1))),
    **dict.fromkeys(("min", "minute"), ("time", Fraction(60))),
    **dict.fromkeys(("h", "hr", "hour"), ("time", Fraction(3600))),
    "day": ("time", Fraction(86400)),
    "week": ("time", Fraction(604800)),
    "month": ("months", Fraction(1)),
    "year": ("months", Fraction(12)),
    **dict.fromkeys(("mg", "milligram"), ("mass", Fraction(1, 1000))),
    **dict.fromkeys(("g", "gram"), ("mass", Fraction(1))),
    **dict.fromkeys(("kg", "kilogram"), ("mass", Fraction(1000))),
    **dict.fromkeys(("ml", "milliliter", "millilitre"), ("volume", Fraction(1, 1000))),
    **dict.fromkeys(("l", "liter", "litre"), ("volume", Fraction(1))),
    **dict.fromkeys(("cent", "penny", "pennie"), ("money", Fraction(1, 100))),
    "dollar": ("money", Fraction(1)),
    **dict.fromkeys(("rad", "radian"), ("angle", Fraction(1))),
}
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
COMPARATIVE_WORDS = re.compile(
    r"\b(?:not|no|least|most|more|less|over|under|greater|fewer|above|below|only if)\b", re.I
)
MIN_ROUNDED_DIGITS = 6  # a decimal of so many significant digits may be a rounded repeating decimal


def same_quantity(gold: Node, answer: Node) -> bool:
    """Whether two numbers or expressions are equal; a unit or per cent sign may be missing on one side.

    Raises UnsupportedError when one of them is not an expression.
    """
    gold_value, gold_unit = _measured(gold)
    answer_value, answer_unit = _measured(answer)
    if gold_unit and answer_unit and not _same_text(gold_unit, answer_unit):
        factor = _conversion(answer_unit, gold_unit)
        if factor is None:
            return False
        if factor != 1:
            return equal(gold_value, Node("mul", (answer_value, number(factor))))
    for unit, plain in ((gold_unit, answer), (answer_unit, gold)):
        if len(unit) == 1 and free_symbols(plain) == {unit}:  # 3 m and 3m
            value = gold_value if unit == gold_unit else answer_value
            return equal(Node("mul", (value, Node("sym", name=unit))), plain)
    return _same_value(gold_value, answer_value)


def _measured(node: Node) -> tuple[Node, str]:
    """(value, unit)."""
    if node.kind == "worded":
        if COMPARATIVE_WORDS.search(node.name):
            raise UnsupportedError(node.name)
        return _measured(node.args[0])
    if node.kind == "unit":
        value, inner = _measured(node.args[0])
        scale, _, unit = node.name.strip(" .").partition(" ")
        if scale.lower() in SCALES:
            return Node("mul", (value, number(SCALES[scale.lower()]))), unit or inner
        return value, node.name.strip(" .") if inner in ("", MONEY) and node.name != MONEY else inner or node.name
    return node, ""


def _same_text(a: str, b: str) -> bool:
    return a.lower() == b.lower()


def _conversion(unit: str, into: str) -> Fraction | None:
    """How many `into` make one `unit`; 1 if one is not a measure (eggs), None if their dimensions differ."""
    source, target = _unit(unit), _unit(into)
    if source is None or target is None:
        return Fraction(1)
    if source[0] != target[0]:
        return None
    return source[1] / target[1]


def _unit(text: str) -> tuple[str, Fraction] | None:
    """Dimension and factor of a unit: cm, square feet, m/s, cubic inches, cm^2."""
    words = re.sub(r"\bper\b", "/", text.lower()).replace(".", "").strip()
    parts = [part.strip() for part in words.split("/")]
    dimensions, factor = [], Fraction(1)
    for index, part in enumerate(parts):
        powers = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
        first, _, rest = part.partition(" ")
        exponent = powers.get(first, 1)
        name = rest if first in powers else part
        name, _, written = name.replace(" ^", "^").partition("^")
        exponent = int(written) if written.isdigit() and len(written) == 1 else exponent
        base = _base_unit(name.strip())
        if base is None:
            return None
        dimensions.append(f"{'/' if index else ''}{base[0]}^{exponent}")
        factor = factor / base[1] ** exponent if index else factor * base[1] ** exponent
    return " ".join(dimensions), factor


def _base_unit(name: str) -> tuple[str, Fraction] | None:
    for candidate in (name, name.removesuffix("s"), name.removesuffix("es")):
        if candidate in UNITS:
            return UNITS[candidate]
    return None


def _same_value(gold: Node, answer: Node) -> bool:
    bases = [node for node in (gold, answer) if node.kind == "base"]
    if len(bases) == 1:
        plain = answer if gold.kind == "base" else gold
        if plain.kind == "num" and plain.name == bases[0].args[0].name:
            return True
    for kind in ("percent", "degree"):
        marked = [node.kind == kind for node in (gold, answer)]
        if any(marked):
            bare = [node.args[0] if mark else node for node, mark in zip((gold, answer), marked, strict=True)]
            return _same_value(*bare) or (not all(marked) and equal(gold, answer))
    if equal(gold, answer) or _is_rounding(gold, answer) or _is_rounding(answer, gold):
        return True
    decimal = [_with_decimal_logarithms(node) for node in (gold, answer)]
    return decimal != [gold, answer] and equal(*decimal)


def _with_decimal_logarithms(node: Node) -> Node:
    """`log` without a base is the natural one in most of mathematics and the decimal one at school."""
    name = "lg" if node.kind == "call" and node.name == "log" and len(node.args) == 1 else node.name
    return Node(node.kind, tuple(map(_with_decimal_logarithms, node.args)), name, node.value)


def _is_rounding(decimal: Node, exact: Node) -> bool:
    """Whether a long decimal is a repeating decimal, rounded or cut off: 0.333333 and 1/3; never a whole number."""
    sign = 1
    if decimal.kind == "neg":
        sign, decimal = -1, decimal.args[0]
    digits = decimal.name.partition(".")[2] if decimal.kind == "num" else ""
    if not digits.isdigit() or len(decimal.name.replace(".", "").lstrip("0")) < MIN_ROUNDED_DIGITS:
        return False
    value = constant(exact)
    if not isinstance(value, Fraction) or _terminates(value):
        return False
    return abs(sign * decimal.value - value) < Fraction(1, 10 ** len(digits))


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
