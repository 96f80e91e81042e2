"""Whether an equation describes the line or curve that the prompt asks for, also if it is not solved for y."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import lru_cache

from rlhf.rewards.answers.clean import clean
from rlhf.rewards.answers.copied import MAX_PROMPT
from rlhf.rewards.answers.equations import proportion
from rlhf.rewards.answers.errors import UnsupportedError
from rlhf.rewards.answers.evaluated import is_collected, names_given
from rlhf.rewards.answers.extract import MATH_SPAN
from rlhf.rewards.answers.node import Node, free_symbols, parts
from rlhf.rewards.answers.tree import parse

MAX_ANSWER = 200  # characters
ASKED = re.compile(r"\bequations? (?:of|for)\b", re.IGNORECASE)
SOLVED_FORM = re.compile(
    r"\b(?:invers|solve|slope[- ]intercept|form\b|in terms of|as a function|explicit|isolate|rearrange)", re.IGNORECASE
)
PLAIN_EQUATION = re.compile(
    r"(?:(?<![A-Za-z])[A-Za-z]{1,2}(?![A-Za-z])|[-+*/^(){}\d\s]){1,100}=[-+*/^(){}\d\sxyt]{1,100}"
)


def is_equation_of_curve(answer: str, prompt: str, gold: str) -> bool:
    r"""Whether an answer such as `x+3y=7`, equivalent to `y=-\frac13x+\frac73`, may be left unsolved.

    It is a polynomial with whole coefficients, multiplied out, not in the prompt, nor with variables swapped.
    """
    if len(answer) > MAX_ANSWER or not ASKED.search(prompt) or SOLVED_FORM.search(prompt):
        return False
    given, known = _equation(answer), _equation(gold)
    if not given or not known or not names_given(known) or names_given(given):
        return False
    form, symbols = _difference(given), sorted(free_symbols(given))
    if len(symbols) != 2 or not all(_is_polynomial(part) and is_collected(part) for part in parts(form)):
        return False
    values = [Node("sym", name=name) for name in symbols]
    turned = _with(form, dict(zip(symbols, reversed(values), strict=True)))
    return all(proportion(old, new) is None for old in _equations(prompt) for new in (form, turned))


def _equation(text: str) -> Node | None:
    with contextlib.suppress(UnsupportedError, RecursionError):
        node = parse(clean(text))
        return node if node.kind == "relation" and node.name == "=" and len(node.args) == 2 else None
    return None


def _difference(equation: Node) -> Node:
    """One side minus the other; f(x) on the left is y."""
    left, right = equation.args
    left = Node("sym", name="y") if left.kind == "call" and left.name.startswith("?") else left
    return left if right.kind == "num" and not right.value else Node("add", (left, Node("neg", (right,))))


def _is_polynomial(node: Node) -> bool:
    known = node.kind in ("add", "neg", "mul", "pow", "sym", "num") and node.value.denominator == 1
    return known and not (node.kind in ("mul", "pow") and any(part.kind == "add" for part in parts(node)))


def _with(node: Node, values: dict[str, Node]) -> Node:
    return (
        values.get(node.name, node)
        if node.kind == "sym"
        else replace(node, args=tuple(_with(arg, values) for arg in node.args))
    )


@lru_cache(maxsize=256)  # a group of responses shares its prompt
def _equations(prompt: str) -> list[Node]:
    """The sides of each equation of the prompt, subtracted."""
    text = prompt[-MAX_PROMPT:]
    formulas = [next(filter(None, match.groups())) for match in MATH_SPAN.finditer(text)]
    return [_difference(found) for found in map(_equation, [*formulas, *PLAIN_EQUATION.findall(text)]) if found]
