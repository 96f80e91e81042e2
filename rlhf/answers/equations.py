"""Equations and inequalities: which side is only a label, and when two of them mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf.answers.node import Node, UndefinedError, UnsupportedError, free_symbols
from rlhf.answers.value import Value, as_real, constant, estimate_of, evaluate, points, same_number, zero_and_slope

Same = Callable[[Node, Node], bool]

LABEL_KINDS = ("sym", "const", "call", "text", "group", "mul", "div", "worded", "unit")
EXPRESSION_LABEL_KINDS = (*LABEL_KINDS, "add", "neg")
MAX_ROUNDING = 0.02  # relative; if the number after an approximation sign is further off, it is another answer


def is_label(node: Node, *, kinds: tuple[str, ...] = LABEL_KINDS) -> bool:
    """Whether a node only names a value: x, AB, f(2), |AB|, NO/BO, (p, q, r), \\text{Area}; not 2x or x + 1."""
    return node.kind in kinds and (
        node.kind in ("sym", "const", "text")
        or (node.kind == "call" and node.name not in ("root",))
        or all(is_label(arg, kinds=kinds) for arg in node.args)
    )


def value_without_label(node: Node, same: Same, *, of_gold: bool) -> Node | None:
    """The value that an equation gives to a label; None if the equation states more than a value.

    The value of a chain (x = 2 + 3 = 5) is its last side, if the sides before it are labels or equal to it. In a
    response the label may be an expression (m + n = 113). A gold a + b = 1 is an equation, and 1 is only a part of it.
    """
    if set(node.name.split()) - {"=", "~"}:
        return None
    kinds = LABEL_KINDS if of_gold else EXPRESSION_LABEL_KINDS
    *before, last = _without_rounded_side(node, kinds)
    if not before:
        return last
    if len(before) == 1 and last.kind == "sym" and not free_symbols(before[0]):  # 5 = x
        return before[0]
    for side in before:
        if not is_label(side, kinds=kinds) and (side.kind in ("sym", "text") or not _agrees(same, side, last)):
            return None
        constant_label = is_label(side, kinds=kinds) and not free_symbols(side) and not _names_a_function(side)
        if constant_label and not _agrees(same, side, last):
            return None
    return last


def _without_rounded_side(node: Node, kinds: tuple[str, ...]) -> Sequence[Node]:
    """The sides before `\\approx`, if the last of them is an exact value: sqrt(2) in sqrt(2) ~ 1.414."""
    if not node.name.endswith("~") or is_label(node.args[-2], kinds=kinds):
        return node.args
    exact, rounded = (_rough_value(side) for side in node.args[-2:])
    last = node.args[-1]
    shift = 2 if last.kind == "percent" else 0
    decimals = len((last.args[0] if shift else last).name.partition(".")[2]) + shift  # 0.05 may be 3/56
    allowed = max(MAX_ROUNDING * abs(exact or 0), 0.5000001 / 10**decimals if decimals else 0)
    close = exact is not None and rounded is not None and abs(exact - rounded) <= allowed
    return node.args[:-1] if close else node.args


def _rough_value(side: Node) -> complex | None:
    if side.kind == "unit":
        return _rough_value(side.args[0])
    if side.kind in ("percent", "degree"):
        value = constant(side)
        return None if value is None else complex(as_real(value))
    return estimate_of(side)


def _names_a_function(node: Node) -> bool:
    return node.kind in ("text", "worded", "unit") or (node.kind == "call" and node.name.startswith("?"))


def _agrees(same: Same, side: Node, last: Node) -> bool:
    try:
        return same(side, last)
    except (UndefinedError, UnsupportedError):
        return False


def same_equation(gold: Node, answer: Node, same: Same) -> bool:
    """Whether two equations give the same value to the same label, or have the same solutions."""
    if any(set(node.name.split()) - {"=", "~"} for node in (gold, answer)):
        return False
    values = [value_without_label(node, same, of_gold=True) for node in (gold, answer)]
    if values[0] is not None and values[1] is not None:
        if _agrees(same, gold.args[0], answer.args[0]) or _are_y_and_a_function(gold.args[0], answer.args[0]):
            return same(values[0], values[1])
        if all(
            node.args[0].kind in ("sym", "call", "text", "group") and not free_symbols(value)
            for node, value in zip((gold, answer), values, strict=True)
            if value
        ):
            return False  # x = 5 and y = 5 are different statements
    if len(gold.args) != 2 or len(answer.args) != 2:
        raise UnsupportedError("a chain of equations")
    left, right = (Node("add", (node.args[0], Node("neg", (node.args[1],)))) for node in (gold, answer))
    if free_symbols(left) != free_symbols(right):
        return False
    if proportion(left, right) is not None:
        return True
    # without a division, a factor that is not constant adds solutions: x(y-1) = 0 is not y = 1
    return (_divides_by_a_symbol(left) or _divides_by_a_symbol(right)) and _same_solution(left, right)


def _are_y_and_a_function(a: Node, b: Node) -> bool:
    """y = 2x and f(x) = 2x."""
    return {a.kind, b.kind} == {"sym", "call"} and "y" in (a.name, b.name) and "?" in (a.name[0], b.name[0])


def proportion(left: Node, right: Node) -> Value | None:
    """The constant c with left = c right and c not 0; None if there is none."""
    ratios: list[Value] = []
    for point in points(sorted(free_symbols(left) | free_symbols(right))):
        try:
            a, b = as_real(evaluate(left, point)), as_real(evaluate(right, point))
            if a == 0 or b == 0:
                continue
            ratios.append(a / b)
        except UndefinedError:
            continue
    if len(ratios) < 2 or not all(same_number(ratios[0], ratio) for ratio in ratios[1:]):
        return None
    return ratios[0] if abs(ratios[0]) * 10**20 > 1 else None


def _same_solution(left: Node, right: Node) -> bool:
    """Whether both expressions are linear in one symbol and are 0 at the same value of it: xy - 1 and y - 1/x.

    Raises UnsupportedError if they are not linear in the same symbol.
    """
    for symbol in sorted(free_symbols(left)):
        try:
            roots = [
                [zero_and_slope(node, point, symbol)[0] for node in (left, right)]
                for point in points([*free_symbols(left)])
            ]
        except (UndefinedError, UnsupportedError):
            continue
        return all(same_number(*pair) for pair in roots)
    raise UnsupportedError("equations that are not linear")


def _divides_by_a_symbol(node: Node) -> bool:
    return any(map(_divides_by_a_symbol, node.args)) or (node.kind == "div" and bool(free_symbols(node.args[1])))
