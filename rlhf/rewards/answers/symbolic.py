r"""The last check: Math-Verify compares the extracted answers, for integrals, limits, matrix products and the like.

Math-Verify rounds, treats tuples as sets and drops the left side of equations, so its "equal" must also pass the vetoes
here. It may need any amount of time and memory, so it runs only in the workers of the pool.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from rlhf.rewards.answers.arithmetic import as_real, mp, mpf, start_work
from rlhf.rewards.answers.errors import UndefinedError, UnsupportedError
from rlhf.rewards.answers.node import Node, free_symbols
from rlhf.rewards.answers.tree import parse as tree_of
from rlhf.rewards.answers.value import evaluate

MAX_CHARACTERS = 1_000  # of either side; a longer one is not an answer but an attack on the parser
MAX_BITS = 20_000  # of the largest value that a text may have; sympy would compute all its digits
MAX_FACTORIAL = 1_000  # also of a binomial's upper number
EXPONENT = re.compile(r"[\d)}\]]\s*(?:\^|\*\*)\s*")  # of a number or bracket; powers of a variable stay symbols
FACTORIAL = re.compile(r"(\d+|[)}\]a-zA-Z!])\s*!|\\[dt]?binom\s*\{?\s*(\d+)")
MAX_DEPTH = 20  # brackets
DOTS = re.compile(r"\\[lc]?dots|\.\.\.")
WARM_UP = [
    (r"\int_0^1 x dx", r"\frac{1}{2}"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1\\1\end{pmatrix}", r"\begin{pmatrix}3\\7\end{pmatrix}"),
    (r"\frac{d}{dx} x^2", "2x"),
    (r"F_n = \sum_{k=0}^{n-1} F_{k} a_n", r"F_n = \sum_{k=0}^{n-1} a_n F_k"),
]  # pairs that load the parts of sympy that answers need
MAX_RELATIVE_ERROR = mpf(10) ** -25


def preload() -> None:
    """Import and warm up: the first parse builds the tables of the grammar."""
    for name in ("math_verify", "latex2sympy2_extended"):  # they warn when their own time limit is off
        logging.getLogger(name).setLevel(logging.CRITICAL)
    for answer, gold in WARM_UP:
        verify(answer, gold)


def is_too_costly(text: str) -> bool:
    """Whether a text would use up the time limit: too long or deep, towers of powers, huge numbers or factorials."""
    depth = deepest = 0
    for char in text:
        depth += (char in "({[") - (char in ")}]")
        deepest = max(deepest, depth)
    return (
        len(text) > MAX_CHARACTERS
        or deepest > MAX_DEPTH
        or _may_exceed_bits(text)
        or text.count(r"\int") + text.count(r"\sum") + text.count(r"\prod") + text.count(r"\lim") > 3
    )


def _may_exceed_bits(text: str) -> bool:
    """Whether a value in the text may be too large: a bound by its digits, multiplied by all numbers in exponents."""
    for number, upper in FACTORIAL.findall(text):
        if not (number or upper).isdigit() or len(number or upper) > 4 or int(number or upper) > MAX_FACTORIAL:
            return True
    bits = 4 * sum(map(str.isdigit, text))
    for power in EXPONENT.finditer(text):
        exponent = _group(text, power.end())
        numbers = re.findall(r"\d+", exponent)
        if "^" in exponent and numbers:
            return True
        for digits in numbers:
            bits *= max(1, int(digits[:9]))
            if bits > MAX_BITS:
                return True
    return bits > MAX_BITS


def _group(text: str, start: int) -> str:
    """The bracketed text that begins here, or one token."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "{(") - (text[position] in "})")
        if depth <= 0 and not text[position].isdigit():
            return text[start : position + 1]
    return text[start:]


def vetoed(answer: str, gold: str) -> bool:
    """Whether the form of two answers shows that they differ, though Math-Verify may call them equal."""
    ordered = [text.lstrip().startswith("(") for text in (answer, gold)]
    unordered = [text.lstrip().startswith("\\{") for text in (answer, gold)]
    if (ordered[0] and unordered[1]) or (ordered[1] and unordered[0]):
        return True
    equations = [len(re.findall(r"(?<![<>!\\])=", text)) for text in (answer, gold)]
    if bool(equations[0]) != bool(equations[1]) and not _label_before_equals(answer if equations[0] else gold):
        return True
    return bool(DOTS.search(answer)) != bool(DOTS.search(gold))


def _label_before_equals(text: str) -> bool:
    return re.match(r"\s*\\?[A-Za-z]+(?:_\{?\w+\}?|\([^()=]*\)|')?\s*=", text) is not None


def is_readable(text: str) -> bool:
    """Whether Math-Verify can parse the cleaned text as mathematics."""
    return not is_too_costly(text) and bool(_read(text))


def _read(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    latex = [LatexExtractionConfig()]
    return parse(
        f"\\boxed{{{text}}}", latex, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )


def verify(answer: str, gold: str) -> bool:
    """Whether Math-Verify calls the cleaned answers equal and no veto applies."""
    from math_verify import verify as equivalent

    if is_too_costly(answer) or is_too_costly(gold) or vetoed(answer, gold):
        return False
    parsed = [_read(text) for text in (gold, answer)]
    if not all(parsed):
        return False
    is_equal = equivalent(*parsed, float_rounding=12, numeric_precision=30, strict=True, timeout_seconds=None)
    return bool(is_equal) and not _numbers_differ(parsed[0][0], parsed[1][0], gold)


def _numbers_differ(gold: Any, answer: Any, gold_text: str) -> bool:
    """The veto by relative error: constants must agree to 25 digits, more than Math-Verify compares."""
    values = [_numeric(gold), _numeric(answer)]
    if values[0] is None:
        values[0] = _own_value(gold_text)
    if values[0] is None or values[1] is None:
        return False
    return bool(abs(values[0] - values[1]) > MAX_RELATIVE_ERROR * max(abs(values[0]), abs(values[1])))


def _numeric(expression: Any) -> Any:
    """A sympy constant as a number of mpmath; None for anything else."""
    if not getattr(expression, "is_number", False) or not hasattr(expression, "doit"):
        return None
    real, imaginary = expression.doit().evalf(40).as_real_imag()
    return mp.mpc(str(real), str(imaginary)) if real.is_Number and imaginary.is_Number and real.is_finite else None


def _own_value(text: str) -> Any:
    start_work()
    try:
        node: Node = tree_of(text)
        return None if free_symbols(node) else as_real(evaluate(node, {}))
    except (UndefinedError, UnsupportedError, RecursionError):
        return None
