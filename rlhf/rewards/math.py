"""Grade a math answer: extract it and compare it with the gold answer."""

from __future__ import annotations

import re
from functools import lru_cache

from rlhf.answers.clean import clean, option_letter
from rlhf.answers.compare import CYCLES, compare
from rlhf.answers.copied import is_copied, without_words_of_prompt
from rlhf.answers.extract import NOT_AN_ANSWER, extract, gold_answer
from rlhf.answers.node import UnsupportedError
from rlhf.answers.quantity import Tolerance
from rlhf.answers.tree import parse
from rlhf.answers.words import is_prose, meaning_of, same_clock_time, unwrapped
from rlhf.config.reward import MathOptions
from rlhf.rewards.grade import BAD_GOLD, NO_ANSWER, Grade

DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d)")
GROUPS_OF_DOTS = re.compile(r"(?<=\d)\.(?=\d{3}(?!\d))")
ORDERED = re.compile(  # the prompt asks for an order
    r"(?:^|[.:;,!?]\s*|\b(?:and|then|please)\s+)(?:arrange|rank|sort|order)\b"
    r"|\bfrom (?:the )?\w+(?:est|least|most) to\b"
    r"|\b(?:(?:a|de)scending|(?:in|de)creasing|numerical|alphabetical|chronological) order\b"
    r"|\b\w+(?:est|least|most) (?:\w+ )?first\b|从[小大高低]到|[升降]序",
    re.IGNORECASE,
)
SEPARATORS = [re.compile(rf"{comma}(?![^(\[{{]*[)\]}}])|;|\band\b") for comma in (r",(?!\d{3}(?!\d))", ",")]
MAX_ANSWER_CHARACTERS = 10_000  # a longer answer is compared as a string only


def math_reward(response: str, gold: str, options: MathOptions, prompt: str = "") -> Grade:
    """1 if the answer that the response states says the same as the gold answer, else 0.

    Args:
        gold: the answer, or a solution that ends in `#### answer` or `\\boxed{answer}`.
        prompt: the question; an answer that is to be worked out may not be copied from it.
    """
    wanted = _wanted(gold)
    if not wanted:
        return Grade(None, BAD_GOLD, detail=f"gold answer {gold[:80]!r} is empty, or its box is not closed")
    stated = extract(response, options.steps, prompt)
    if stated is None:
        return Grade(0.0, NO_ANSWER)
    if options.decimal_comma:
        stated = DECIMAL_COMMA.sub(".", GROUPS_OF_DOTS.sub("", stated))
    grade = grade_answer(stated, wanted, options)
    if not grade.value and (answer := without_words_of_prompt(stated, prompt)):
        grade = grade_answer(answer, wanted, options)._replace(extracted=stated)
    if grade.value and options.must_be_evaluated and is_copied(stated, wanted, prompt):
        return grade._replace(value=0.0)
    if grade.value and ORDERED.search(prompt) and not _in_same_order(stated, wanted, options):
        return grade._replace(value=0.0)
    return grade


def _in_same_order(stated: str, wanted: str, options: MathOptions) -> bool:
    """True if the items of two lists agree one by one, or if the texts are no lists."""
    texts = [re.sub(r"\\[{}]", " ", unwrapped(text)) for text in (stated, wanted)]
    for separator in SEPARATORS:
        given, known = (separator.split(text) for text in texts)
        if len(given) == len(known) > 1:
            return all(compare(*pair, tolerance=_tolerance(options)) for pair in zip(given, known, strict=True))
    return True


def _tolerance(options: MathOptions) -> Tolerance | None:
    near = options.tolerance
    return None if near is None else Tolerance(near.relative, near.absolute)


@lru_cache(maxsize=4096)
def _wanted(gold: str) -> str:
    """The extracted gold answer, perhaps empty. Cached, because a group of responses shares it."""
    wanted = gold_answer(gold) or ""
    return wanted if clean(wanted) else ""


def grade_answer(stated: str, wanted: str, options: MathOptions) -> Grade:
    """Compare an extracted answer with the gold answer."""
    if max(len(stated), len(wanted)) > MAX_ANSWER_CHARACTERS:
        return Grade(float(stated.split() == wanted.split()), extracted=stated)
    verdict = compare(stated, wanted, must_be_evaluated=options.must_be_evaluated, tolerance=_tolerance(options))
    if not verdict and (problem := _problem(clean(wanted))):
        return Grade(None, BAD_GOLD, stated, problem)
    return Grade(float(verdict), extracted=stated)


def says_the_same(answer: str, other: str, options: MathOptions) -> bool:
    """True if either answer is right with the other as gold answer, worked out or not."""
    if max(len(answer), len(other)) > MAX_ANSWER_CHARACTERS:
        return answer.split() == other.split()
    near = _tolerance(options)
    return compare(answer, other, tolerance=near) or compare(other, answer, tolerance=near)


def check_gold(gold: str) -> Grade:
    """A grade of 1 if the gold answer can be graded, else bad_gold with the reason.

    Equality with itself as a string is not enough: `\\frac{1}{` has it, but no right answer would ever match it.
    """
    wanted = gold_answer(gold) or ""
    cleaned = clean(wanted)
    if not cleaned or cleaned.lower() in NOT_AN_ANSWER:
        return Grade(None, BAD_GOLD, detail="it is empty, no answer, or a box that is not closed")
    if len(cleaned) > MAX_ANSWER_CHARACTERS:
        return Grade(None, BAD_GOLD, detail=f"it is longer than {MAX_ANSWER_CHARACTERS} characters")
    problem = _problem(cleaned)
    return Grade(None, BAD_GOLD, detail=problem) if problem else Grade(1.0, extracted=wanted)


def _problem(gold: str) -> str:
    """The problem if a cleaned gold answer would match only its own spelling; empty if it matches others too."""
    if is_prose(gold) or option_letter(gold) or CYCLES.fullmatch(gold) or re.fullmatch(r"[-+\d.]+", gold):
        return ""
    if same_clock_time(gold, gold):
        return ""
    try:
        parse(meaning_of(gold))
    except (UnsupportedError, RecursionError):
        return "it is neither mathematics that can be read, nor words, nor an option"
    return ""
