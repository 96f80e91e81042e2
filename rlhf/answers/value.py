"""The value of an expression: an exact fraction if possible, else a number with hundreds of digits.

Two expressions are equal if they agree exactly, or to hundreds of digits, at every point: constants at one, expressions
with variables at several. Nothing is simplified, so no result can grow without bound, and no float is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import reduce

import mpmath

from rlhf.answers.arithmetic import (
    FUNCTIONS,
    Value,
    as_real,
    mp,
    mpc,
    mpf,
    over,
    plus,
    power,
    same_number,
    times,
    work,
)
from rlhf.answers.node import Node, UndefinedError, UnsupportedError, free_symbols, parts

WORK_OF_CALL = 100  # a function of a number of many digits, in units of work
MAX_TERMS = 2_000  # of a sum or product
LINE_POINTS = (0, 1, 2, 5, -1, -7)  # an expression that is linear at all of these counts as linear
POINTS = 5  # where expressions with variables are compared; the last two have negative coordinates


def constant(node: Node) -> Value | None:
    """The value of an expression without variables; None if it cannot be computed."""
    if free_symbols(node):
        return None
    try:
        return evaluate(node, {})
    except (UndefinedError, UnsupportedError):
        return None


def estimate_of(node: Node) -> complex | None:
    """The approximate value of a plain expression at one point; None for anything else."""
    if node.kind in ("percent", "degree", "base"):  # these equal more than one value
        return None
    try:
        point = next(points(sorted(free_symbols(node))))
        return complex(as_real(evaluate(node, point)))
    except (UndefinedError, UnsupportedError, OverflowError, RecursionError):
        return None


def evaluate(node: Node, point: dict[str, Value]) -> Value:
    """The value at a point.

    Raises:
        UndefinedError: there is no number, or it is too large.
        UnsupportedError: the node is not an expression.
    """
    work(WORK_OF_CALL if node.kind in ("call", "pow") else 1)
    try:
        return _RULES[node.kind](node, point)
    except KeyError:
        raise UnsupportedError(node.kind) from None
    except (ZeroDivisionError, OverflowError, ValueError, mpmath.libmp.ComplexResult) as error:
        raise UndefinedError(str(error)) from None


def zero_and_slope(node: Node, point: dict[str, Value], symbol: str) -> tuple[Value, Value]:
    """The only zero along a symbol, and the slope. Raises UnsupportedError if the node is not linear in the symbol."""
    at = [as_real(evaluate(node, {**point, symbol: Fraction(x)})) for x in LINE_POINTS]
    slope = at[1] - at[0]
    if slope == 0 or not all(same_number(value, at[0] + slope * x) for value, x in zip(at, LINE_POINTS, strict=True)):
        raise UnsupportedError("not linear")
    return -at[0] / slope, slope


def equal(left: Node, right: Node) -> bool:
    """Whether two expressions have the same value at every point where both have one.

    Raises UnsupportedError if one of them is not an expression, UndefinedError if there are no values to compare.
    """
    symbols = sorted(free_symbols(left) | free_symbols(right))
    if not symbols:
        return _agree(left, right, {}) is True
    compared = 0
    for point in points(symbols):
        try:
            agreement = _agree(left, right, point)
        except UndefinedError:
            continue
        if agreement is False:
            return False
        compared += agreement is True
    if compared < 2:
        raise UndefinedError("no point to compare at")
    return True


def points(symbols: list[str]) -> Iterator[dict[str, Value]]:
    for trial in range(POINTS):
        scale, shift = 3 if trial < 3 else -2, Fraction(1, 3) + (2 if trial == 2 else 0)
        yield {symbol: _fraction_of_one(f"{trial}/{symbol}") * scale + shift for symbol in symbols}


def _fraction_of_one(text: str) -> Fraction:
    """A number below 1 that looks random, the same in every process."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
    return Fraction(digest * 10**6 >> 48, 10**6)


def _agree(left: Node, right: Node, point: dict[str, Value]) -> bool | None:
    """Whether the values agree; None if they differ only because a root or logarithm is not real."""
    a, b = evaluate(left, point), evaluate(right, point)
    if same_number(a, b):
        return True
    negative = any(value < 0 for value in point.values())
    return None if negative and (_is_complex(a) or _is_complex(b)) else False


def _is_complex(value: Value) -> bool:
    return isinstance(value, mpc) and abs(value.imag) > mpf(10) ** -30


# --- rules: kind of node -> value ---


def _symbol(node: Node, point: dict[str, Value]) -> Value:
    if node.name not in point:
        raise UnsupportedError(f"no value for {node.name}")
    return point[node.name]


def _constant(node: Node, point: dict[str, Value]) -> Value:
    match node.name:
        case "pi":
            return +mp.pi
        case "e":
            return +mp.e
        case "i":
            return point.get("i", mpc(0, 1))
    raise UndefinedError("infinity is not a number")


def _modulo(node: Node, point: dict[str, Value]) -> Value:
    left, right = node.args
    modulus = evaluate(right, point)
    value = evaluate(left, point)
    if not (isinstance(value, Fraction) and isinstance(modulus, Fraction)) or modulus == 0:
        raise UndefinedError("modulo of a value that is not a fraction")
    return value % modulus


def _based(node: Node, point: dict[str, Value]) -> Value:
    digits, base = node.args[0].name, int(node.args[1].value)
    if not 2 <= base <= 36 or not digits.isdigit():
        raise UndefinedError("not a base")
    try:
        return Fraction(int(digits, base))
    except ValueError:
        raise UndefinedError(f"not digits of base {base}") from None


def _call(node: Node, point: dict[str, Value]) -> Value:
    if node.name in ("sum", "product"):
        return _series(node, point)
    values = [evaluate(arg, point) for arg in node.args]
    function = FUNCTIONS.get(node.name)
    if function is None:
        raise UnsupportedError(node.name)
    try:
        return function(*values)
    except TypeError:
        raise UnsupportedError(f"{node.name} of {len(values)}") from None


def _series(node: Node, point: dict[str, Value]) -> Value:
    index, start, end, body = node.args
    if any(part.kind == "const" for bound in (start, end) for part in parts(bound)):
        raise UnsupportedError("bounds are not whole")
    first, last = evaluate(start, point), evaluate(end, point)
    if not all(isinstance(bound, Fraction) and bound.denominator == 1 for bound in (first, last)):
        raise UnsupportedError("bounds are not whole")
    if last - first >= MAX_TERMS:
        raise UndefinedError("too many terms")
    terms = (evaluate(body, {**point, index.name: Fraction(k)}) for k in range(int(first), int(last) + 1))
    return reduce(plus, terms, Fraction(0)) if node.name == "sum" else reduce(times, terms, Fraction(1))


_RULES: dict[str, Callable[[Node, dict[str, Value]], Value]] = {
    "num": lambda node, point: node.value,
    "sym": _symbol,
    "const": _constant,
    "add": lambda node, point: reduce(plus, (evaluate(arg, point) for arg in node.args), Fraction(0)),
    "neg": lambda node, point: -evaluate(node.args[0], point),
    "mul": lambda node, point: times(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "div": lambda node, point: over(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "mod": _modulo,
    "pow": lambda node, point: power(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "percent": lambda node, point: times(evaluate(node.args[0], point), Fraction(1, 100)),
    "degree": lambda node, point: as_real(evaluate(node.args[0], point)) * mp.pi / 180,
    "base": _based,
    "call": _call,
}
