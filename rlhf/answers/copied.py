"""Whether an answer is a span of the prompt in another form than the gold answer: (2x-1)^3 in "Expand (2x-1)^3"."""

from __future__ import annotations

import re
from functools import lru_cache

from rlhf.answers.clean import FRACTION_FONT, INVISIBLE, as_ascii, clean, option_letter
from rlhf.answers.extract import MATH_SPAN
from rlhf.answers.node import Node, UnsupportedError, canonical, parts
from rlhf.answers.tree import parse
from rlhf.answers.words import changes_a_number, is_prose, meaning_of, unwrapped

MAX_PROMPT = 20_000  # characters at the end that are searched
IGNORED = re.compile(r"[{}$]|\\[()\[\]]|(?<!\d)\s+|\s+(?!\d)|(?<=\d),(?=\d{3})")
NUMERAL = re.compile(r"\d[\d,]{0,20}(?:\.\d{1,20})?")
REPEATING = re.compile(r"\\(?:overline|bar|dot)(?![a-z])")  # decimals
COUNTED = re.compile(rf"({NUMERAL.pattern}) ([A-Za-z]+(?: [\w'-]+){{2,20}})")
SUBJECT = re.compile(r"(?:the|The) ([a-z]+) (?:is |are )?([a-z]+)")
WRAPPERS = ("unit", "worded", "percent", "degree")
CONTAINERS = ("list", "set", "group", "matrix", "row")


def is_copied(answer: str, gold: str, prompt: str) -> bool:
    """Whether an answer that equals the gold answer only repeats a span of the prompt in another form.

    Words and options have no other form.
    """
    wanted = clean(gold)
    if not prompt or is_prose(wanted) or option_letter(wanted):
        return False
    texts, trees = _spans(prompt[-MAX_PROMPT:])
    spelled = _spelled(answer.rpartition("=")[2])
    is_in_prompt = re.search(rf"(?<![\d.]){re.escape(spelled)}(?!\d|\.\d)" if spelled else r"(?!)", texts) is not None
    if is_in_prompt and (REPEATING.search(answer) is None) != (REPEATING.search(gold) is None):
        return True  # their trees are equal: both are the fraction
    answer_form = _form(answer)
    if not is_in_prompt and answer_form not in trees:
        return False
    gold_form = _form(gold)
    return answer_form != gold_form if answer_form and gold_form else _spelled(gold) != _spelled(answer)


def without_words_of_prompt(answer: str, prompt: str) -> str | None:
    """12 of "12 bottles can be filled" and "diverges" of "The series diverges", if the prompt has the other words."""
    words, asked = (" ".join(unwrapped(text).split()).rstrip(".!?") for text in (answer, prompt[-MAX_PROMPT:]))
    if statement := SUBJECT.fullmatch(words):
        subject, predicate = statement.groups()
        return predicate if _stands_in(subject, asked) and not changes_a_number(subject) else None
    counted = COUNTED.fullmatch(words)
    if counted is None or not _stands_in(counted[2], asked) or _stands_in(counted[1], asked):
        return None
    return None if any(map(changes_a_number, re.findall(r"[a-z]+", counted[2].lower()))) else counted[1]


def _stands_in(words: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(words)}(?![\w]|\.\d)", text, re.IGNORECASE) is not None


def _spelled(text: str) -> str:
    """The text without white space, braces and other marks that change nothing."""
    return IGNORED.sub("", FRACTION_FONT.sub(r"\\frac", INVISIBLE.sub(" ", as_ascii(text))).strip())


def _form(text: str) -> Node | None:
    """The tree without labels, units and order; None if the text is no mathematics."""
    try:
        return canonical(_without_wrappers(parse(meaning_of(clean(text)))))
    except (UnsupportedError, RecursionError):
        return None


def _without_wrappers(node: Node) -> Node:
    if node.kind == "relation" and set(node.name.split()) <= {"=", "~"}:
        return _without_wrappers(node.args[-1])
    if node.kind in WRAPPERS:
        return _without_wrappers(node.args[0])
    if node.kind in CONTAINERS:
        return Node("list", tuple(map(_without_wrappers, node.args)))
    return node


@lru_cache(maxsize=256)  # a group of responses shares its prompt
def _spans(prompt: str) -> tuple[str, frozenset[Node]]:
    """The prompt in one spelling; its numbers and every part of its formulas as trees."""
    formulas = [next(filter(None, match.groups())) for match in MATH_SPAN.finditer(prompt)]
    forms = map(_form, [*formulas, *NUMERAL.findall(prompt)])
    return _spelled(prompt), frozenset(part for form in forms if form for part in parts(form))
