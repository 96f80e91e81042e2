"""Whether an extracted answer means the same as the gold answer.

Cheap checks come first: the same spelling, the same option or words, the same tree, the same numbers. Notation outside
the grammar (integrals, limits) equals nothing but its own spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from rlhf.answers.clean import clean, option_letter
from rlhf.answers.equations import is_label, same_equation, value_without_label
from rlhf.answers.evaluated import is_evaluated
from rlhf.answers.forms import in_one_notation
from rlhf.answers.node import Node, UndefinedError, UnsupportedError, canonical, exact_number, parts
from rlhf.answers.quantity import Tolerance, is_tolerant, same_quantity, set_tolerance
from rlhf.answers.region import same_region
from rlhf.answers.tree import parse
from rlhf.answers.value import equal, estimate_of, start_work, work
from rlhf.answers.words import as_words, is_prose, meaning_of, same_clock_time, same_items, unwrapped

REGION_KINDS = ("setop", "numbers", "builder")
COMPARISONS = ("<", ">", "<=", ">=", "!=", "in")

TWO_FORMS = re.compile(  # 1/2 (or 0.5): both must be right
    r"([^()]{1,100}?)(?:\\[ ,;!]|\s)*(?:\\text\s*\{\s*)?\(\s*(?:\\text\s*\{\s*)?or(?: equivalently)?(?! about| approx)"
    r"(?:\s*\}|\s)(?:\\ )?([^()]{1,100}?)(?:\\text\s*\{\s*)?\)(?:\s*\})?"
)
DECIMAL_COMMA = re.compile(r"^([^.,()\[\]{}]*\d),(?!\d{3}(?!\d))(\d+[^.,]*)$")  # 3,5; not 3,500, nor (3,5)
CYCLES = re.compile(r"(?:\(\s*\d+(?:(?:\s+|\s*,\s*)\d+)+\s*\)\s*)+")  # (1 3 2)(4 5)
OPTIONS = re.compile(r"(?:\(?[A-J]\)?[\s,;&]*(?:and\b\s*)?){2,10}")


def compare(answer: str, gold: str, *, must_be_evaluated: bool = False, tolerance: Tolerance | None = None) -> bool:
    """Whether two answers mean the same. `must_be_evaluated`: a formula for the gold answer is wrong, as 3+4 for 7."""
    numbers = exact_number(answer), exact_number(gold)
    if numbers[0] is not None and numbers[1] is not None and (tolerance is None or numbers[0] == numbers[1]):
        return numbers[0] == numbers[1]
    start_work()
    set_tolerance(tolerance)
    return _compare(answer, gold, must_be_evaluated)


def _compare(answer: str, gold: str, must_be_evaluated: bool) -> bool:
    if (both := TWO_FORMS.fullmatch(answer)) and any(map(str.isdigit, both[2])):
        verdicts = [_compare(form, gold, must_be_evaluated) for form in both.groups()]
        return verdicts == [True, True]
    a, g = _clean(answer), _clean(gold)
    if not a or not g:
        return False
    if _without_spaces(a) == _without_spaces(g) or _clean(answer.replace("{,}", ",")) == g:
        return True
    if "." in g and exact_number(g) is not None:
        a = DECIMAL_COMMA.sub(r"\1.\2", a)
    if CYCLES.fullmatch(g) and re.search(r"\d\s\d", g):
        return CYCLES.fullmatch(a) is not None and _cycles(a) == _cycles(g)
    decided = _as_words(a, g, must_be_evaluated)
    if decided is not None:
        return decided
    for thousands in (True, False):
        try:
            gold_tree, answer_tree = in_one_notation(_tree(g, thousands), _tree(a, thousands))
            if same(gold_tree, answer_tree):
                return not must_be_evaluated or is_evaluated(answer_tree, gold_tree)
        except (UndefinedError, UnsupportedError, RecursionError):
            pass
        if not re.search(r"\d,\d{3}", a + " " + g):
            break
    return False


_clean = lru_cache(maxsize=4096)(clean)  # cached: a group of responses shares its gold answer, and often its answers


@lru_cache(maxsize=256)  # trees are large
def _tree(text: str, thousands: bool) -> Node:
    return parse(meaning_of(text), thousands=thousands)


def _without_spaces(text: str) -> str:
    """Remove white space, except between digits: 7 8 is not 78."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _letters(text: str) -> list[str] | None:
    """The letters of several options in order: A, C; AC; (A) and (C)."""
    letters = re.findall(r"[A-J]", unwrapped(text))
    return sorted(letters) if OPTIONS.fullmatch(unwrapped(text)) and len(set(letters)) == len(letters) else None


def _cycles(text: str) -> list[list[str]]:
    """The cycles of a permutation, each from its smallest element on, in any order if they have none in common."""
    cycles = [re.findall(r"\d+", cycle) for cycle in re.findall(r"\([^()]*\)", text)]
    turned = [cycle[(first := cycle.index(min(cycle, key=int))) :] + cycle[:first] for cycle in cycles]
    elements = [element for cycle in cycles for element in cycle]
    return sorted(turned) if len(set(elements)) == len(elements) else turned


def _as_words(answer: str, gold: str, must_be_evaluated: bool) -> bool | None:
    """Compare options and prose; None if the two must be compared as mathematics."""
    if (same_time := same_clock_time(answer, gold)) is not None:
        return same_time
    if (letters := _letters(gold)) and _letters(answer):
        return letters == _letters(answer)
    gold_option, answer_option = option_letter(gold), option_letter(answer)
    if gold_option and (gold_option[1] or gold[-1:].isupper() or gold.endswith((")", "}"))):
        if answer_option:
            is_variable = answer.islower() and len(answer) == 1 != len(gold)  # c is not option (C)
            return answer_option[0] == gold_option[0] and not is_variable
        return _compare(answer, gold_option[1], must_be_evaluated) if gold_option[1] else False
    gold_is_prose, answer_is_prose = is_prose(gold), is_prose(answer)
    if (gold_is_prose or answer_is_prose) and as_words(answer) == as_words(gold):
        return True
    if gold_is_prose and answer_is_prose:
        return same_items(answer, gold) or meaning_of(answer) == meaning_of(gold)
    if gold_is_prose and meaning_of(gold) == gold:
        return False
    if answer_is_prose and meaning_of(answer) == answer:
        return False
    return None


# --- trees ---


def same(gold: Node, answer: Node) -> bool:
    """Whether two trees mean the same. Raises UnsupportedError if one is not an expression."""
    gold, answer = _plus_minus_written_out(gold), _plus_minus_written_out(answer)
    if gold == answer or canonical(gold) == canonical(answer):
        return True
    for rule in RULES:
        verdict = rule(gold, answer)
        if verdict is not None:
            return verdict
    return same_quantity(gold, answer)


def _regions(gold: Node, answer: Node) -> bool | None:
    regions = [_is_region(node) for node in (gold, answer)]
    if not any(regions):
        return None
    try:
        return same_region(gold, answer)
    except UnsupportedError:
        if all(regions):
            raise
        return False


def _is_region(node: Node) -> bool:
    if node.kind == "list":
        return all(_is_region(arg) for arg in node.args)
    is_relation = node.kind == "relation" and any(op in COMPARISONS for op in node.name.split())
    return is_relation or node.kind in REGION_KINDS


def _equations(gold: Node, answer: Node) -> bool | None:
    """Compare two equations, or a value with `label = value`."""
    if gold.kind == answer.kind == "relation":
        return same_equation(gold, answer, same)
    for equation, other in ((gold, answer), (answer, gold)):
        if equation.kind == "relation":
            value = value_without_label(equation, same, of_gold=equation is gold)
            return value is not None and (same(value, other) if equation is gold else same(other, value))
    return None


def _collections(gold: Node, answer: Node) -> bool | None:
    """Compare sets and lists in any order; a list without brackets may equal a tuple in the same order."""
    kinds = (gold.kind, answer.kind)
    if "set" not in kinds and "list" not in kinds:
        return None
    if "group" in kinds or "matrix" in kinds:
        listed, other = (gold, answer) if gold.kind in ("set", "list") else (answer, gold)
        is_pair = listed.name == "," and other.kind == "group" and other.name == "()"
        if is_pair and (other is gold or _names_different_things(gold)):
            return _in_order(_values(gold), _values(answer))
        return False
    named = [_names_different_things(node) for node in (gold, answer)]
    if all(named):
        return _in_any_order(gold.args, answer.args, lambda g, a: all(same(g.args[i], a.args[i]) for i in (0, -1)))
    if any(named):
        return _in_order(_values(gold), _values(answer))
    lists = [_values(gold), _values(answer)]
    if "set" in kinds:
        lists = [list({canonical(value): value for value in values}.values()) for values in lists]
    return _in_any_order(lists[0], lists[1], same)


def _names_different_things(node: Node) -> bool:
    """True for m = 2, n = 3. False for x_1 = 2, x_2 = 3 and for x = 2, x = 3: roots of one equation, in any order."""
    equations = [item.args[0] for item in node.args if item.kind == "relation" and item.name == "="]
    names = [label.name.partition("_")[0] if label.kind == "sym" else label for label in filter(is_label, equations)]
    return node.kind in ("set", "list") and 1 < len(names) == len(set(names)) == len(node.args)


def _values(node: Node) -> list[Node]:
    items = node.args if node.kind in ("set", "list", "group") else (node,)
    return [(item.kind == "relation" and value_without_label(item, same, of_gold=False)) or item for item in items]


def _in_order(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    return len(gold) == len(answer) and all(same(g, a) for g, a in zip(gold, answer, strict=True))


def _in_any_order(gold: Sequence[Node], answer: Sequence[Node], alike: Callable[[Node, Node], bool]) -> bool:
    if len(gold) != len(answer):
        return False
    rest = [(item, estimate_of(item)) for item in answer]
    for item in gold:
        estimate = estimate_of(item)
        work(len(rest))
        match = next(
            (i for i, (other, e) in enumerate(rest) if _may_agree(estimate, e) and _holds(alike, item, other)), None
        )
        if match is None:
            return False
        del rest[match]
    return True


def _may_agree(a: complex | None, b: complex | None) -> bool:
    """Whether two estimates are close enough to need an exact comparison."""
    return is_tolerant() or a is None or b is None or abs(a - b) <= 1e-4 * max(abs(a), abs(b), 1e-9)


def _holds(alike: Callable[[Node, Node], bool], gold: Node, answer: Node) -> bool:
    try:
        return alike(gold, answer)
    except UndefinedError:
        return False


def _tuples(gold: Node, answer: Node) -> bool | None:
    """Compare tuples by element. (1, 2) and [1, 2] differ: they may be intervals. A row or column is a tuple."""
    if gold.kind == answer.kind == "matrix":
        rows = list(zip(gold.args, answer.args, strict=False))
        return len(gold.args) == len(answer.args) and all(_in_order(g.args, a.args) for g, a in rows)
    kinds = {gold.kind, answer.kind}
    if "group" not in kinds and "matrix" not in kinds:
        return None
    if kinds == {"group"}:
        brackets_matter = len(gold.args) == 2 and gold.name != answer.name
        return not brackets_matter and _in_order(gold.args, answer.args)
    if kinds == {"group", "matrix"}:
        matrix, group = (gold, answer) if gold.kind == "matrix" else (answer, gold)
        cells = [cell for row in matrix.args for cell in row.args]
        is_vector = len(matrix.args) == 1 or len(matrix.args[0].args) == 1
        return is_vector and _in_order(*((cells, group.args) if gold is matrix else (group.args, cells)))
    if "matrix" in kinds:
        raise UnsupportedError("matrix arithmetic")
    return False


def _ratios(gold: Node, answer: Node) -> bool | None:
    """Compare ratios: 3:4 equals 6:8 and three quarters; 12:30 is a time and equals no other time."""
    ratios = [node for node in (gold, answer) if node.kind == "ratio"]
    if not ratios:
        return None
    if len(ratios) == 1:
        other = answer if gold.kind == "ratio" else gold
        is_time = any(part.name.startswith("0") for part in ratios[0].args)
        if is_time or len(ratios[0].args) != 2 or other.kind in ("group", "text", "unit"):
            return False
        return equal(Node("div", ratios[0].args), other)
    if len(gold.args) != len(answer.args):
        return False
    if all(map(_is_time, ratios)):
        return _in_order(gold.args, answer.args)
    pairs = list(zip(gold.args, answer.args, strict=True))
    return all(equal(Node("mul", (g, pairs[0][1])), Node("mul", (a, pairs[0][0]))) for g, a in pairs[1:])


def _is_time(node: Node) -> bool:
    hours, *rest = node.args
    return (
        hours.kind == "num"
        and hours.value < 25
        and all(part.kind == "num" and len(part.name) == 2 and part.value < Fraction(60) for part in rest)
    )


def _texts(gold: Node, answer: Node) -> bool | None:
    if gold.kind == answer.kind == "text":
        return as_words(gold.name) == as_words(answer.name)
    return False if "text" in (gold.kind, answer.kind) else None


RULES: tuple[Callable[[Node, Node], bool | None], ...] = (_regions, _equations, _collections, _tuples, _ratios, _texts)


def _plus_minus_written_out(node: Node) -> Node:
    """Replace ±a by the two values a and -a; in a list or set, each item."""
    if all(part.kind != "pm" for part in parts(node)):
        return node
    kind, name, items = (node.kind, node.name, node.args) if node.kind in ("list", "set") else ("list", ",", (node,))
    signed = [_with_sign(item, upper=upper) for item in items for upper in (True, False)]
    return Node(kind, tuple(dict.fromkeys(signed)), name)


def _with_sign(node: Node, *, upper: bool) -> Node:
    args = tuple(_with_sign(arg, upper=upper) for arg in node.args)
    if node.kind == "pm":
        return args[0] if (node.name == "pm") == upper else Node("neg", args)
    return replace(node, args=args)
