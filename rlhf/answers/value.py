"""The value of an expression: an exact fraction if possible, else a number with hundreds of digits.

Two expressions are equal if they agree exactly, or to hundreds of digits, at every point: constants at one, expressions
with variables at several. Nothing is simplified, so no result can grow without bound, and no float is compared. The
work of a comparison and the size of every result are limited.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import mpmath
from mpmath.ctx_mp import MPContext

from rlhf.answers.node import Node, UndefinedError, UnsupportedError, free_symbols, parts

MAX_WORK = 200_000  # of one comparison, in units of about a microsecond; a fraction of a second
MAX_EXACT_BITS = 400_000  # of an exact power or factorial; more than any answer has
BITS_PER_WORK = 1_000  # two fractions with this many bits together are added or multiplied in one unit of work
MAX_MAGNITUDE = 64  # bits of an exponent; a tower of powers has more
MAX_FACTORIAL = 5_000
MAX_BINOMIAL = 20_000
MAX_ARGUMENT_BITS = 4_000  # of an argument of sin, exp or log, which needs as many digits
DIGITS = 300
MAX_DIFFERENCE = 270  # values that agree in so many digits are equal
WORK_OF_CALL = 100  # a function of a number of many digits, in units of work
MAX_TERMS = 2_000  # of a sum or product
LINE_POINTS = (0, 1, 2, 5, -1, -7)  # an expression that is linear at all of these counts as linear
POINTS = 5  # where expressions with variables are compared; the last two have negative coordinates

mp = MPContext()  # a context of our own: the precision of other code does not change
mp.dps = DIGITS
mpf, mpc = mp.mpf, mp.mpc

Value = Any  # Fraction | mpf | mpc
_work_left = MAX_WORK


def start_work() -> None:
    """Allow MAX_WORK for the next comparison."""
    global _work_left
    _work_left = MAX_WORK


def work(amount: int) -> None:
    """Count the cost of an operation before it is done. Raises UndefinedError if the comparison costs too much."""
    global _work_left
    _work_left -= amount
    if _work_left < 0:
        raise UndefinedError("too much to compute")


def same_number(a: Value, b: Value) -> bool:
    """Whether two values are equal: exactly, or in all digits but the last ones, which rounding changes."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    a, b = as_real(a), as_real(b)
    difference = abs(a - b)
    if not mp.isfinite(difference):
        raise UndefinedError("infinite")
    return bool(difference <= mpf(10) ** -MAX_DIFFERENCE * max(abs(a), abs(b), 1))


def as_real(value: Value) -> Value:
    """The value as a number of mpmath; fractions are converted at the current precision."""
    return mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def check_size(value: Value, bits: int = MAX_ARGUMENT_BITS) -> Value:
    if isinstance(value, Fraction):
        size = max(value.numerator.bit_length() - value.denominator.bit_length(), 0)
    else:
        size = mp.mag(value) if value and mp.isfinite(value) else 0
    if size > bits:
        raise UndefinedError("too large")
    return as_real(value)


def _exact_or_rounded(operation: Callable[[Value, Value], Value], a: Value, b: Value) -> Value:
    """The result of an operation, exact for two fractions; its work grows with the square of the digits."""
    if not (isinstance(a, Fraction) and isinstance(b, Fraction)):
        return operation(as_real(a), as_real(b))
    bits = sum(v.numerator.bit_length() + v.denominator.bit_length() for v in (a, b))
    work(bits * bits // BITS_PER_WORK**2)
    return operation(a, b)


plus = partial(_exact_or_rounded, operator.add)
times = partial(_exact_or_rounded, operator.mul)


def over(a: Value, b: Value) -> Value:
    if b == 0:
        raise UndefinedError("division by zero")
    return _exact_or_rounded(operator.truediv, a, b)


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent, exact where that is possible; an odd root of a negative number is the real one."""
    if base == 0:
        if not isinstance(exponent, mpc) and exponent > 0:
            return Fraction(0)
        raise UndefinedError("zero to a power that is not positive")
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1 and isinstance(base, Fraction):
            size = base.numerator.bit_length() + base.denominator.bit_length()
            bits = 0 if base in (1, -1) else abs(exponent.numerator) * size
            if bits <= MAX_EXACT_BITS:
                work(bits // 160)
                return base**exponent.numerator
        elif exponent.denominator % 2 and not isinstance(base, mpc) and base < 0:
            value = power(-base, exponent)
            return value if exponent.numerator % 2 == 0 else -value
        elif isinstance(base, Fraction) and base > 0 and exponent.denominator <= 64:
            root = _exact_root(base, exponent.denominator)
            if root is not None:
                return power(root, Fraction(exponent.numerator))
    if exponent and mp.mag(as_real(exponent)) > MAX_MAGNITUDE:
        raise UndefinedError("too large")
    return mp.power(check_size(base, 10**9), as_real(exponent))


def _exact_root(value: Fraction, degree: int) -> Fraction | None:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_ARGUMENT_BITS:
        return None
    root = Fraction(*(_integer_root(part, degree) for part in (value.numerator, value.denominator)))
    return root if root**degree == value else None


def _integer_root(value: int, degree: int) -> int:
    """floor(value ** (1 / degree)) by Newton's method on integers."""
    guess = 1 << -(-value.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess
        guess = better


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1 and value >= 0:
        if value > MAX_FACTORIAL:
            raise UndefinedError("too large")
        return Fraction(math.factorial(value.numerator))
    return mp.gamma(check_size(value, 20) + 1)


def _binomial(upper: Value, lower: Value) -> Value:
    if all(isinstance(v, Fraction) and v.denominator == 1 for v in (upper, lower)) and upper >= 0:
        if upper > MAX_BINOMIAL:
            raise UndefinedError("too large")
        work(upper.numerator // 20)
        return Fraction(math.comb(upper.numerator, lower.numerator) if lower >= 0 else 0)
    return mp.binomial(check_size(upper, 20), check_size(lower, 20))


def _log(value: Value, base: Value | None = None) -> Value:
    """The logarithm. Without a base it is the natural one, for `log` too, as in most of mathematics."""
    if value == 0:
        raise UndefinedError("logarithm of zero")
    numerator = mp.log(check_size(value, 10**9))
    return numerator if base is None else numerator / mp.log(check_size(base))


def _round_exactly(function: Callable[[Value], Value], value: Value) -> Value:
    return Fraction(int(function(value if isinstance(value, Fraction) else check_size(value))))


def _integer_function(function: Callable[..., int]) -> Callable[..., Value]:
    """math.gcd and math.lcm, which raise TypeError for a value that is not an integer."""
    return lambda *values: Fraction(function(*(v.numerator if v == int(v) else v for v in values)))


def _transcendental(name: str) -> Callable[[Value], Value]:
    function = getattr(mp, name.replace("arc", "a"))
    return lambda value: function(check_size(value))


FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: _transcendental(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{name: _transcendental(name) for name in ("arcsin", "arccos", "arctan")},
    "log": _log,
    "ln": _log,
    "lg": lambda value: _log(value, Fraction(10)),
    "root": lambda value, degree: power(value, over(Fraction(1), degree)) if value != 0 else Fraction(0),
    "abs": abs,
    "floor": lambda value: _round_exactly(math.floor if isinstance(value, Fraction) else mp.floor, value),
    "ceil": lambda value: _round_exactly(math.ceil if isinstance(value, Fraction) else mp.ceil, value),
    "max": lambda *values: max(values, key=as_real),
    "min": lambda *values: min(values, key=as_real),
    "gcd": _integer_function(math.gcd),
    "lcm": _integer_function(math.lcm),
    "factorial": _factorial,
    "binomial": _binomial,
}


# --- expressions ---


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
    """The value at a point. UndefinedError if there is no number, UnsupportedError if the node is no expression."""
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
    r"""Whether the values agree; None if they differ only because a root or logarithm is not real.

    Where both have roots, these count too: of `\sqrt{xy}` and `\sqrt{x}\sqrt{y}` at (-1, -1) both values are real.
    """
    a, b = evaluate(left, point), evaluate(right, point)
    if same_number(a, b):
        return True
    if all(value >= 0 for value in point.values()):
        return False
    roots = [[part for part in parts(node) if _is_root(part)] for node in (left, right)]
    values = [a, b, *(evaluate(root, point) for root in roots[0] + roots[1])] if all(roots) else [a, b]
    return None if any(isinstance(value, mpc) and abs(value.imag) > mpf(10) ** -30 for value in values) else False


def _is_root(node: Node) -> bool:
    return node.name == "root" or (node.kind == "pow" and node.args[1].kind == "div")


# --- rules: kind of node -> value ---


def _constant(node: Node, point: dict[str, Value]) -> Value:
    values = {"pi": +mp.pi, "e": +mp.e, "i": point.get("i", mpc(0, 1))}
    if node.name not in values:
        raise UndefinedError("infinity is not a number")
    return values[node.name]


def _modulo(node: Node, point: dict[str, Value]) -> Value:
    left, right = node.args
    modulus = evaluate(right, point)
    value = evaluate(left, point)
    if not (isinstance(value, Fraction) and isinstance(modulus, Fraction)) or modulus == 0:
        raise UndefinedError("modulo of a value that is not a fraction")
    return value % modulus


def _number_in_base(node: Node, point: dict[str, Value]) -> Value:
    digits, base = node.args[0].name, int(node.args[1].value)
    if base == 0 or not digits.isdigit():  # int(x, 0) would guess the base
        raise UndefinedError("not a base")
    return Fraction(int(digits, base))  # ValueError for other bases and digits


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
    "sym": lambda node, point: point[node.name],
    "const": _constant,
    "add": lambda node, point: reduce(plus, (evaluate(arg, point) for arg in node.args), Fraction(0)),
    "neg": lambda node, point: -evaluate(node.args[0], point),
    "mul": lambda node, point: times(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "div": lambda node, point: over(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "mod": _modulo,
    "pow": lambda node, point: power(evaluate(node.args[0], point), evaluate(node.args[1], point)),
    "percent": lambda node, point: times(evaluate(node.args[0], point), Fraction(1, 100)),
    "degree": lambda node, point: as_real(evaluate(node.args[0], point)) * mp.pi / 180,
    "base": _number_in_base,
    "call": _call,
}
