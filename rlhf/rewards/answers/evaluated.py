r"""Whether an answer is worked out, or a formula that a response may have copied from the problem.

A number is worked out if it is a numeral, a fraction that does not reduce, a root that is no rational number, a power
of one number, a multiple of pi, e or i, or a sum of such terms that cannot be collected: `\frac{3}{4}`, `1+2\sqrt{3}`,
`2^{10}`, but not `\frac{6}{4}`, `\sqrt{9}`, `3+4\cdot 5` or `\binom{5}{2}`. An expression is factored if the gold
answer is, and not otherwise. An answer never has to be worked out further than the gold answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import combinations
from math import gcd
from operator import or_

from rlhf.rewards.answers.arithmetic import integer_root
from rlhf.rewards.answers.node import Node, canonical, free_symbols, number
from rlhf.rewards.answers.value import constant, estimate_of

CONTAINERS = ("list", "set", "group", "matrix", "row", "unit", "worded", "percent", "degree", "ratio", "setop")
SIGNS = ("neg", "pm")
MAX_CALLS = 2  # of functions in an expression with variables, if the gold answer has fewer: sin x / cos x for tan x
SIMPLIFIED = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log"])  # sin^2 x + cos^2 x is 1
MAX_FACTOR = 10_000  # of a radicand: the root of a larger factor is not taken out
MAX_DEGREE = 12  # roots of a higher degree, or of a number of more bits, are not simplified
MAX_RADICAND_BITS = 4_000
EQUALS = frozenset(["=", "~"])


def is_evaluated(answer: Node, gold: Node) -> bool:
    """Whether every value in the answer is worked out, or no more complicated than the gold answer."""
    if _has_unsolved_relation(answer, gold) or _has_reducible_ratio(answer, gold):
        return False
    wanted = [*_values(gold), *_conditions(gold)]
    return all(_value_is_evaluated(value, wanted, gold) for value in _values(answer))


def _values(node: Node) -> Iterator[Node]:
    """The expressions in lists, intervals, relations and the like; in an equation the side that states the value."""
    if node.kind == "relation" and set(node.name.split()) <= EQUALS:
        yield from _values(_stated_side(node))
    elif node.kind == "builder":
        yield from _values(node.args[1])
    elif node.kind == "relation":
        for side in node.args:
            yield from () if side.kind == "sym" else _values(side)
    elif node.kind in CONTAINERS or (node.kind in SIGNS and node.args[0].kind in CONTAINERS):
        for arg in node.args:
            yield from _values(arg)
    elif node.kind not in ("text", "numbers", "nothing"):
        yield node


def _stated_side(equation: Node) -> Node:
    """The last side; in `5 = x` the first one; before a rounded number the exact one."""
    sides = equation.args[:-1] if equation.name.split()[-1] == "~" and len(equation.args) > 2 else equation.args
    if equation.name == "~" and equation.args[0].kind not in ("sym", "call", "text"):
        return equation.args[0]
    return sides[0] if sides[-1].kind == "sym" and len(sides) == 2 else sides[-1]


def _conditions(gold: Node) -> Iterator[Node]:
    """The sides of equations that are more than a label: xy in xy = 1."""
    for relation in _relations(gold):
        if set(relation.name.split()) <= EQUALS:
            yield from (side for side in relation.args if side.kind in ("add", "mul", "div", "pow"))


def _has_unsolved_relation(answer: Node, gold: Node) -> bool:
    """Whether the answer is an equation or inequality that is not solved, and the gold answer is solved."""
    if not _is_solved_for_the_same(answer, gold):
        return True
    unsolved = [relation for relation in _relations(answer) if not _is_solved(relation)]
    if not unsolved:
        return False
    gold_relations = list(_relations(gold))
    if any(set(relation.name.split()) <= EQUALS for relation in unsolved):
        return not any(free_symbols(value) for value in _values(gold)) and all(map(_is_solved, gold_relations))
    return all(map(_is_solved, gold_relations))


def _is_solved_for_the_same(answer: Node, gold: Node) -> bool:
    """False for x = 2y + 3 and for x - 2y = 3 where the gold answer gives y."""
    given = [relation for relation in _relations(answer) if set(relation.name.split()) <= EQUALS]
    known = frozenset().union(*map(free_symbols, _values(gold)))
    if gold.kind != "relation" or not known or not _names_given(gold):
        return True
    return all(any(name not in known for name in _names_given(relation)) for relation in given)


def _names_given(equation: Node) -> set[str]:
    """The symbols and functions for which an equation is solved."""
    pairs = zip(equation.args, reversed(equation.args), strict=True) if len(equation.args) == 2 else ()
    return {
        label.name or label.kind
        for label, value in pairs
        if label.kind in ("sym", "call", "text", "worded") and label.name not in free_symbols(value)
    }


def _has_reducible_ratio(answer: Node, gold: Node) -> bool:
    """Whether a ratio has a common factor that no ratio of the gold answer has, or is a fraction that reduces."""
    if answer.kind == "ratio" != gold.kind:
        return len(answer.args) != 2 or _reduces(Node("div", answer.args))
    ratios = [[part.args for part in _parts(node) if part.kind == "ratio"] for node in (answer, gold)]
    given, known = ([gcd(*(_common_factor([part]) or 1 for part in parts)) for parts in side] for side in ratios)
    return any(factor not in (1, *known) for factor in given)


def _relations(node: Node) -> Iterator[Node]:
    if node.kind == "relation":
        yield node
    for arg in node.args:
        yield from _relations(arg)


def _is_solved(relation: Node) -> bool:
    """Whether a relation compares a symbol with constants, or gives a value to a label: 2 < x < 5, f(2) = 3, a+b = 7.

    `a + b = 0` counts as a condition, not as a value.
    """
    if set(relation.name.split()) <= EQUALS:
        value = _stated_side(relation)
        label = relation.args[0] if value is not relation.args[0] else relation.args[-1]
        bare = label.kind in ("sym", "const", "text", "group", "call", "worded", "unit")
        zero = value.kind == "num" and value.value == 0
        return bare or not free_symbols(label) or (not zero and not any(map(_is_numeral, _parts(label))))
    return all(side.kind in ("sym", "nothing", "call") or not free_symbols(side) for side in relation.args)


def _parts(node: Node) -> Iterator[Node]:
    yield node
    for arg in node.args:
        yield from _parts(arg)


def _is_numeral(node: Node) -> bool:
    return node.kind == "num"


def _value_is_evaluated(value: Node, wanted: list[Node], gold: Node) -> bool:
    symbols = free_symbols(value)
    units = {part.name for part in _parts(gold) if part.kind == "unit"}
    if symbols and not symbols <= units:
        return any(free_symbols(node) for node in wanted) and _expression_is_evaluated(value, wanted, gold)
    if any(part.kind == "base" for part in _parts(value)):
        bases = {int(part.args[1].value) for part in _parts(gold) if part.kind == "base"}
        return value.kind == "base" and int(value.args[1].value) in (bases or {10})
    if value.kind == "mod" and all(map(_is_numeral, value.args)):  # 9 mod 11
        return value.args[0].value < value.args[1].value
    value = _with_unit_as_constant(value, units)
    if is_number(value):
        return True
    formulas = [node for node in wanted if not free_symbols(node) and not is_number(node)]
    return any(_calls(value) <= _calls(node) and _operations(value) <= _operations(node) + 2 for node in formulas)


def _with_unit_as_constant(node: Node, units: set[str]) -> Node:
    """The same expression with the symbol of a unit, m in 5m, as a factor like pi."""
    if node.kind == "sym" and node.name in units:
        return Node("const", name="unit " + node.name)
    return replace(node, args=tuple(_with_unit_as_constant(arg, units) for arg in node.args))


def _calls(node: Node) -> set[str]:
    names = {part.name for part in _parts(node) if part.kind == "call"} - {"root", "sqrt"}
    return {"log" if name in ("ln", "lg") else name for name in names}


def _operations(node: Node) -> int:
    return sum(max(1, len(part.args) - 1) for part in _parts(node) if part.args)


# --- numbers ---


def is_number(node: Node) -> bool:
    """Whether a constant is worked out."""
    terms = _terms(node)
    if len(terms) == 1:
        return _like(terms[0], sums=1) is not None
    if any(part.kind == "pow" and _has_i(part) for part in _parts(node)):  # e^{ix} + e^{-ix} is 2 cos x
        return False
    kinds = [_like(term, sums=0) for term in terms]
    return None not in kinds and len(set(kinds)) == len(kinds)


def _terms(node: Node) -> list[Node]:
    """The terms of a sum, without their signs; a mixed number is one term."""
    if node.kind in SIGNS:
        return _terms(node.args[0])
    if node.kind == "add" and node.name != "mixed":
        return [term for arg in node.args for term in _terms(arg)]
    return [node]


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    """The factors above and below the fraction line, without signs."""
    if node.kind in SIGNS:
        return _factors(node.args[0])
    if node.kind not in ("mul", "div"):
        return [node], []
    (above, below), (more_above, more_below) = map(_factors, node.args)
    if node.kind == "div":
        more_above, more_below = more_below, more_above
    return above + more_above, below + more_below


def _like(term: Node, *, sums: int) -> frozenset[object] | None:
    """The irrational factors of a term; None if the term is not worked out. Terms with the same factors are alike.

    Args:
        sums: how many of the factors may be sums.
    """
    if _reduces(term):
        return None
    kinds: list[tuple[tuple[object, object], bool]] = []
    for factors, below in zip(_factors(term), (False, True), strict=True):
        rationals = [factor for factor in factors if _is_rational(factor)]
        scientific = len(rationals) == 2 and not below and _is_power_of_ten(rationals[1])
        if not scientific and (len(rationals) > 1 or any(r.kind == "pow" and r is not factors[-1] for r in rationals)):
            return None
        if below and any(r.kind == "pow" for r in rationals):
            return None
        for factor in factors:
            if factor in rationals:
                continue
            if len(_terms(factor)) > 1:
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
    return any(part.kind == "const" and part.name == "i" for part in _parts(node))


def _is_rational(node: Node) -> bool:
    """A numeral, a mixed number, or a power of a numeral or of a fraction."""
    if node.kind == "pow":
        base, exponent = node.args
        whole = _is_signed_numeral(exponent) and _terms(exponent)[0].value.denominator == 1
        return whole and (base.kind == "num" or (_is_fraction(base) and not _reduces(base) and exponent.kind == "num"))
    return node.kind == "num" or (node.kind == "add" and node.name == "mixed" and not _reduces(node.args[1]))


def _reduces(node: Node) -> bool:
    r"""Whether a fraction has a common factor, a denominator 1 or a decimal: 6/4, `\frac{2x+4}{6}`, 0.5/2."""
    above, below = _factors(node)
    contents = _common_factor(above), _common_factor(below)
    if not below or any(_is_numeral(factor) and factor.value == 1 for factor in below):
        return bool(below)
    return None in contents or gcd(*contents) != 1  # type: ignore[arg-type]


def _common_factor(factors: Iterable[Node]) -> int | None:
    """The largest known whole number that divides a product; None if a factor is a decimal."""
    product = 1
    for factor in factors:
        terms = _terms(factor)
        if len(terms) > 1:
            above, below = zip(*map(_factors, terms), strict=True)
            common = [1] if any(below) else [_common_factor(term) for term in above]
        else:
            is_integer = terms[0].value.denominator == 1
            common = [(terms[0].value.numerator if is_integer else None) if _is_numeral(terms[0]) else 1]
        if None in common:
            return None
        product *= gcd(*common)
    return product


def _is_signed_numeral(node: Node) -> bool:
    return len(_terms(node)) == 1 and _is_numeral(_terms(node)[0])


def _is_fraction(node: Node) -> bool:
    above, below = _factors(node)
    return len(above) == 1 >= len(below) and all(map(_is_numeral, above + below))


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
        above, below = _factors(exponent)
        if not _is_fraction(exponent) and all(map(_is_rational, above + below)):  # 2^{\sqrt{9}}
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
        plain = all(part.kind != "call" for part in _parts(base)) and is_number(base)
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


# --- expressions with variables ---


def _expression_is_evaluated(value: Node, wanted: list[Node], gold: Node) -> bool:
    """Whether like terms and factors are collected, and sums are multiplied out or factored as in the gold answer."""
    known = {name for node in wanted for name in _calls(node)}
    if _calls(value) & SIMPLIFIED and not known & SIMPLIFIED:
        return False
    if not all(is_number(part) or set() < _calls(part) <= known for part in _constants(value)):
        return False
    if any(map(_reduces, _parts(value))) and not any(_reduces(part) for node in wanted for part in _parts(node)):
        return False
    calls = [sum(part.kind == "call" for part in _parts(node)) for node in (value, *wanted)]
    if calls[0] > max(MAX_CALLS, 2 * max(calls[1:])):
        return False
    if gold.kind == "relation" and not _names_given(gold):  # xy = 1 is solved by y = 1/x
        return True
    if _degree_below(value) > max(map(_degree_below, wanted)):
        return False
    factored = [any(_sums_multiplied(part) > 1 for part in _parts(node)) for node in wanted]
    if any(_sums_multiplied(part) > 1 for part in _parts(value)) not in factored:
        return False
    allowed = max(1, *(_terms_with_sums(node) for node in wanted))
    return _terms_with_sums(value) <= allowed and all(map(_is_collected, _parts(value)))


def _constants(node: Node) -> Iterator[Node]:
    """The largest parts without a variable: 2 and log_2 8 in 2x^{log_2 8}."""
    if not free_symbols(node):
        yield node.args[0] if node.kind in ("percent", "degree") else node
    else:
        for arg in node.args:
            yield from _constants(arg)


def _degree_below(node: Node) -> Fraction:
    """The degree of the common denominator: 2 for 1/x + 3/(x-1)."""
    return sum((_degree(base) * power for base, power in _denominators(node).items()), Fraction(0))


def _denominators(node: Node) -> Counter[Node]:
    """The factors of the common denominator, with their powers."""
    if node.kind == "add":
        return reduce(or_, map(_denominators, node.args))
    above, below = _factors(node)
    found = Counter[Node]()
    for factors, is_below in ((above, False), (below, True)):
        for factor in factors:
            base, exponent = factor.args if factor.kind == "pow" else (factor, number(1))
            is_negative = exponent.kind == "neg"
            times = _terms(exponent)[0]
            if is_below != is_negative:
                found[canonical(base)] += int(times.value) if _is_numeral(times) else 1
            if len(_terms(base)) > 1:
                found |= _denominators(base)
    return found


def _degree(node: Node) -> Fraction:
    """The degree of a polynomial; roots and other functions count as far as that is known."""
    match node.kind:
        case "sym":
            return Fraction(1)
        case "add" | "neg" | "pm":
            return max(map(_degree, node.args))
        case "mul":
            return sum(map(_degree, node.args), Fraction(0))
        case "pow" if _is_numeral(node.args[1]):
            return _degree(node.args[0]) * node.args[1].value
        case "call" if node.name == "root" and _is_numeral(node.args[1]) and node.args[1].value:
            return _degree(node.args[0]) / node.args[1].value
    return Fraction(0)


def _sums_multiplied(node: Node) -> int:
    """How many sums a product has as factors, powers counted: 2 for (x-2)(x-3) and (x+1)^2."""
    count = 0
    for factor in _factors(node)[0]:
        base, times = factor, 1
        if factor.kind == "pow" and _is_numeral(factor.args[1]):
            base, times = factor.args[0], int(factor.args[1].value)
        count += times if len(_terms(base)) > 1 else 0
    return count


def _terms_with_sums(node: Node) -> int:
    """How many terms of a sum contain a sum. A number times a sum counts twice: it is always multiplied out."""
    count = 0
    for term in _terms(node) if len(_terms(node)) > 1 else ():
        above, below = _factors(term)
        rest = [factor for factor in above + below if not _is_rational(factor)]
        if any(len(_terms(part)) > 1 for part in _parts(term)):
            count += 2 if len(rest) == 1 and rest[0] in above and len(_terms(rest[0])) > 1 else 1
    return count


def _is_collected(node: Node) -> bool:
    if node.kind == "add":
        kinds = [_monomial(term) for term in _terms(node)]
        known = [kind for kind in kinds if kind is not None]
        return len(set(known)) == len(known)
    if node.kind in ("mul", "div"):
        above, below = _factors(node)
        bases = [_base(factor) for factor in above + below]
        symbols = [base for base in bases if base.kind in ("sym", "const")]
        return len(set(symbols)) == len(symbols) and all(sum(map(_is_rational, side)) <= 1 for side in (above, below))
    return True


def _base(factor: Node) -> Node:
    is_power = factor.kind == "pow" and (_is_signed_numeral(factor.args[1]) or factor.args[0].kind == "const")
    return factor.args[0] if is_power else factor


def _monomial(term: Node) -> frozenset[tuple[Node, bool]] | None:
    """The powers of symbols in a term, with the side of the fraction line; None if it has any other factor."""
    above, below = _factors(term)
    factors = [(factor, side) for side, many in ((True, above), (False, below)) for factor in many]
    powers = [(factor, side) for factor, side in factors if not _is_rational(factor)]
    return frozenset(powers) if all(_base(factor).kind == "sym" for factor, _ in powers) else None
