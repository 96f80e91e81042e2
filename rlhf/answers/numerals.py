r"""Which numbers are worked out: numerals, fractions in lowest terms, roots, powers, and sums of these.

`\frac{3}{4}`, `1+2\sqrt{3}` and `2^{10}` are, but not `\frac{6}{4}`, `\sqrt{9}`, `3+4\cdot 5` or `\binom{5}{2}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations
from math import gcd, isqrt

from mpmath.libmp import to_rational

from rlhf.answers.arithmetic import MAX_DIFFERENCE, mpc, mpf
from rlhf.answers.node import Node
from rlhf.answers.value import constant

SIGNS = ("neg", "pm")
MAX_DENOMINATOR = 10**50  # of a number that counts as rational if it agrees in all digits
MAX_ROOT = 10_000  # a larger factor of a radicand is not looked for


def is_number(node: Node) -> bool:
    """Whether a constant is worked out."""
    terms = terms_of(node)
    if not all(_is_worked_out(term, sums=len(terms) == 1) for term in terms):
        return False
    if len(terms) > 1 and _has_rational_value(node):  # e^{ix} + e^{-ix}
        return False
    return not any(_has_rational_value(Node("div", pair)) for pair in combinations(terms, 2))


def terms_of(node: Node) -> list[Node]:
    """The terms of a sum, without their signs; a mixed number is one term."""
    if node.kind in SIGNS:
        return terms_of(node.args[0])
    if node.kind == "add" and node.name != "mixed":
        return [term for arg in node.args for term in terms_of(arg)]
    return [node]


def factors_of(node: Node) -> tuple[list[Node], list[Node]]:
    """The factors above and below the fraction line, without signs."""
    if node.kind in SIGNS:
        return factors_of(node.args[0])
    if node.kind not in ("mul", "div"):
        return [node], []
    (above, below), (more_above, more_below) = map(factors_of, node.args)
    if node.kind == "div":
        more_above, more_below = more_below, more_above
    return above + more_above, below + more_below


def _is_worked_out(term: Node, *, sums: bool) -> bool:
    r"""Whether a term is a rational number times irrational ones: `\frac{2\sqrt{3}}{\pi}`.

    Args:
        sums: whether one factor above the fraction line may be a sum.
    """
    if reduces(term):
        return False
    irrational = []
    for factors, is_below in zip(factors_of(term), (False, True), strict=True):
        rational = [factor for factor in factors if is_rational(factor)]
        scientific = len(rational) == 2 and not is_below and _is_power_of_ten(rational[1])
        is_power = any(part.kind == "pow" for part in rational) and factors != [term]  # 7^2 pi
        if (len(rational) > 1 or is_power) and not scientific:
            return False
        irrational += [(factor, is_below) for factor in factors if factor not in rational]
    added = [(factor, is_below) for factor, is_below in irrational if len(terms_of(factor)) > 1]
    if len(added) > sums or any(is_below or not is_number(factor) for factor, is_below in added):
        return False
    kinds = [(_kind(factor), is_below) for factor, is_below in irrational if (factor, is_below) not in added]
    different = {(kind, is_below and not isinstance(kind, str)) for kind, is_below in kinds}  # sqrt(3) / sqrt(2)
    if any(kind is None for kind, _ in kinds) or len(different) < len(kinds) or (kinds and _has_rational_value(term)):
        return False
    above, below = factors_of(term)
    inside = common_factor(root.args[0] for root in below if root.args) or 1
    roots = range(2, min(isqrt(inside), MAX_ROOT) + 1)
    return gcd(common_factor(above) or 1, inside) == 1 and all(inside % root**2 for root in roots)  # 5 / sqrt(27)


def _kind(node: Node) -> str | int | None:
    """What a root, constant or power has in common with those that it can be collected with; None for other nodes.

    Roots and powers with rational values have no kind either: they are not worked out.
    """
    kind: str | int
    if node.kind == "const":
        return node.name
    if node.kind == "call" and node.name == "root":
        radicand, degree = node.args
        is_plain, kind = radicand.kind != "call" and is_number(radicand), degree.value.numerator
    elif node.kind == "pow" and (_is_fraction(node.args[0]) or node.args[0].name in ("e", "pi")):
        base, exponent = node.args
        is_plain = exponent.kind != "pow" and is_number(exponent)
        kind = base.name if base.kind == "const" else common_factor(factors_of(exponent)[1]) or 1
    else:
        return None
    return kind if is_plain and not _has_rational_value(node) else None


def _has_rational_value(node: Node) -> bool:
    value = constant(node)
    if isinstance(value, mpc) and abs(value.imag) < mpf(10) ** -MAX_DIFFERENCE:  # e^{i pi}
        value = value.real
    if not isinstance(value, mpf):
        return isinstance(value, Fraction)
    exact = Fraction(*to_rational(value._mpf_))
    near = exact.limit_denominator(MAX_DENOMINATOR)
    return abs(exact) < MAX_DENOMINATOR and abs(near - exact) <= abs(exact) / 10**MAX_DIFFERENCE


def is_rational(node: Node) -> bool:
    """A numeral, a mixed number, or a power of a numeral or of a fraction."""
    if node.kind == "pow":
        base, exponent = node.args
        whole = is_signed_numeral(exponent) and terms_of(exponent)[0].value.denominator == 1
        return whole and (base.kind == "num" or (_is_fraction(base) and not reduces(base) and exponent.kind == "num"))
    return node.kind == "num" or (node.kind == "add" and node.name == "mixed" and not reduces(node.args[1]))


def reduces(node: Node) -> bool:
    r"""Whether a fraction has a common factor, a denominator 1 or a decimal: 6/4, `\frac{2x+4}{6}`, 0.5/2."""
    above, below = factors_of(node)
    contents = common_factor(above), common_factor(below)
    if not below or any(is_numeral(factor) and factor.value == 1 for factor in below):
        return bool(below)
    return None in contents or gcd(*contents) != 1  # type: ignore[arg-type]


def common_factor(factors: Iterable[Node]) -> int | None:
    """The largest known whole number that divides a product; None if a factor is a decimal."""
    product = 1
    for factor in factors:
        terms = terms_of(factor)
        if len(terms) > 1:
            above, below = zip(*map(factors_of, terms), strict=True)
            common = [1] if any(below) else [common_factor(term) for term in above]
        else:
            is_integer = terms[0].value.denominator == 1
            common = [(terms[0].value.numerator if is_integer else None) if is_numeral(terms[0]) else 1]
        if None in common:
            return None
        product *= gcd(*common)
    return product


def is_signed_numeral(node: Node) -> bool:
    return len(terms_of(node)) == 1 and is_numeral(terms_of(node)[0])


def _is_fraction(node: Node) -> bool:
    above, below = factors_of(node)
    return len(above) == 1 >= len(below) and all(map(is_numeral, above + below))


def _is_power_of_ten(node: Node) -> bool:
    return node.kind == "pow" and node.args[0].kind == "num" and node.args[0].value == 10


def is_numeral(node: Node) -> bool:
    return node.kind == "num"
