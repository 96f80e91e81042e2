"""Answers in words, such as days and names, and the few phrases that mean mathematics."""

from __future__ import annotations

import re
from fractions import Fraction

from rlhf.answers.units import unit_of

ARTICLE = re.compile(r"\b(?:an?|the)\s")
MATHEMATICAL = frozenset("sin cos tan log ln exp abs sqrt frac pi infinity inf mod max min gcd lcm and or".split())  # noqa: SIM905
PROSE = re.compile(r"[A-Za-z][A-Za-z\s,.;:'!?&()-]*")
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
MEANINGS = {
    r"(?:there (?:is|are) )?no (?:real |integer |valid )?solutions?(?: exists?)?|(?:the )?empty set": r"\emptyset",
    r"all real(?: numbers?| values?)?s?|any real number|all reals|every real number": r"\mathbb{R}",
    r"none": r"\emptyset",
    r"infinitely many(?: solutions?)?|infinite(?:ly)?|infinity": r"\infty",
}
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
VALUES = {
    **{word: value for value, word in enumerate([*ONES.split(), "seventeen", "eighteen", "nineteen"])},
    **{"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90},
}
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
          "lakh": 10**5, "crore": 10**7}  # fmt: skip
PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7,
         "eighth": 8, "ninth": 9, "tenth": 10, "twelfth": 12, "hundredth": 100}  # fmt: skip
NUMBER_WORD = re.compile(  # a number or a part in any form: ten, tens, sixes, twenties, hundredths; not zeros
    rf"(?!zeroe?s)(?:{'|'.join(word.removesuffix('y') for word in [*VALUES, *SCALES, *PARTS])})"
    "(?:y|e?s|ies|(?:ie)?ths?)?"
)

WORD_OF_A_NUMBER = rf"(?:{'|'.join([*VALUES, *SCALES])})"
IN_WORDS = rf"{WORD_OF_A_NUMBER}(?:(?: |-| and ){WORD_OF_A_NUMBER}){{0,12}}"

# Words that change the value of the number next to them, or leave it open: they are never dropped.
CHANGING_WRITTEN = (
    "or nor not no never none neither either nobody nothing except without unless if maybe perhaps possibly probably "
    "almost nearly least most more less fewer than greater over under above below up between beyond exceeds exceeding "
    "half halves halved third thirds quarter quarters fourth fourths fifth fifths tenth tenths double doubled "
    "triple tripled twice thrice squared cubed factorial root plus minus negative negated times power raised choose "
    "divided multiplied increased decreased complement reciprocal inverse inverted opposite log sin cos tan wrong "
    "incorrect false impossible undefined unknown point mil mille tausend millones millionen milliards "
    "milliarden docenas dutzend"
)
CHANGING = frozenset(CHANGING_WRITTEN.split())
# Words that announce another answer, and constants: they are never dropped either.
ANNOUNCING_WRITTEN = (
    "versus vs alternatively alternative but also another otherwise else rather instead likely "
    "pi tau phi euler infinity radical radicals"
)
ANNOUNCING = frozenset(ANNOUNCING_WRITTEN.split())
# Right after a number some of these words only count: 3 times, 3 times a week, 12 quarters, 5 more apples.
COUNTING = re.compile(
    r"\W*(?:times(?=\W*$| (?:as [a-z]+$|an?|per|each|every|in)\b)|quarters(?! of\b)|(?:more|fewer|less)(?!.*\bthan\b))",
    re.IGNORECASE,
)
# 5 and 6; 5 apples and a pear. Not "5 apples and pears", nor "5 miles to school".
JOINING = re.compile(
    r"^\W*(?:and|to|by|is|are|was|st|nd|rd|th)\b"
    r"|\band\W*(?:$|\b(?:an?|the|some|several|many|few|any|each|every|all|both|others?|counting|change|so|then|yet)\b)",
    re.IGNORECASE,
)
FOREIGN_SCALES = re.compile(
    "[十百千万萬亿億兆半余餘多倍不至非或少超]|以上|以下|以内|左右|тысяч|миллион|миллиард|дюжин|половин"
)
# First words of a phrase before a number that is no sentence: about 5, a total of 5
LEADING = frozenset("a an about approximately exactly for he her his in is it she so the there they we".split())  # noqa: SIM905
BOUND = re.compile(  # the square of 5, step 5
    r"\b(?:(?<!total )of|by|from|after|before|until|past|step|problem|question|exercise|page"
    r"|(?<!will )(?<!would )(?<!must )(?<!should )be)$"
)
MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?"
)
ONE_OF = re.compile(r"(?:one|1)\s(?:\w+\s)?of\b", re.IGNORECASE)
PAIRS = re.compile(r"\W*(?:pairs?|couples?|gross)\b", re.IGNORECASE)  # 7 pairs may be 14; 7 ordered pairs are 7
LONE_LETTER = re.compile(r"(?<![\w'.-])(?![aA]\b)[A-Za-z](?![\w'.-])")
EXPONENT = re.compile(r"\^\s?\{?-?\d\}?")
MODULUS = re.compile(r"\(?\s?mod(?:ulo)?\.?\s?\d+\s?\)?", re.IGNORECASE)
DATE = re.compile(rf"(?:\d{{1,4}}[\s,./-]*)?\b(?:{MONTHS})\b(?:[\s,.]*\d{{1,4}}){{0,2}}", re.IGNORECASE)
CLOCK = re.compile(r"(\d{1,2})(?:\s?:\s?(\d\d))?\s*(?:([ap])\.?\s?m\.?|o'clock)?", re.IGNORECASE)
NOON = re.compile(r"^(?:12(?::00)?\s*)?(?:(noon)|midnight)$", re.IGNORECASE)
AMOUNT = (
    r"(?:\\?\$)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+|\s?\\frac\s*\{\d+\}\s*\{\d+\}|\s\d+/\d+)?"
    r"(?:\s?(?:\\times|\\cdot)\s?10\s?\^\s?(?:\{-?\d+\}|\d))?|\\frac\s*\{\d+\}\s*\{\d+\}"
)
QUANTITY = re.compile(
    rf"(?P<before>[A-Za-z][A-Za-z\s,.':=()-]*?)?\s*(?P<sign>[-+]?)\s?(?P<amount>{AMOUNT})"
    r"(?P<measure>\s*\\(?:pct|degree))?(?P<after>\s*(?:[^\W\d_]|[(/])(?:[^\W_]|[\s,.'()/^{}-])*)?"
)
TWO_AMOUNTS = re.compile(
    r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*(?:,\s*)?(?:and\s+)?(\d+(?:\.\d+)?)\s*([A-Za-z]+)", re.IGNORECASE
)
NUMBER_WORDS = re.compile(  # a number in words, followed by another word: eighteen dollars
    rf"\b(?:(?:half )?a (?=hundred|thousand|million|dozen))?{IN_WORDS}\b(?=[ ][\w\\])", re.IGNORECASE
)

ALTERNATIVES = re.compile(rf"-?(?:{AMOUNT})(?:,? or -?(?:{AMOUNT}))+")  # the roots of an equation
LABELLED_VALUE = re.compile(r"([A-Za-z](?:_\w)?\s*(?:=|\\approx)\s*)(?=[-.\d])([^=,;]*)")


def changes_a_number(word: str) -> bool:
    """Whether a word next to a number must not be dropped: half of 5, 5 or more, 5 squared."""
    return word.lower() in CHANGING


def announces_another(words: str) -> bool:
    """Whether words next to a number hold another number, a constant, or a word that announces another answer."""
    return any(word in ANNOUNCING or NUMBER_WORD.fullmatch(word) for word in re.findall(r"[a-z]+", words.lower()))


def may_stand_after(words: str) -> bool:
    """Whether words after a number only say what it counts: "apples", "square units"; not "and also 8"."""
    if unit_of(words) is not None or MODULUS.fullmatch(words.strip()):
        return True
    first, _, rest = words.strip().partition(" ")
    counted = rest if first.lower() in SCALES else COUNTING.sub("", EXPONENT.sub("", words), count=1)
    plain_words = re.findall(r"[a-z]+", counted.lower())
    return not (
        re.search(r"\d", counted)
        or LONE_LETTER.search(counted)
        or PAIRS.match(counted)
        or JOINING.search(counted)
        or FOREIGN_SCALES.search(counted)
        or announces_another(counted)
        or any(map(changes_a_number, plain_words))
    )


def may_stand_before(words: str) -> bool:
    """Whether words before a number only introduce it: "the area is", "Tom has"; not "half of", nor "at least"."""
    plain_words = re.findall(r"[^\W\d_]+", words.lower())
    if not (words[:1].isupper() or plain_words[0] in LEADING) or "(" in words:
        return False
    is_changed = any(map(changes_a_number, plain_words)) or announces_another(words)
    return not (is_changed or BOUND.search(words.lower().rstrip()))


def with_words_marked(text: str) -> str:
    r"""A number between words in one spelling: `\text{5 apples}` is `5\text{ apples}`, `minus 5` is `-5`.

    If the words give the number another meaning, the whole text becomes prose: `\text{half of 5}`.
    """
    plain = " ".join(unwrapped(text).split()).rstrip(".!")
    if NUMBER_WORDS.search(plain) and not any(map(str.isdigit, plain)):
        digits = NUMBER_WORDS.sub(_in_digits, plain)
        marked = with_words_marked(digits) if digits != plain else text
        if re.match(r"-?\d|\\frac", marked) and re.search(r"(?:\}|\\pct|\\degree)$", marked):
            return marked
    if ONE_OF.match(plain):
        return f"\\text{{{plain}}}"
    if DATE.fullmatch(plain) and any(map(str.isdigit, plain)):
        words = sorted(re.findall(r"[a-z]{3}|\d+", plain.lower()), key=str.isdigit)
        return f"\\text{{{' '.join(words)}}}"
    if (two := TWO_AMOUNTS.fullmatch(plain)) and (added := _sum_of_amounts(two)):
        return added
    if ALTERNATIVES.fullmatch(plain):
        return text
    if labelled := LABELLED_VALUE.fullmatch(text):
        return labelled[1] + with_words_marked(labelled[2])
    quantity = QUANTITY.fullmatch(plain)
    if quantity is None or not (quantity["before"] or quantity["after"]):
        return plain if quantity else text
    before, after = (quantity["before"] or "").strip(), (quantity["after"] or "").strip()
    sign = quantity["sign"]
    if before.lower() in ("minus", "negative"):
        before, sign = "", "-"
    is_unit = unit_of(after) is not None
    if after and not is_unit and "\\text" not in text and not re.search(r"[A-Za-z]{3}|[^\x00-\x7f]", after):
        return text  # 2x, 5 ab
    if before and ("=" in before or not re.search(r"[A-Za-z]{2}", before)):
        return text  # x = 5
    may_be_product = (len(after) == 1 or after == "nm") and "\\text" not in text  # 5m
    if is_unit and may_be_product and not (quantity["after"] or "").startswith(" "):
        return text
    words = re.findall(r"[A-Za-z]+", COUNTING.sub("", after, count=1))
    if (before and not may_stand_before(before)) or (not is_unit and any(map(changes_a_number, words))):
        return f"\\text{{{plain}}}"
    if not is_unit and re.search(r"\d", after):
        return text
    if after and not may_stand_after(after):
        return f"\\text{{{plain}}}"
    return f"{sign}{quantity['amount']}{quantity['measure'] or ''}" + (f"\\text{{ {after}}}" if after else "")


def _in_digits(words: re.Match[str]) -> str:
    whole = number_in_words(words[0].lower())
    return words[0] if whole is None else str(whole)


def _sum_of_amounts(two: re.Match[str]) -> str | None:
    """The sum of two amounts of one dimension in the first unit: 2 hours 30 minutes is 5/2 hours."""
    large, small = unit_of(two[2]), unit_of(two[4])
    if large is None or small is None or large[0] != small[0]:
        return None
    value = Fraction(two[1]) + Fraction(two[3]) * small[1] / large[1]
    return f"{as_latex(value)}\\text{{ {two[2]}}}"


def same_clock_time(a: str, b: str) -> bool | None:
    """Whether two texts are the same time of day; None if they are not both times, or neither says a.m. or p.m."""
    texts = (" ".join(unwrapped(text).split()) for text in (a, b))
    first, second = (CLOCK.fullmatch(NOON.sub(lambda noon: "12 pm" if noon[1] else "12 am", text)) for text in texts)
    if first is None or second is None or not (first[3] or second[3]):
        return None
    if not first[3]:
        first, second = second, first
    if second[3] and second[3].lower() != first[3].lower():
        return False
    hour = int(first[1])
    hours = (hour,) if second[3] else (hour, hour % 12 + 12 * (first[3] in "pP"))
    return (first[2] or "00") == (second[2] or "00") and int(second[1]) in hours


def unwrapped(text: str) -> str:
    """The text without \\text{...} around words."""
    return TEXT.sub(r" \1 ", text).strip()


def is_prose(text: str) -> bool:
    """Whether the text consists of words, at least one of which is not mathematical."""
    plain = unwrapped(text)
    words = re.findall(r"[a-z]{2,}", plain.lower())
    is_long = "\\text" in text or any(len(word) >= 3 for word in words)
    return is_long and PROSE.fullmatch(plain) is not None and not MATHEMATICAL.issuperset(words)


def as_words(text: str) -> tuple[str, ...]:
    """The words in lower case, without punctuation and articles."""
    plain = unwrapped(text).casefold()
    return tuple(re.findall(r"(?<![\w)}])-\d+|[a-z0-9']+", ARTICLE.sub(" ", plain)))  # "A. no" has no article


def same_items(a: str, b: str) -> bool:
    """Whether two texts list the same items in any order."""
    items = [
        sorted(as_words(item) for item in re.split(r",|;|&|\band\b", unwrapped(text)) if item.strip())
        for text in (a, b)
    ]
    return len(items[0]) > 1 and items[0] == items[1]


def meaning_of(text: str) -> str:
    """The mathematics that a phrase means, or the text itself if the phrase has no such meaning."""
    plain = " ".join(unwrapped(text).lower().split()).rstrip(".")
    for phrase, meaning in MEANINGS.items():
        if re.fullmatch(phrase, plain):
            return meaning
    number = number_in_words(plain)
    return text if number is None else as_latex(number)


def as_latex(number: Fraction) -> str:
    is_whole = number.denominator == 1
    return str(number) if is_whole else f"\\frac{{{number.numerator}}}{{{number.denominator}}}"


def number_in_words(text: str) -> Fraction | None:
    """The number that words name: one hundred and twenty, minus five, three quarters, two and a half."""
    sign, words = 1, text.replace("-", " ").removeprefix("a ").split()
    if words[:1] in (["minus"], ["negative"]):
        sign, words = -1, words[1:]
    if words[:2] == ["half", "a"] and words[2:3] and words[2] in SCALES:
        return sign * Fraction(SCALES[words[2]], 2) if len(words) == 3 else None
    divisor = PARTS.get(words[-1].removesuffix("s")) if words else None
    if divisor is None:
        whole = _whole_in_words(words)
        return None if whole is None else Fraction(sign * whole)
    front, _, counted = " ".join(words[:-1]).rpartition("and ")
    count = 1 if counted in ("", "a") else _whole_in_words(counted.split())
    before = _whole_in_words(front.split()) if front else 0
    return None if count is None or before is None else sign * (before + Fraction(count, divisor))


def _whole_in_words(words: list[str]) -> int | None:
    """The whole number that words name; None for "five six" and "five and six", which are two numbers."""
    total = current = 0
    for before, word in zip(["", *words], words, strict=False):
        if word == "hundred":
            current = max(current, 1) * 100
        elif word in SCALES:
            total, current = total + max(current, 1) * SCALES[word], 0
        elif word in VALUES and (
            not before or current % 100 == 0 or (current % 10 == 0 < VALUES[word] < 10 < current % 100)
        ):
            current += VALUES[word]
        elif word != "and" or before not in SCALES:
            return None
    return total + current if words and words[-1] != "and" else None
