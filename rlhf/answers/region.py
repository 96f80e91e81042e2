"""Subsets of the real line: intervals, unions, inequalities in one variable. (-1, 3) and -1 < x < 3 are one region.

A region is known by its ends and by a test of whether a number is inside. Two regions are the same if every end, and
one number between each two neighbouring ends, is inside both or outside both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise

from rlhf.answers.node import INFINITY, Node, UnsupportedError, free_symbols
from rlhf.answers.value import Value, as_real, evaluate, mp, mpc, mpf, same_number, work, zero_and_slope

SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
HOLDS = {"<": (-1,), ">": (1,), "<=": (-1, 0), ">=": (1, 0), "!=": (-1, 1)}  # the orders of the two sides
JOINED: dict[str, Callable[[bool, bool], bool]] = {
    "cup": lambda left, right: left or right,
    "cap": lambda left, right: left and right,
    "setminus": lambda left, right: left and not right,
}


@dataclass(frozen=True)
class Region:
    """The finite ends of the intervals, a test of numbers, and the variable (an empty string if none is named)."""

    ends: tuple[Value, ...]
    holds: Callable[[Value], bool]
    variable: str = ""


def same_region(gold: Node, answer: Node) -> bool:
    """Whether both describe the same subset of the real line. Raises UnsupportedError if one is no set of intervals."""
    left, right = region(gold), region(answer)
    if left.variable and right.variable and left.variable != right.variable:
        return False
    return all(left.holds(x) == right.holds(x) for x in _probes((*left.ends, *right.ends)))


def region(node: Node) -> Region:
    """The subset of the real line that a node describes. Raises UnsupportedError if it has no constant ends."""
    match node.kind:
        case "group":
            return _interval(node)
        case "numbers" if node.name == "reals":
            return Region((), lambda x: True)
        case "set":
            values = tuple(map(_end, node.args))
            return Region(values, lambda x: any(_order(x, value) == 0 for value in values))
        case "setop":
            return _combined(node.name, *map(region, node.args))
        case "relation":
            return _region_of_relation(node)
        case "builder":
            return _region_of_builder(node)
        case "list":
            return _region_of_list(node)
    raise UnsupportedError(node.kind)


def _probes(ends: Sequence[Value]) -> Iterator[Value]:
    """Every end, and a number between each two, below the lowest and above the highest."""
    work(5 * len(ends) ** 2)
    known: list[Value] = []
    for end in sorted(ends):
        if not known or _order(known[-1], end):
            known.append(end)
    known = known or [mpf(0)]
    yield known[0] - abs(known[0]) - 1
    for low, high in pairwise(known):
        yield low
        yield (low + high) / 2
    yield known[-1]
    yield known[-1] + abs(known[-1]) + 1


def _order(a: Value, b: Value) -> int:
    """-1, 0 or 1 for a < b, a = b, a > b; b may be infinite."""
    return 0 if mp.isfinite(b) and same_number(a, b) else 1 if a > b else -1


def _end(node: Node) -> Value:
    if node == INFINITY or node == Node("neg", (INFINITY,)):
        return mpf("inf") if node == INFINITY else mpf("-inf")
    value = as_real(evaluate(node, {}))
    if isinstance(value, mpc):
        raise UnsupportedError("not real")
    return value


def _half_line(op: str, bound: Value) -> Region:
    return Region((bound,) if mp.isfinite(bound) else (), lambda x: _order(x, bound) in HOLDS[op])


def _combined(name: str, left: Region, right: Region) -> Region:
    def holds(x: Value) -> bool:
        return JOINED[name](left.holds(x), right.holds(x))

    return Region((*left.ends, *right.ends), holds, left.variable or right.variable)


def _interval(node: Node) -> Region:
    if len(node.args) != 2:
        raise UnsupportedError("not an interval")
    low, high = map(_end, node.args)
    if not low < high and not (node.name == "[]" and mp.isfinite(low) and _order(low, high) == 0):
        raise UnsupportedError("ends out of order")
    above, below = ">=" if node.name[0] == "[" else ">", "<=" if node.name[1] == "]" else "<"
    return _combined("cap", _half_line(above, low), _half_line(below, high))


def _region_of_relation(node: Node) -> Region:
    """The region of a chain of comparisons that are linear in one variable, of `x in S` or of `x != a`."""
    operators = node.name.split()
    if operators == ["in"] and node.args[0].kind == "sym":
        return replace(region(node.args[1]), variable=node.args[0].name)
    if not all(op in HOLDS for op in operators):
        raise UnsupportedError("not an inequality")
    symbols = free_symbols(node)
    if node.args[0].kind == "nothing" and not symbols and len(operators) == 1:
        return _half_line(operators[0], _end(node.args[1]))
    if len(symbols) != 1:
        raise UnsupportedError("not in one variable")
    (variable,) = symbols
    steps = zip(node.args, operators, node.args[1:], strict=False)
    solved = [_region_of_inequality(left, op, right, variable) for left, op, right in steps]
    return replace(reduce(partial(_combined, "cap"), solved), variable=variable)


def _region_of_inequality(left: Node, op: str, right: Node, variable: str) -> Region:
    """The region in which `left op right` holds, if both are linear in the variable."""
    for side, bound, direction in ((left, right, op), (right, left, SWAPPED[op])):
        if side.kind == "sym" and not free_symbols(bound):
            return _half_line(direction, _end(bound))
    zero, slope = zero_and_slope(Node("add", (left, Node("neg", (right,)))), {}, variable)
    if isinstance(slope, mpc) or isinstance(zero, mpc):
        raise UnsupportedError("not real")
    return _half_line(op if slope > 0 else SWAPPED[op], zero)


def _region_of_builder(node: Node) -> Region:
    head, condition = node.args
    restricted = region(condition)
    if head.kind == "relation" and head.name == "in" and head.args[1] == Node("numbers", name="reals"):
        head = head.args[0]
    if head.kind != "sym" or restricted.variable not in ("", head.name):
        raise UnsupportedError("a set of expressions")
    return replace(restricted, variable="")


def _region_of_list(node: Node) -> Region:
    """The union for a list joined by `or`; for other lists the intersection, or the union if that is empty."""
    if not all(arg.kind in ("relation", "setop", "numbers") for arg in node.args):
        raise UnsupportedError("a list")
    regions = [region(arg) for arg in node.args]
    if len({part.variable for part in regions}) != 1:
        raise UnsupportedError("several variables")
    either, both = (reduce(partial(_combined, name), regions) for name in ("cup", "cap"))
    return both if node.name != "or" and any(map(both.holds, _probes(both.ends))) else either
