"""Subsets of the real line: intervals, unions, inequalities in one variable. (-1, 3) and -1 < x < 3 are one region."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cmp_to_key

from rlhf.rewards.answers.arithmetic import Value, as_real, mp, mpc, mpf, same_number
from rlhf.rewards.answers.errors import UndefinedError, UnsupportedError
from rlhf.rewards.answers.node import INFINITY, Node, free_symbols
from rlhf.rewards.answers.value import evaluate, zero_and_slope

SWAPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
ORDERED = ("<", ">", "<=", ">=")
POSITIVE_INFINITY, NEGATIVE_INFINITY = mpf("inf"), mpf("-inf")


@dataclass(frozen=True)
class Piece:
    """An interval from low to high; an infinite end is never closed."""

    low: Value
    low_closed: bool
    high: Value
    high_closed: bool


@dataclass(frozen=True)
class Region:
    """Disjoint pieces in ascending order, and the variable that they restrict, "" if none is named."""

    pieces: tuple[Piece, ...]
    variable: str = ""

    def same_as(self, other: Region) -> bool:
        if self.variable and other.variable and self.variable != other.variable:
            return False
        return len(self.pieces) == len(other.pieces) and all(
            _same_end(a.low, b.low)
            and _same_end(a.high, b.high)
            and (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
            for a, b in zip(self.pieces, other.pieces, strict=True)
        )


LINE = Piece(NEGATIVE_INFINITY, False, POSITIVE_INFINITY, False)


def region(node: Node) -> Region:
    """The subset of the real line that a node describes. Raises UnsupportedError if it has no constant ends."""
    match node.kind:
        case "group":
            return Region((_interval(node),))
        case "numbers" if node.name == "reals":
            return Region((LINE,))
        case "set":
            return Region(_merged([Piece(v, True, v, True) for v in map(_end, node.args)]))
        case "setop":
            return _combined(node)
        case "relation":
            return _relation(node)
        case "builder":
            return _builder(node)
        case "list":
            return _listed(node)
    raise UnsupportedError(node.kind)


def same_region(gold: Node, answer: Node) -> bool:
    """Whether both describe the same subset of the real line. Raises UnsupportedError if one is no set of intervals."""
    return region(gold).same_as(region(answer))


def _end(node: Node) -> Value:
    if node == INFINITY:
        return POSITIVE_INFINITY
    if node.kind == "neg" and node.args[0] == INFINITY:
        return NEGATIVE_INFINITY
    if node.kind == "pm" and node.args[0] == INFINITY:
        raise UnsupportedError("both infinities")
    value = as_real(evaluate(node, {}))
    if isinstance(value, mpc):
        raise UnsupportedError("not real")
    return value


def _interval(node: Node) -> Piece:
    if len(node.args) != 2:
        raise UnsupportedError("not an interval")
    low, high = (_end(arg) for arg in node.args)
    if not low < high and not (node.name == "[]" and same_number(low, high)):
        raise UnsupportedError("ends out of order")
    return Piece(low, node.name[0] == "[" and mp.isfinite(low), high, node.name[1] == "]" and mp.isfinite(high))


def _combined(node: Node) -> Region:
    left, right = (region(arg) for arg in node.args)
    variable = left.variable or right.variable
    if node.name == "cup":
        return Region(_merged([*left.pieces, *right.pieces]), variable)
    if node.name == "cap":
        return Region(_intersection(left.pieces, right.pieces), variable)
    return Region(_intersection(left.pieces, _complement(right.pieces)), variable)


def _relation(node: Node) -> Region:
    """The region of a chain of comparisons that are linear in one variable, of `x in S` or of `x != a`."""
    operators = node.name.split()
    if operators == ["in"]:
        if node.args[0].kind != "sym":
            raise UnsupportedError("membership of an expression")
        return Region(region(node.args[1]).pieces, node.args[0].name)
    if not all(op in SWAPPED for op in operators):
        raise UnsupportedError("not an inequality")
    symbols = free_symbols(node)
    if node.args[0].kind == "nothing" and not symbols and len(operators) == 1:
        return Region(_half_line(operators[0], _end(node.args[1])))
    if len(symbols) != 1:
        raise UnsupportedError("not in one variable")
    (variable,) = symbols
    pieces: tuple[Piece, ...] = (LINE,)
    for left, op, right in zip(node.args, operators, node.args[1:], strict=False):
        pieces = _intersection(pieces, _solved(left, op, right, variable))
    return Region(pieces, variable)


def _solved(left: Node, op: str, right: Node, variable: str) -> tuple[Piece, ...]:
    """The region in which `left op right` holds, if both are linear in the variable."""
    for side, infinite, direction in ((left, right, op), (right, left, SWAPPED[op])):
        if infinite in (INFINITY, Node("neg", (INFINITY,))) and side.kind == "sym" and direction in ORDERED:
            return (LINE,)
    difference = Node("add", (left, Node("neg", (right,))))
    zero, slope = zero_and_slope(difference, {}, variable)
    if isinstance(slope, mpc) or isinstance(zero, mpc):
        raise UnsupportedError("not real")
    return _half_line(op if slope > 0 else SWAPPED[op], zero)


def _half_line(op: str, bound: Value) -> tuple[Piece, ...]:
    below = Piece(NEGATIVE_INFINITY, False, bound, op == "<=")
    above = Piece(bound, op == ">=", POSITIVE_INFINITY, False)
    if op == "!=":
        return (below, above)
    return (below,) if op in ("<", "<=") else (above,)


def _builder(node: Node) -> Region:
    head, condition = node.args
    restricted = region(condition)
    if head.kind == "relation" and head.name == "in" and head.args[1] == Node("numbers", name="reals"):
        head = head.args[0]
    if head.kind != "sym" or restricted.variable not in ("", head.name):
        raise UnsupportedError("a set of expressions")
    return Region(restricted.pieces)


def _listed(node: Node) -> Region:
    """The union for a list joined by `or`; for other lists the intersection, or the union if that is empty."""
    if not all(arg.kind in ("relation", "setop", "numbers") for arg in node.args):
        raise UnsupportedError("a list")
    regions = [region(arg) for arg in node.args]
    variables = {r.variable for r in regions}
    if len(variables) != 1:
        raise UnsupportedError("several variables")
    united = _merged([piece for r in regions for piece in r.pieces])
    both: tuple[Piece, ...] = (LINE,)
    for part in regions:
        both = _intersection(both, part.pieces)
    return Region(united if node.name == "or" or not both else both, variables.pop())


def _intersection(left: tuple[Piece, ...], right: tuple[Piece, ...]) -> tuple[Piece, ...]:
    pieces = []
    for a in left:
        for b in right:
            low, low_closed = max((a.low, not a.low_closed), (b.low, not b.low_closed))
            high, high_closed = min((a.high, a.high_closed), (b.high, b.high_closed))
            piece = Piece(low, not low_closed, high, high_closed)
            if low < high or (low == high and piece.low_closed and piece.high_closed):
                pieces.append(piece)
    return _merged(pieces)


def _complement(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    rest: tuple[Piece, ...] = (LINE,)
    for piece in pieces:
        outside = []
        if piece.low > NEGATIVE_INFINITY:
            outside.append(Piece(NEGATIVE_INFINITY, False, piece.low, not piece.low_closed))
        if piece.high < POSITIVE_INFINITY:
            outside.append(Piece(piece.high, not piece.high_closed, POSITIVE_INFINITY, False))
        rest = _intersection(rest, tuple(outside))
    return rest


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The pieces in order; pieces that touch or overlap become one."""
    merged: list[Piece] = []
    for piece in sorted(pieces, key=cmp_to_key(_by_low_end)):
        if merged and (
            piece.low < merged[-1].high
            or (_same_end(piece.low, merged[-1].high) and (piece.low_closed or merged[-1].high_closed))
        ):
            last = merged.pop()
            high, closed = max((last.high, last.high_closed), (piece.high, piece.high_closed))
            piece = Piece(last.low, last.low_closed, high, closed)
        merged.append(piece)
    return tuple(merged)


def _by_low_end(a: Piece, b: Piece) -> int:
    if a.low != b.low:
        return -1 if a.low < b.low else 1
    return int(b.low_closed) - int(a.low_closed)


def _same_end(a: Value, b: Value) -> bool:
    if a == b:
        return True
    if (isinstance(a, mpf) and not mp.isfinite(a)) or (isinstance(b, mpf) and not mp.isfinite(b)):
        return False
    try:
        return same_number(a, b)
    except UndefinedError:
        return False
