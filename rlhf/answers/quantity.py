"""Numbers with units, currency, per cent, degrees or a base, and rounded numbers."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from rlhf.answers.node import MONEY, Node, UndefinedError, free_symbols, number
from rlhf.answers.units import unit_of
from rlhf.answers.value import as_real, constant, equal, mpf
from rlhf.answers.words import SCALES, may_stand_after, may_stand_before

RADIANS = unit_of("radian")
MIN_ROUNDED_DIGITS = 6  # a decimal with at least this many significant digits may be a rounded repeating decimal


def same_quantity(gold: Node, answer: Node) -> bool:
    """Whether two nodes are equal; one may lack its unit or per cent sign. UnsupportedError if one is no expression."""
    gold_value, gold_unit = _measured(gold)
    answer_value, answer_unit = _measured(answer)
    if gold_unit.startswith("mod ") and answer_unit.startswith("mod "):
        modulus = number(Fraction(gold_unit.removeprefix("mod ")))
        return gold_unit == answer_unit and equal(*(Node("mod", (v, modulus)) for v in (gold_value, answer_value)))
    gold_measure, answer_measure = unit_of(gold_unit), unit_of(answer_unit)
    if gold_measure and answer_measure:
        if gold_measure[0] != answer_measure[0]:
            return False
        if gold_measure[1] != answer_measure[1]:
            return _same_value(gold_value, Node("mul", (answer_value, number(answer_measure[1] / gold_measure[1]))))
    if RADIANS in (gold_measure, answer_measure):
        return equal(gold_value, answer_value)
    for unit, plain in ((gold_unit, answer), (answer_unit, gold)):
        if len(unit) == 1 and free_symbols(plain) == {unit}:  # 3 m and 3m
            value = gold_value if unit == gold_unit else answer_value
            return equal(Node("mul", (value, Node("sym", name=unit))), plain)
    return _same_value(gold_value, answer_value)


def _measured(node: Node) -> tuple[Node, str]:
    """(value, unit)."""
    if node.kind == "worded":
        if not may_stand_before(node.name):
            raise UndefinedError(node.name)
        return _measured(node.args[0])
    if node.kind == "unit":
        value, inner = _measured(node.args[0])
        if not may_stand_after(node.name):
            raise UndefinedError(node.name)
        scale, _, unit = node.name.strip(" .").partition(" ")
        if scale.lower() in SCALES:
            return Node("mul", (value, number(SCALES[scale.lower()]))), unit or inner
        return value, node.name.strip(" .") if inner in ("", MONEY) and node.name != MONEY else inner or node.name
    return node, ""


def _same_value(gold: Node, answer: Node) -> bool:
    bases = [node for node in (gold, answer) if node.kind == "base"]
    if len(bases) == 1:
        plain = answer if gold.kind == "base" else gold
        if plain.kind == "num" and plain.name == bases[0].args[0].name:
            return True
    if {gold.kind, answer.kind} == {"percent", "degree"}:
        return False
    for kind in ("percent", "degree"):
        marked = [node.kind == kind for node in (gold, answer)]
        if any(marked):
            bare = [node.args[0] if mark else node for node, mark in zip((gold, answer), marked, strict=True)]
            if marked == [False, True] and kind == "percent" and _is_share(gold):
                return equal(gold, answer)  # 1/3 % is not 1/3
            return _same_value(*bare) or (not all(marked) and equal(gold, answer))
    if equal(gold, answer) or _is_rounding(gold, answer) or _is_rounding(answer, gold):
        return True
    return _is_near(gold, answer)


class Tolerance(NamedTuple):
    """How far a number may be from the gold answer: a share of it, or in its unit."""

    relative: float = 0.0
    absolute: float = 0.0


_tolerance: Tolerance | None = None


def set_tolerance(tolerance: Tolerance | None) -> None:
    """Treat numbers within the tolerance as equal in all later comparisons."""
    global _tolerance
    _tolerance = tolerance


def is_tolerant() -> bool:
    return _tolerance is not None


def _is_near(gold: Node, answer: Node) -> bool:
    """Whether a number is within the tolerance, or rounds to the gold decimal: 100/3 to 33.3."""
    values = [] if _tolerance is None else [constant(node) for node in (gold, answer)]
    if _tolerance is None or None in values:
        return False
    gold_number, answer_number = map(as_real, values)
    written = gold.args[0] if gold.kind == "neg" else gold
    decimals = written.name.partition(".")[2] if written.kind == "num" else ""
    rounding = mpf(10) ** -len(decimals) / 2 if decimals.isdigit() else 0
    allowed = max(_tolerance.absolute, _tolerance.relative * abs(gold_number), rounding)
    return bool(abs(gold_number - answer_number) <= allowed)


def _is_share(node: Node) -> bool:
    value = constant(node)
    return isinstance(value, Fraction) and abs(value) < 1


def _is_rounding(decimal: Node, exact: Node) -> bool:
    """Whether a long decimal is a repeating decimal, rounded or cut off: 0.333333 and 1/3; never a whole number."""
    sign = 1
    if decimal.kind == "neg":
        sign, decimal = -1, decimal.args[0]
    digits = decimal.name.partition(".")[2] if decimal.kind == "num" else ""
    if not digits.isdigit() or len(decimal.name.replace(".", "").lstrip("0")) < MIN_ROUNDED_DIGITS:
        return False
    value = constant(exact)
    if not isinstance(value, Fraction) or pow(10, value.denominator.bit_length(), value.denominator) == 0:  # it ends
        return False
    missing = sign * value - decimal.value
    return Fraction(-1, 2) < missing * 10 ** len(digits) < 1  # rounded up by at most a half, or cut off
