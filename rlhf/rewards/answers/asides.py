"""Remarks that repeat or explain a number: five (5); 3, since x > 0; 366 downloads over three months."""

from __future__ import annotations

import re

from rlhf.rewards.answers.words import IN_WORDS, number_in_words, unwrapped

SAID_TWICE = re.compile(
    rf"\b(?:({IN_WORDS})\s*\(\s*(\d[\d,]{{0,20}})\s*\)|(\d[\d,]{{0,20}})\s*\(\s*({IN_WORDS})\s*\))", re.IGNORECASE
)
REASON = re.compile(
    r"(?<![A-Za-z])(?:since|because)(?![A-Za-z])|[,(]\s*(?:\\text\s*\{\s*)?"
    r"(?:as|(?:reject|discard|ignor)(?:e|ed|ing)?)(?![A-Za-z])"
)
MULTIPLICITY = re.compile(  # x = 2 (double root)
    r"(?:\\text\s*\{)?\s*\(\s*(?:\\text\s*\{)?(?:a )?(?:double|triple|repeated) (?:root|solution)\s*\}?\s*\)\s*\}?\s*$"
)
BEFORE_REASON = re.compile(r"[\s,;(]*(?:\\text\s*\{[\s,;(]*)?$")
HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|also|but|either|both|otherwise|unless|another|alternatively|could|might|may)\b",
    re.IGNORECASE,
)
OPTION = re.compile(r"\W*(?:text\w*\W+)?[A-J](?![A-Za-z])")
NUMBER = rf"(?:\d+|{IN_WORDS})[ -]"
OVER = re.compile(  # how long, or for how many; after a noun: 5 over 3 is a fraction
    r"(?<=[a-z]{3})\s+(?:over|in|for|during|within|across|throughout)\s+"
    rf"(?:(?:(?:all|of|the|an?|his|her|its|their|these)\s+)+(?:{NUMBER})?|{NUMBER})"
    r"[a-z]{3,}(?: [a-z]{3,}){0,3}(?=[\s.}]*$)"
)


def without_asides(text: str) -> str:
    """The answer without such remarks; a repetition of another number stays, and so does a reason that hedges."""
    if "(" in text:
        once = SAID_TWICE.sub(_once, " ".join(unwrapped(text).split()))
        text = once if once != " ".join(unwrapped(text).split()) else text
    if (reason := REASON.search(text)) and not HEDGE.search(text, reason.end()):
        answer = BEFORE_REASON.sub("", text[: reason.start()])
        if any(map(str.isdigit, answer)) and not OPTION.match(answer):
            text = answer + "}" * (answer.count("{") - answer.count("}"))
    text = MULTIPLICITY.sub("", text)
    if (over := OVER.search(text)) and any(map(str.isdigit, text[: over.start()])):
        text = text[: over.start()] + text[over.end() :]
    return text


def _once(said: re.Match[str]) -> str:
    digits, words = said[2] or said[3], said[1] or said[4]
    return digits if number_in_words(words.lower()) == int(digits.replace(",", "")) else said[0]
