r"""Brings two trees to one notation: `i+2j+3k` for (1, 2, 3), `\binom{1}{2}` for a column, 2n pi for 2k pi."""

from __future__ import annotations

from rlhf.answers.node import IMAGINARY, PI, Node, free_symbols, number, parts, with_symbols

UNIT_VECTORS = (IMAGINARY, Node("sym", name="j"), Node("sym", name="k"))
WHOLE, CONSTANTS, UNKNOWNS = frozenset("kmn"), frozenset("CcK"), frozenset({*"xyzt", "theta"})


def in_one_notation(gold: Node, answer: Node) -> tuple[Node, Node]:
    """Both trees: a vector becomes a tuple if the other is a tuple, row or column; the answer gets the gold letters."""
    sizes = _size(gold), _size(answer)
    if sizes[1] and not sizes[0]:
        gold = _as_tuple(gold, sizes[1]) or gold
    if sizes[0] and not sizes[1]:
        answer = _as_tuple(answer, sizes[0]) or answer
    return gold, _with_letters_of(gold, answer)


def _with_letters_of(gold: Node, answer: Node) -> Node:
    """The answer with the gold answer's letter for any whole number, k in 2k pi, or for a constant, C in x^2 + C."""
    names = free_symbols(gold), free_symbols(answer)
    for letters in (WHOLE, CONSTANTS):
        in_gold, in_answer = (sorted(letters & used) for used in names)
        if len(in_gold) == len(in_answer) == 1 and in_gold != in_answer:
            others = (names[0] | names[1]) - {in_gold[0], in_answer[0]}
            is_added = gold.kind == "add" and Node("sym", name=in_gold[0]) in gold.args
            if is_added if letters is CONSTANTS else PI in parts(gold) and others <= UNKNOWNS:  # in m pi r^2 m is given
                return with_symbols(answer, {in_answer[0]: Node("sym", name=in_gold[0])})
    return answer


def _size(node: Node) -> int:
    """How many entries a vector has; 0 if the node is not a vector."""
    if node.kind == "group" and node.name == "()":
        return len(node.args)
    if node.kind == "matrix" and (len(node.args) == 1 or len(node.args[0].args) == 1):
        return len(node.args) * len(node.args[0].args)
    return 0


def _as_tuple(node: Node, size: int) -> Node | None:
    if node.kind == "call" and node.name == "binomial" and size == 2:
        return Node("group", node.args, "()")
    if node.kind != "add" or not 2 <= size <= len(UNIT_VECTORS):
        return None
    entries: dict[Node, Node] = {}
    for term in node.args:
        entry, unit = _entry(term)
        if unit not in UNIT_VECTORS[:size] or unit in entries:
            return None
        entries[unit] = entry
    if set(entries) == {IMAGINARY}:
        return None
    return Node("group", tuple(entries.get(unit, number(0)) for unit in UNIT_VECTORS[:size]), "()")


def _entry(term: Node) -> tuple[Node, Node]:
    """(2, j) for 2j and (1, j) for j."""
    if term.kind == "neg":
        entry, unit = _entry(term.args[0])
        return Node("neg", (entry,)), unit
    if term.kind == "mul" and term.args[1] in UNIT_VECTORS:
        return term.args[0], term.args[1]
    return number(1), term
