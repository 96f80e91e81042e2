"""Arithmetic on exact fractions where possible, else on numbers of many digits; the size of every result is limited."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

from mpmath.ctx_mp import MPContext

from rlhf.answers.node import UndefinedError

MAX_WORK = 200_000  # of one comparison, in units of about a microsecond; a fraction of a second
MAX_EXACT_BITS = 400_000  # of an exact power or factorial; more than any answer has
BITS_PER_WORK = 1_000  # two fractions with this many bits together are added or multiplied in one unit of work
MAX_MAGNITUDE = 64  # bits of an exponent; a tower of powers has more
MAX_FACTORIAL = 5_000
MAX_BINOMIAL = 20_000
MAX_ARGUMENT_BITS = 4_000  # of an argument of sin, exp or log, which needs as many digits
DIGITS = 300
MAX_DIFFERENCE = 270  # values that agree in so many digits are equal

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
    if degree == 2:
        return math.isqrt(value)
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


def _rounded(function: Callable[[Value], Value], value: Value) -> Value:
    return Fraction(int(function(value if isinstance(value, Fraction) else check_size(value))))


def _of_integers(function: Callable[..., int]) -> Callable[..., Value]:
    """math.gcd and math.lcm, which raise TypeError for a value that is not an integer."""
    return lambda *values: Fraction(function(*(v.numerator if v == int(v) else v for v in values)))


def _transcendental(name: str) -> Callable[[Value], Value]:
    function = getattr(mp, name.replace("arc", "a"))
    return lambda value: function(check_size(value))


FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{name: _transcendental(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{name: _transcendental(name) for name in ("arcsin", "arccos", "arctan")},
    "exp": lambda value: power(mp.e, value),
    "log": _log,
    "ln": _log,
    "lg": lambda value: _log(value, Fraction(10)),
    "root": lambda value, degree: power(value, over(Fraction(1), degree)) if value != 0 else Fraction(0),
    "abs": abs,
    "floor": lambda value: _rounded(math.floor if isinstance(value, Fraction) else mp.floor, value),
    "ceil": lambda value: _rounded(math.ceil if isinstance(value, Fraction) else mp.ceil, value),
    "max": lambda *values: max(values, key=as_real),
    "min": lambda *values: min(values, key=as_real),
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
    "factorial": _factorial,
    "binomial": _binomial,
}
