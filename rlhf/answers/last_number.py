"""The last number of a sentence, with its unit, or the tuple, ratio, time, roots, inequality or surd around it."""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf.answers.clean import option_letter
from rlhf.answers.units import GLUED, unit_of
from rlhf.answers.words import FOREIGN_SCALES, MONTHS, changes_a_number, may_stand_after

NUMBER = re.compile(
    r"(?<![\w.^])(?:(?<![\d)\]}\w])[-+\u2212]\s?|(?<=\s)[-+\u2212])?[$€£¥]?(?:\d{1,4}\s(?=\d{1,3}/\d))?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))"
    rf"(?:/\d+)?(?:(?P<unit>(?:{GLUED})(?:/(?:{GLUED}))?(?:\^\d)?)(?!\w)|(?!\w))(?!\*\*|\^)(?:\s*(?:\\?%|percent\b|pct\b))?"
)
NO_ANSWER = re.compile(  # 17 or 18; more than 18
    r"(?:\d[^\n.;]{0,20}\bor|\bnot|\b(?:more|less|fewer|greater|larger|smaller) than|\bat (?:least|most))\s+\W{0,3}$",
    re.IGNORECASE,
)
FOREIGN_UNIT = re.compile(r"[^\x00-\u2fff]*([-+]?\d[\d,]*(?:\.\d+)?)\s*(?:[^\x00-\u03ff\W]|[€₽₹¥£])+[.。]?")
WORD = re.compile(r"\\?[A-Za-z]{2,}")
MEASURE = re.compile(  # words after a number that may be its unit, except a price or a time per something
    r"(?!\s?(?:dollar|cent|minute|hour|day|week|month|year)s?\sper\b)"
    rf"\s?((?:(?:square|sq|cubic|cu)\.?\s)?(?:{GLUED}|[A-Za-z]{{3,}})(?:\^\d|[²³])?"
    r"(?:\s?(?:/|per\s)\s?[A-Za-z]+(?:\^\d|[²³])?)?)(?!\w)"
)
EXPONENTS = str.maketrans({"²": "^2", "³": "^3"})
MIXED = (
    "(?:(?:year|month|week|day|hour|hr|minute|min|second|sec|pound|lb|ounce|dollar|cent)s?|oz|feet|foot|ft|inch(?:es)?)"
)
MIXED_AMOUNTS = re.compile(rf"\b\d+\s{MIXED},?\s(?:and\s)?\d+\s{MIXED}(?!\w)")
ENTRY = r"[-+\u2212]?[\d./√π∞]{1,20}"
AROUND = re.compile(  # tuple (but (1,000) is a number), ratio, time, roots, inequality, list, mixed units, line
    rf"(?<![\w\\])(?!\([-+\u2212]?\d{{1,3}}(?:,\d{{3}})+\))[(\[]\s*{ENTRY}(?:\s*,\s*{ENTRY}){{1,9}}\s*[)\]]"
    r"|(?<![\w:.])\d{1,4}(?::\d{1,4}){1,3}(?![\d:])(?:\s?[AaPp]\.?[Mm]\b)?"
    rf"|\b(?P<root>[A-Za-z]\w?\s?=)\s?{ENTRY}(?:(?:\s?,)?\s?(?:,|and|or)\s(?P=root)\s?{ENTRY}){{1,9}}(?![\w/])"
    rf"|(?:{ENTRY}\s?[<≤]=?\s?)?\b[a-z]\s?[<>≤≥≠]=?\s?{ENTRY}(?![\w/])"
    rf"|(?<=\bare ){ENTRY}(?:(?:,\s{ENTRY}){{0,9}},?\sand\s{ENTRY}|(?:,\s{ENTRY}){{1,9}})(?![\w/])"
    rf"|{ENTRY}%?\s\(or\s{ENTRY}%?\)"
    rf"|{MIXED_AMOUNTS.pattern}|\b\d\d?\s?[AaPp]\.?[Mm]\b"
    r"|\b(?:y|[A-Za-z]['′]{0,2}\(x\))\s?=\s?[-+\d./*^()²³ ]{0,30}x[-+\d./*^()x²³ ]{0,60}"
)
AROUND_CHARACTERS = 200
TERM = r"(?:\d[\d./]{0,20})?(?:√\(?\d{1,20}\)?|π)(?:/\d{1,20})?"
SURD = re.compile(  # 1 ± √2, 12π, π/4
    rf"(?<![\w√])(?:(?:\d[\d./]{{0,20}}|{TERM})\s?[-+−±]\s?|[-−±])?{TERM}(?:\s?[-+−±]\s?(?:{TERM}|\d[\d./]{{0,20}}))?(?!\w)"
)
POLYNOMIAL_TERM = r"(?:\d+[a-z]?|[a-z])(?:\^\d+|[²³⁴])?"
POLYNOMIAL = re.compile(  # a sum or a power with a variable, at the end: the derivative is 3x² + 2x.
    r"\b(?:is|equals|becomes|gives)\s(?=[^.\n]{0,60}[a-z])(?=\S[^.\n]{0,60}[-+−^²³⁴]|\d+[xyzn][\s.]*\Z)"
    rf"((?:[-−]\s?)?{POLYNOMIAL_TERM}(?:\s?[-+−]\s?{POLYNOMIAL_TERM}){{0,9}})[\s.]*\Z"
)
DATE = re.compile(  # at the end
    rf"\b((?=[A-Z])(?i:{MONTHS})\.?\s\d\d?(?:st|nd|rd|th)?(?:,\s\d{{4}})?|\d\d?\s(?=[A-Z])(?i:{MONTHS}))[\s.!]*\Z"
)


class Span(NamedTuple):
    """text[start:end] is a marked answer with this content."""

    start: int
    end: int
    content: str


def only_number(sentence: str) -> str | None:
    """The number in a sentence that begins with words, if it holds one number and no word that changes it."""
    if foreign := FOREIGN_UNIT.fullmatch(sentence):
        return None if FOREIGN_SCALES.search(sentence) else foreign[1]
    numbers = [match for match in NUMBER.finditer(sentence) if any(map(str.isdigit, match[0]))]
    if whole := DATE.search(sentence) or MIXED_AMOUNTS.search(sentence):
        numbers = [match for match in numbers if not whole.start() <= match.start() < whole.end()] + [whole]
    if len(WORD.findall(sentence)) < 2 or len(numbers) != 1 or not sentence[0].isalpha() or option_letter(sentence):
        return None
    before, after = sentence[: numbers[0].start()], sentence[numbers[0].end() :]
    is_counted = may_stand_after(after) and not any(map(changes_a_number, WORD.findall(before)))
    return with_unit(numbers[0]) if is_counted else None


def with_unit(number: re.Match[str]) -> str:
    if unit := number.groupdict().get("unit"):
        return number[0].replace(unit, f"\\text{{ {unit}}}")
    return number[0] + unit_at(number.string, number.end())


def unit_at(text: str, position: int) -> str:
    """The unit of measure at this position as LaTeX, or an empty string."""
    measure = MEASURE.match(text, position)
    unit = measure[1].translate(EXPONENTS) if measure else ""
    return f"\\text{{ {unit}}}" if unit_of(unit) is not None else ""


def last_number(text: str) -> Span | None:
    for pattern in (POLYNOMIAL, DATE):
        if match := pattern.search(text, max(0, len(text) - AROUND_CHARACTERS)):
            return Span(match.start(1), match.end(1), match[1])
    matches = [m for m in NUMBER.finditer(text) if any(c.isdigit() for c in m[0])]
    surds = list(SURD.finditer(text)) if "√" in text or "π" in text else []
    if surds and (not matches or surds[-1].end() >= matches[-1].end()):
        return Span(surds[-1].start(), surds[-1].end(), surds[-1][0])
    if not matches:
        return None
    start, end = matches[-1].span()
    for around in AROUND.finditer(text, max(0, start - AROUND_CHARACTERS), end + 20):
        if around.start() <= start and end <= around.end():
            return Span(around.start(), around.end(), around[0])
    if NO_ANSWER.search(text, max(0, start - 40), start):
        return None
    return Span(matches[-1].start(), matches[-1].end(), with_unit(matches[-1]))
