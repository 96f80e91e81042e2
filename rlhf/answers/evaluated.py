r"""Whether an answer is worked out as far as the gold answer, or a formula that a response may have copied.

An expression is factored if the gold answer is, and not otherwise; an equation is solved if the gold answer is, and for
the same variable. An answer never has to be worked out further than the gold answer. Of numbers, numerals, fractions in
lowest terms, roots, powers and sums of these are worked out: `\frac{3}{4}`, `1+2\sqrt{3}` and `2^{10}`, but not
`\frac{6}{4}`, `\sqrt{9}`, `3+4\cdot 5` or `\binom{5}{2}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import reduce
from itertools import combinations
from math import gcd, isqrt
from operator import or_

from mpmath.libmp import to_rational

from rlhf.answers.node import EULER, Node, canonical, free_symbols, number, parts, with_symbols
from rlhf.answers.value import MAX_DIFFERENCE, constant, mpc, mpf

CONTAINERS = ("list", "set", "group", "matrix", "row", "unit", "worded", "percent", "degree", "ratio", "setop")
MAX_CALLS = 2  # of functions in an expression with variables, if the gold answer has fewer: sin x / cos x for tan x
SIMPLIFIED = frozenset(["sin", "cos", "tan", "cot", "sec", "csc", "log"])  # sin^2 x + cos^2 x is 1
EQUALS = frozenset(["=", "~"])
SIGNS = ("neg", "pm")
MAX_DENOMINATOR = 10**50  # of a number that counts as rational if it agrees in all digits
MAX_ROOT = 10_000  # a larger factor of a radicand is not looked for


def is_evaluated(answer: Node, gold: Node) -> bool:
    """Whether every value in the answer is worked out, or no more complicated than the gold answer."""
    answer, gold = _distributed(answer), _distributed(gold)
    if _has_unsolved_relation(answer, gold) or _has_reducible_ratio(answer, gold):
        return False
    wanted = list(_values(gold))
    for relation in filter(_is_equation, parts(gold)):  # the sides that are more than a label: xy in xy = 1
        wanted += [side for side in relation.args if side.kind in ("add", "mul", "div", "pow")]
    return all(_value_is_evaluated(value, wanted, gold) for value in _values(answer))


def _distributed(node: Node) -> Node:
    r"""The tree with a^2/b^2 for (a/b)^2, and `\sqrt{xy}` for `\sqrt{x}\sqrt{y}`: these are worked out equally far."""
    node = replace(node, args=tuple(map(_distributed, node.args)))
    if node.kind == "pow" and node.args[0].kind == "div" and free_symbols(node.args[0]):
        base, exponent = node.args
        return Node("div", tuple(side if side.value == 1 else Node("pow", (side, exponent)) for side in base.args))
    if node.kind == "mul" and all(arg.kind == "call" and arg.name == "root" and free_symbols(arg) for arg in node.args):
        (left, degree), (right, other) = (root.args for root in node.args)
        if canonical(degree) == canonical(other):
            return Node("call", (Node("mul", (left, right)), degree), "root")
    return node


def _is_equation(node: Node) -> bool:
    return node.kind == "relation" and set(node.name.split()) <= EQUALS


def _values(node: Node) -> Iterator[Node]:
    """The expressions in lists, intervals, relations and the like; in an equation the side that states the value."""
    if _is_equation(node):
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
    """The last side; in `5 = x` the first side; of an exact and a rounded number the exact one."""
    sides = equation.args[:-1] if equation.name.split()[-1] == "~" and len(equation.args) > 2 else equation.args
    if equation.name == "~" and equation.args[0].kind not in ("sym", "call", "text"):
        return equation.args[0]
    return sides[0] if sides[-1].kind == "sym" and len(sides) == 2 else sides[-1]


def _has_unsolved_relation(answer: Node, gold: Node) -> bool:
    """Whether the answer is an equation or inequality that is not solved, and the gold answer is solved."""
    if not _is_solved_for_the_same(answer, gold):
        return True
    unsolved = [part for part in parts(answer) if part.kind == "relation" and not _is_solved(part)]
    if any(map(_is_equation, unsolved)) and any(map(free_symbols, _values(gold))):
        return False
    return bool(unsolved) and all(_is_solved(part) for part in parts(gold) if part.kind == "relation")


def _is_solved_for_the_same(answer: Node, gold: Node) -> bool:
    """False for x = 2y + 3 and for x - 2y = 3 where the gold answer gives y."""
    known = frozenset().union(*map(free_symbols, _values(gold)))
    if gold.kind != "relation" or not known or not _solved_names(gold):
        return True
    return all(any(name not in known for name in _solved_names(part)) for part in parts(answer) if _is_equation(part))


def _solved_names(equation: Node) -> set[str]:
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
        return len(answer.args) != 2 or reduces(Node("div", answer.args))
    ratios = [[part.args for part in parts(node) if part.kind == "ratio"] for node in (answer, gold)]
    in_answer, in_gold = ([gcd(*(common_factor([part]) or 1 for part in ratio)) for ratio in side] for side in ratios)
    return any(factor not in (1, *in_gold) for factor in in_answer)


def _is_solved(relation: Node) -> bool:
    """Whether a relation compares a symbol with constants, or gives a value to a label: 2 < x < 5, f(2) = 3, a+b = 7.

    `a + b = 0` counts as a condition, not as a value.
    """
    if _is_equation(relation):
        value = _stated_side(relation)
        label = relation.args[0] if value is not relation.args[0] else relation.args[-1]
        bare = label.kind in ("sym", "const", "text", "group", "call", "worded", "unit")
        zero = value.kind == "num" and value.value == 0
        return bare or not free_symbols(label) or (not zero and not any(map(is_numeral, parts(label))))
    return all(side.kind in ("sym", "nothing", "call") or not free_symbols(side) for side in relation.args)


def _value_is_evaluated(value: Node, wanted: list[Node], gold: Node) -> bool:
    symbols = free_symbols(value)
    units = {part.name for part in parts(gold) if part.kind == "unit"}
    if symbols and not symbols <= units:
        return any(free_symbols(node) for node in wanted) and _expression_is_evaluated(value, wanted, gold)
    if any(part.kind == "base" for part in parts(value)):
        bases = {int(part.args[1].value) for part in parts(gold) if part.kind == "base"}
        return value.kind == "base" and int(value.args[1].value) in (bases or {10})
    if value.kind == "mod" and all(map(is_numeral, value.args)):  # 9 mod 11
        return value.args[0].value < value.args[1].value
    value = with_symbols(value, dict.fromkeys(units, EULER))  # m of 5m is a factor like any constant
    if is_number(value):
        return True
    formulas = [node for node in wanted if not free_symbols(node) and not is_number(node)]
    return any(_calls(value) <= _calls(node) and _operations(value) <= _operations(node) + 2 for node in formulas)


def _calls(node: Node) -> set[str]:
    names = {part.name for part in parts(node) if part.kind == "call"} - {"root"}
    return {"log" if name in ("ln", "lg") else name for name in names}


def _operations(node: Node) -> int:
    return sum(max(1, len(part.args) - 1) for part in parts(node) if part.args)


def _expression_is_evaluated(value: Node, wanted: list[Node], gold: Node) -> bool:
    """Whether like terms and factors are collected, and sums are multiplied out or factored as in the gold answer."""
    known = {name for node in wanted for name in _calls(node)}
    if _calls(value) & SIMPLIFIED and not known & SIMPLIFIED:
        return False
    if not all(is_number(part) or set() < _calls(part) <= known for part in _constants(value)):
        return False
    if any(map(reduces, parts(value))) and not any(reduces(part) for node in wanted for part in parts(node)):
        return False
    calls = [sum(part.kind == "call" for part in parts(node)) for node in (value, *wanted)]
    if calls[0] > max(MAX_CALLS, 2 * max(calls[1:])):
        return False
    if gold.kind == "relation" and not _solved_names(gold):  # xy = 1 is solved by y = 1/x
        return True
    if _divisors(value).total() > max(_divisors(node, in_roots=True).total() for node in wanted):
        return False
    factored = [any(_sums_multiplied(part) > 1 for part in parts(node)) for node in wanted]
    if any(_sums_multiplied(part) > 1 for part in parts(value)) not in factored:
        return False
    allowed = max(1, *(_terms_with_sums(node) for node in wanted))
    return _terms_with_sums(value) <= allowed and all(map(_is_collected, parts(value)))


def _constants(node: Node) -> Iterator[Node]:
    """The largest parts without a variable: 2 and log_2 8 in 2x^{log_2 8}."""
    if not free_symbols(node):
        yield node.args[0] if node.kind in ("percent", "degree") else node
    else:
        for arg in node.args:
            yield from _constants(arg)


def _divisors(node: Node, *, in_roots: bool = False) -> Counter[Node]:
    """The factors of the common denominator that have variables, with their powers: x and x-1 of 1/x + 3/(x-1)."""
    if node.kind == "add":
        return reduce(or_, (_divisors(arg, in_roots=in_roots) for arg in node.args))
    powers = Counter[Node]()
    for factors, is_below in zip(factors_of(node), (False, True), strict=True):
        for factor in factors:
            base, exponent = factor.args if factor.kind == "pow" else (factor, number(1))
            is_divisor = is_below != (exponent.kind == "neg") and (base.kind != "call" or base.name == "root")
            if is_divisor and free_symbols(base):
                times = terms_of(exponent)[0]
                powers[canonical(base)] += int(times.value) if is_numeral(times) else 1
            if len(terms_of(base)) > 1:
                powers |= _divisors(base)
            elif in_roots and base.kind == "call" and base.name == "root":
                powers |= _divisors(base.args[0], in_roots=True)
    return powers


def _sums_multiplied(node: Node) -> int:
    """How many sums a product has as factors, powers counted: 2 for (x-2)(x-3) and (x+1)^2."""
    count = 0
    for factor in factors_of(node)[0]:
        base, times = factor, 1
        if factor.kind == "pow" and is_numeral(factor.args[1]):
            base, times = factor.args[0], int(factor.args[1].value)
        count += times if len(terms_of(base)) > 1 else 0
    return count


def _terms_with_sums(node: Node) -> int:
    """How many terms of a sum contain a sum. A number times a sum counts twice: it is always multiplied out."""
    count = 0
    for term in terms_of(node) if len(terms_of(node)) > 1 else ():
        above, below = factors_of(term)
        rest = [factor for factor in above + below if not is_rational(factor)]
        if any(len(terms_of(part)) > 1 for part in parts(term)):
            count += 2 if len(rest) == 1 and rest[0] in above and len(terms_of(rest[0])) > 1 else 1
    return count


def _is_collected(node: Node) -> bool:
    if node.kind == "add":
        kinds = [_monomial(term) for term in terms_of(node)]
        known = [kind for kind in kinds if kind is not None]
        return len(set(known)) == len(known)
    if node.kind in ("mul", "div"):
        above, below = factors_of(node)
        bases = [_base(factor) for factor in above + below]
        symbols = [base for base in bases if base.kind in ("sym", "const")]
        return len(set(symbols)) == len(symbols) and all(sum(map(is_rational, side)) <= 1 for side in (above, below))
    return True


def _base(factor: Node) -> Node:
    is_power = factor.kind == "pow" and (is_signed_numeral(factor.args[1]) or factor.args[0].kind == "const")
    return factor.args[0] if is_power else factor


def _monomial(term: Node) -> frozenset[tuple[Node, bool]] | None:
    """The powers of symbols in a term, with the side of the fraction line; None if it has any other factor."""
    above, below = factors_of(term)
    factors = [(factor, side) for side, many in ((True, above), (False, below)) for factor in many]
    powers = [(factor, side) for factor, side in factors if not is_rational(factor)]
    return frozenset(powers) if all(_base(factor).kind == "sym" for factor, _ in powers) else None


# --- numbers ---


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
    r"""Whether a term is rational times irrational numbers, one a sum if `sums`: `\frac{2\sqrt{3}}{\pi}`."""
    if reduces(term):
        return False
    irrational = []
    for factors, is_below in zip(factors_of(term), (False, True), strict=True):
        rational = [factor for factor in factors if is_rational(factor)]
        scientific = (
            len(rational) == 2 and not is_below and rational[1].kind == "pow" and rational[1].args[0].value == 10
        )
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
    """A key that is equal for roots, constants or powers that can be collected; None for other nodes.

    It is None also for roots and powers with rational values, which are not worked out.
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
    """True for a numeral, or a numeral over a numeral: 5, 3/4."""
    above, below = factors_of(node)
    return len(above) == 1 >= len(below) and all(map(is_numeral, above + below))


def is_numeral(node: Node) -> bool:
    return node.kind == "num"
