"""The built-in tool `calculator`: exact arithmetic on bounded numbers, without `eval`."""

from __future__ import annotations

import ast
import math
import operator
import re
from fractions import Fraction

MAX_CHARACTERS = 1000  # of an expression
MAX_BITS = 4096  # of an intermediate numerator or denominator: 1,233 digits
SIGNIFICANT_DIGITS = 15  # of a result that is no finite decimal
MAX_DECIMAL_PLACES = 30

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
SIGNS = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"}


async def calculator(expression: str) -> str:
    """
    Compute the value of an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * / // % **, such as "(3 + 4) * 12".

    Returns:
        The value.
    """
    return compute(expression)


def compute(expression: str) -> str:
    """The value of an expression as text: whole numbers and finite decimals exactly, others to 15 digits.

    Raises ValueError if the expression is not arithmetic, divides by zero, or is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"The expression has over {MAX_CHARACTERS} characters.")
    text = re.sub("|".join(map(re.escape, SIGNS)), lambda sign: SIGNS[sign[0]], expression)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text).strip()  # 1,000
    try:
        tree = ast.parse(text, mode="eval")  # reads, and runs nothing
        return _format_value(_value(tree.body))
    except ZeroDivisionError:
        raise ValueError("Division by zero.") from None
    except OverflowError:
        raise ValueError("The result is too large.") from None
    except (SyntaxError, RecursionError, MemoryError):  # the last two: nested too deeply for the parser
        raise ValueError(f"Not an arithmetic expression: {expression[:100]}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=float() as number) if math.isinf(number):
            raise OverflowError
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _check_size(Fraction(repr(number)) if isinstance(number, float) else Fraction(number))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            return _check_size(_power(_value(node.left), _value(node.right)))
        case ast.BinOp() if type(node.op) in OPERATORS:
            return _check_size(Fraction(OPERATORS[type(node.op)](_value(node.left), _value(node.right))))
    raise ValueError("Only numbers, parentheses and + - * / // % ** can be computed.")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise ValueError("A root of a negative number is not a real number.")
        root = float(base) ** float(exponent)
        near = Fraction(round(root))
        return near if near**exponent.denominator == base**exponent.numerator else Fraction(root)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base not in (0, 1, -1) and (bits - 1) * abs(exponent.numerator) > MAX_BITS:
        raise ValueError("The result is too large.")
    return base**exponent.numerator


def _check_size(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("The result is too large.")
    return value


def _format_value(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    places = next((n for n in range(MAX_DECIMAL_PLACES + 1) if 10**n % value.denominator == 0), None)
    if places is None:
        return f"{float(value):.{SIGNIFICANT_DIGITS}g}"
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"
