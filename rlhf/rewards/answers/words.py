"""Answers in words, such as days and names, and the few phrases that mean mathematics."""

from __future__ import annotations

import re

ARTICLES = frozenset(["a", "an", "the"])
MATHEMATICAL = frozenset("sin cos tan log ln exp sqrt frac pi infinity inf mod max min gcd lcm".split())  # noqa: SIM905
PROSE = re.compile(r"[A-Za-z][A-Za-z\s,.;:'!?&()-]*")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
MEANINGS = {
    r"(?:there (?:is|are) )?no (?:real |integer |valid )?solutions?(?: exists?)?|(?:the )?empty set": r"\emptyset",
    r"all real(?: numbers?| values?)?s?|any real number|all reals|every real number": r"\mathbb{R}",
    r"infinitely many(?: solutions?)?|infinite(?:ly)?|infinity": r"\infty",
}
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
VALUES = {
    **{word: value for value, word in enumerate([*ONES.split(), "seventeen", "eighteen", "nineteen"])},
    **{"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
}
SCALES = {"hundred": 100, "thousand": 1_000, "million": 1_000_000}


def unwrapped(text: str) -> str:
    """The text without \\text{...} around words."""
    return TEXT.sub(r" \1 ", text).strip()


def is_prose(text: str) -> bool:
    """Whether the text is words alone, at least one of them not mathematical."""
    plain = unwrapped(text)
    if not PROSE.fullmatch(plain):
        return False
    words = re.findall(r"[A-Za-z]{2,}", plain)
    if not words and "\\text" not in text:
        return False
    longest = max((len(word) for word in words), default=1)
    known = all(word.lower() in MATHEMATICAL or word.lower() in ("and", "or") for word in words)
    return not known and (longest >= 3 or "\\text" in text)


def as_words(text: str) -> tuple[str, ...]:
    """The words in lower case, without punctuation and articles."""
    words = re.findall(r"[a-z0-9']+", unwrapped(text).replace("-", " ").casefold())
    return tuple(word for word in words if word not in ARTICLES) or tuple(words)


def same_words(a: str, b: str) -> bool:
    """Whether two texts have the same words, or list the same items in any order."""
    if as_words(a) == as_words(b):
        return True
    items = [
        sorted(as_words(item) for item in re.split(r",|;|&|\band\b", unwrapped(text)) if item.strip())
        for text in (a, b)
    ]
    return len(items[0]) > 1 and items[0] == items[1]


def meaning_of(text: str) -> str:
    """The mathematics that a phrase means, or the text itself if it means none."""
    plain = " ".join(unwrapped(text).lower().split()).rstrip(".")
    for phrase, meaning in MEANINGS.items():
        if re.fullmatch(phrase, plain):
            return meaning
    number = _number_in_words(plain)
    return text if number is None else str(number)


def _number_in_words(text: str) -> int | None:
    words = [word for word in re.split(r"[\s-]+", text) if word != "and"]
    if not words or not all(word in VALUES or word in SCALES for word in words):
        return None
    total = current = 0
    for word in words:
        if word == "hundred":
            current = max(current, 1) * 100
        elif word in SCALES:
            total, current = total + max(current, 1) * SCALES[word], 0
        else:
            current += VALUES[word]
    return total + current
