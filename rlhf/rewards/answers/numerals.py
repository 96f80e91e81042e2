r"""Which numbers are worked out: numerals, fractions in lowest terms, roots, powers, and sums of these.

`\frac{3}{4}`, `1+2\sqrt{3}` and `2^{10}` are, but not `\frac{6}{4}`, `\sqrt{9}`, `3+4\cdot 5` or `\binom{5}{2}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations
from math import gcd

from rlhf.rewards.answers.arithmetic import integer_root
from rlhf.rewards.answers.node import Node, number, parts
from rlhf.rewards.answers.value import constant, estimate_of

SIGNS = ("neg", "pm")
MAX_FACTOR = 10_000  # of a radicand: the root of a larger factor is not taken out
MAX_DEGREE = 12  # roots of a higher degree, or of a number of more bits, are not simplified
MAX_RADICAND_BITS = 4_000


def is_number(node: Node) -> bool:
    """Whether a constant is worked out."""
    terms = terms_of(node)
    if len(terms) == 1:
        return _like(terms[0], sums=1) is not None
    if any(part.kind == "pow" and _has_i(part) for part in parts(node)):  # e^{ix} + e^{-ix} is 2 cos x
        return False
    kinds = [_like(term, sums=0) for term in terms]
    return None not in kinds and len(set(kinds)) == len(kinds)


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


def _like(term: Node, *, sums: int) -> frozenset[object] | None:
    """The irrational factors of a term; None if the term is not worked out. Terms with the same factors are alike.

    Args:
        sums: how many of the factors may be sums.
    """
    if reduces(term):
        return None
    kinds: list[tuple[tuple[object, object], bool]] = []
    for factors, below in zip(factors_of(term), (False, True), strict=True):
        rationals = [factor for factor in factors if is_rational(factor)]
        scientific = len(rationals) == 2 and not below and _is_power_of_ten(rationals[1])
        if not scientific and (len(rationals) > 1 or any(r.kind == "pow" and r is not factors[-1] for r in rationals)):
            return None
        if below and any(r.kind == "pow" for r in rationals):
            return None
        for factor in factors:
            if factor in rationals:
                continue
            if len(terms_of(factor)) > 1:
                sums -= 1
                if sums < 0 or below or not is_number(factor):
                    return None
                continue
            kind = _irrational(factor)
            if kind is None or (below and _has_square_factor(factor)):
                return None
            kinds.append((kind, below))
    if any(_can_be_collected(*pair) for pair in combinations(kinds, 2)):
        return None
    return frozenset((kind, below and kind[0] != 2) for kind, below in kinds)  # 1 / sqrt(2) is sqrt(2) / 2


def _can_be_collected(one: tuple[tuple[object, object], bool], other: tuple[tuple[object, object], bool]) -> bool:
    """Whether the product of two irrational factors is one factor: two roots of a degree, two powers of pi."""
    (left, left_below), (right, right_below) = one, other
    if left == right or (isinstance(left[0], str) and left[0] == right[0]):
        return True
    if left_below or right_below:
        return False
    if isinstance(left[1], int) and isinstance(right[1], int) and gcd(left[1], right[1]) > 1:
        return True
    return left[0] == right[0]


def _has_i(node: Node) -> bool:
    return any(part.kind == "const" and part.name == "i" for part in parts(node))


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


def _irrational(node: Node) -> tuple[object, object] | None:
    """The key of a root, a constant or a power of a constant; None for any other kind of factor."""
    if node.kind == "const":
        return node.name, 1
    if node.kind == "pow":
        base, exponent = node.args
        if exponent.kind == "pow" or not is_number(exponent) or not (_is_fraction(base) or base.kind == "const"):
            return None
        above, below = factors_of(exponent)
        if not _is_fraction(exponent) and all(map(is_rational, above + below)):  # 2^{\sqrt{9}}
            return None
        if base.kind == "const":
            return None if base.name == "i" or _is_unit_root(node) else (base.name, exponent)
        root = _root(node)
        return None if root == RATIONAL else root or (base, exponent)
    if node.kind == "call" and node.name in ("root", "sqrt"):
        radicand, degree = node.args[0], node.args[1].value if len(node.args) > 1 else 2
        root = _root(node)
        is_plain = radicand.kind != "call" and is_number(radicand) and root != RATIONAL
        return (root or (degree, radicand)) if is_plain else None
    return None


def _is_unit_root(node: Node) -> bool:
    """Whether a power of e is 1, -1, i or -i."""
    estimate = estimate_of(node)
    return estimate is not None and any(abs(estimate - root) < 1e-12 for root in (1, -1, 1j, -1j))


RATIONAL = 1, 1  # the degree and radicand of a root with a rational value


def _root(node: Node) -> tuple[int, int] | None:
    r"""Degree and radicand of a root of a rational number in lowest terms: (2, 2) for `\sqrt{8}` and `2^{3/2}`."""
    if node.kind == "call" and node.name in ("root", "sqrt"):
        base, power = node.args[0], Node("div", (number(1), node.args[1] if len(node.args) > 1 else number(2)))
        plain = all(part.kind != "call" for part in parts(base)) and is_number(base)
    else:
        base, power = node.args if node.kind == "pow" else (node, node)
        plain = node.kind == "pow" and _is_fraction(base) and _is_fraction(power)
    value, exponent = (constant(base), constant(power)) if plain else (None, None)
    if not isinstance(value, Fraction) or not isinstance(exponent, Fraction) or exponent.denominator > MAX_DEGREE:
        return None
    degree, times = exponent.denominator, exponent.numerator % exponent.denominator
    if value == 0 or degree == 1:
        return RATIONAL
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_RADICAND_BITS:
        return None
    radicand = abs(value.numerator) ** times * value.denominator ** (degree - times)
    if value < 0 and degree % 2 == 0:
        return degree, -_without_powers(radicand, degree)
    for divisor in (divisor for divisor in range(degree, 1, -1) if degree % divisor == 0):
        root = integer_root(radicand, divisor)
        if root**divisor == radicand:
            return (degree // divisor, _without_powers(root, degree // divisor)) if divisor < degree else RATIONAL
    return degree, _without_powers(radicand, degree)


def _without_powers(radicand: int, degree: int) -> int:
    """The radicand without the factors whose root can be taken."""
    largest = min(integer_root(radicand, degree), MAX_FACTOR)
    powers = (root**degree for root in range(largest, 1, -1)) if radicand < MAX_FACTOR**2 else ()
    return radicand // next((power for power in powers if radicand % power == 0), 1)


def _has_square_factor(root: Node) -> bool:
    """Whether the radicand of a square root below a fraction line could be smaller: 3 / sqrt(27)."""
    kind = _irrational(root)
    radicand = root.args[0] if root.args else root
    return kind is not None and kind[0] == 2 and radicand.kind == "num" and kind[1] != radicand.value


def is_numeral(node: Node) -> bool:
    return node.kind == "num"
