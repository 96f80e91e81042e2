"""Normalizes the spelling of an answer: Unicode, LaTeX spacing and fonts, separators, repeating decimals.

The result is a string of LaTeX-like mathematics. Nothing is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from rlhf.rewards.answers.chinese import in_digits
from rlhf.rewards.answers.words import MONTHS, as_latex, unwrapped, with_words_marked

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙₖ", "0123456789nk", strict=True))
SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2010": "-", "\u2011": "-", "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u2217": "*", "\u00f7": "/", "\u2215": "/", "\u2044": "/", "\u2236": ":", "\u221a": r"\sqrt ",
    "\u221e": r"\infty ", "\u2264": r"\le ", "\u2a7d": r"\le ", "\u2265": r"\ge ", "\u2a7e": r"\ge ", "\u2260": r"\ne ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u2205": r"\emptyset ", "\u00b0": r"^\circ ",
    "\u00b1": r"\pm ", "\u2213": r"\mp ", "\u2032": "'", "\u2019": "'", "\u2248": r"\approx ", "\u211d": r"\mathbb{R}",
    "\u00a2": r"\text{ cents}",
    "\u2026": r"\ldots ", "\u20ac": r"\$", "\u00a3": r"\$", "\u00a5": r"\$", "\u20b9": r"\$",
    "\uff0c": ",", "\u3001": ",", "\u2713": "", "\u2714": "", "\u2705": "",
    "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u2220": r"\angle ", "\u2192": r"\to ",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega", "Σ": "Sigma",
}  # fmt: skip

OUTER = [("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**")]
INVISIBLE = re.compile(
    r"(?<!\\)\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\.?"
    r"|(?<!\\)\\(?:[,;:!> ]|(?:(?:display|text)style|tiny|small|normalsize|[lL]arge|LARGE|huge)"
    r"(?![a-zA-Z])|(?:limits|nolimits|rm|bf|it|tt)(?![a-zA-Z]))"
    r"|\\(?:q?quad|enspace|thinspace|hfill|nobreakspace|newline|nonumber)(?![a-zA-Z])|\\(?:[hv]space\*?|[hv]?phantom)\{[^{}]*\}"
    r"|\\(?:boxed|fbox|ensuremath|underline|mathstrut|checkmark|blacksquare)(?![a-zA-Z])|~"
)
FONT = re.compile(
    r"\\(?:mathbf|mathit|mathsf|mathcal|mathnormal|boldsymbol|bm|mathtt|vec|overrightarrow|hat)(?![a-zA-Z])\s*"
)
TEXT_FONT = re.compile(r"\\(?:textbf|textit|textrm|textnormal|textsf|texttt|mbox|hbox|emph|textup|textsc)(?=\s*\{)")
ROMAN = re.compile(r"\\(?:mathrm|operatorname|rm)\*?\s*\{([^{}]*)\}")
UNIT_LETTER = re.compile(r"(?<=[\d}])\s*\\(?:mathrm|rm)\s*\{\s*([A-Z])\s*\}(?=[\s.]*$)")  # 5 \mathrm{C}
DIGITS_OF_BASE = re.compile(r"^\(?(?:\\text\s*\{)?\s*([\dA-Z]+)\s*\}?\)?\s*(?=_)")  # \text{2E}_{16}
ROMAN_AS_MATH = re.compile(r"\s*(?:[A-Za-z]|[-\d.,\s]+)\s*")
TEXT_AS_MATH = re.compile(r"\\text\s*\{\s*((?:[A-Za-z]\s*=)?(?:[-+\d.,:/\s()=<>]|\\pct|\\degree)*)\}")
PERCENT = re.compile(
    r"\\?%|\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?<![\\a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])", re.I
)
DEGREE = re.compile(
    r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degree(?:s)?(?![a-zA-Z])|\\text\s*\{\s*deg(?:rees?)?\s*\}"
    r"|(?<![\\a-zA-Z])deg(?:rees?)?(?![a-zA-Z])"
)
ORDINAL = re.compile(
    r"(?<=\d)\s?(?:\^\s?)?(?:\\text\s*\{\s*(?:st|nd|rd|th)\s*\}|(?<!\s)(?:st|nd|rd|th)(?![a-zA-Z])"
    r"|\{\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}(?:\s*\})?)"
    rf"(?!\W*(?:text\W*)?(?!text|(?:and|or|of|(?i:{MONTHS}))\b)[A-Za-z]{{2}})"  # not of the 42nd prime
)
TEMPERATURE = re.compile(
    r"(?:\\text\s*\{\s*)?(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree|degrees?)\s*(?:\\text\s*\{\s*)?"
    r"(C(?:elsius)?|F(?:ahrenheit)?)(?![a-zA-Z])(?:\s*\})?",
    re.IGNORECASE,
)
NAME_OF_SEGMENT = re.compile(r"\\(?:overline|overleftrightarrow|widehat|overarc)\s*\{\s*([A-Z][A-Z']{0,3})\s*\}")
HAS_WORDS = re.compile(r"\d\s?[^\x00-\x7f]|\\text|(?<![\\a-zA-Z])[A-Za-z]{2}|[\d}] [a-zA-Z](?![a-zA-Z])")
BRACED_MARK = re.compile(r"(?<=\d)\s*(?:\\text\s*)?\{\s*([:.])\s*\}\s*(?=\d)")
CASES = re.compile(
    r"(?:\\left\s*\\(?:\{|lbrace)\s*)?\\begin\s*\{(d?cases|aligned|split|(?:align|equation|gather)\*?)\}(.*?)"
    r"\\end\s*\{\1\}",
    re.DOTALL,
)
CONDITION = re.compile(r"^\s*(?:\\text\s*\{\s*)?(?:,?\s*(?:if|for|when)\b)?\s*\}?|\s*,\s*$")
COLOR = re.compile(r"\\(?:text)?color(?:box)?\s*(?:\[\w*\])?\s*\{[\w!#]*\}")
FRACTION_FONT = re.compile(r"\\(?:dfrac|tfrac|cfrac|sfrac|nicefrac|flatfrac)(?![a-zA-Z])")
DOUBLED_BACKSLASH = re.compile(r"\\\\(?=[a-zA-Z(){}\[\]])")
THOUSANDS_BRACED = re.compile(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\\!|')\s*(?=\d{3}(?!\d))")
THOUSANDS_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\,|\\;|\\ |~|\s)\d{3})+(?![\d])")
THOUSANDS_DOTTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])")
DECIMAL_COMMA = re.compile(  # 3{,}5 and 1.234,56; a tuple such as (1.234,56) has brackets
    r"(?<=\d)\{,\}(?=(?:\d{1,2}|\d{4,})(?!\d))|(?<![\d.,(\[{])(\d{1,3}(?:[. ]\d{3})+),(\d{1,2})(?![\d,.])"
)
INDIAN = re.compile(r"(?<=\$)\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])|(?<![\d}])\d{1,2}(?:\{,\}\d{2})+\{,\}\d{3}(?!\d)")
MONEY_SCALE = re.compile(r"(\\?\$\s*\d[\d.,]*)\s*(?:\\text\s*\{\s*)?([kKMB])(?:\s*\})?(?![A-Za-z])")
SCALE_NAMES = {"k": "thousand", "K": "thousand", "M": "million", "B": "billion"}
REPEATING = re.compile(
    r"(?<![\d.])(\d{0,60})\.(\d{0,60})(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,60})\}|(\d))|\((\d{1,60})\))"
)
REPEATING_FROM_TO = re.compile(r"\\dot\s*\{?(\d)\}?(\d{0,58})\\dot\s*\{?(\d)\}?")
# The part before the last `=` that only names the value, in notation that the grammar does not know.
NAME_OF_VALUE = re.compile(
    r"^\s*(?:[A-DI-OR-Z]\s?\([\d,\s]+\)"
    r"|\\(?:Pr|deg|dim|min|max|gcd|lcm|lim|int|sum|prod|lVert|bar|overline|tilde|mathbb\s*\{[PE]\})(?![a-z])|\\\|"
    r"|\\frac\s*\{d[\w^]*\}\s*\{d\w\}|\\(?:(?:var)?phi|sigma|tau|text\s*\{\s*(?:gcd|lcm)\s*\})(?=\s*\())"
    r"(?:\([^()]*\)|\{[^{}]*\}|[^=<>{}])*=(?=[^=]+$)"
)
MODULUS = re.compile(r"\(\s*\\text\s*\{\s*mod\s*\}\s*(\d+)\s*\)")
APPROXIMATELY = re.compile(
    r"\\text\s*\{\s*(?:\(\s*)?(?:or )?(?:approximately|approx\.?|about)\s*(?:\}|([\d.]+\s*(?:\\?%)?)\s*\)\s*\})"
)
ROUNDED_IN_BRACKETS = re.compile(r"\(\s*(\\approx[^()]*)\)$")
RELATION = re.compile(r"[<>]|\\(?:[lg]eq?|neq?)(?![a-z])")
MICRO = {"m": "meter", "g": "gram", "s": "second"}
REWRITES: tuple[
    tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...
] = (  # rare notation -> the notation that the grammar knows
    (
        re.compile(r"(?<![\w}])(?:\{\s*\})?\s*[\^_]\s*(?:(\d)|\{(\d+)\})\s*C\s*_\s*(?:(\d)|\{(\d+)\})"),
        r"\\binom{\1\2}{\3\4}",
    ),
    (re.compile(r"(?<=\w)\s*\{\s*\}"), ""),
    (re.compile(r"^\s*([r-z])\s?\(\s*[nstx]\s*\)\s*(?==)"), r"\1"),  # y(x) = 2x
    (re.compile(r"\\cents?(?![a-z])"), r"\\text{ cents}"),
    (re.compile(r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\([lr])brace(?![a-z])"), lambda match: "\\{" if match[1] == "l" else "\\}"),
    (re.compile(r"\\text\s*\{\s*\(\s*(?:or )?(?:approximately|approx\.?|about)\s*\}([^()]*)\)"), r"\\approx \1"),
    (re.compile(r"(?<=[\dA-F])(?:_\{?\d+\}?)?\s*\\text\s*\{\s*\(?(?:in )?base (\w+)\)?\s*\}$"), r"_\\text{\1}"),
    (re.compile(r"\\big(cup|cap)(?![a-z])"), r"\\\1"),
    (re.compile(r"-\s*(?=\\\{)"), r"\\setminus "),  # all numbers but some: R - {0}
    (
        re.compile(r"(?:\\mu\s*\\text\s*\{|\\text\s*\{\s*\\mu)\s*([mgs])\s*\}"),
        lambda match: f"\\text{{ micro{MICRO[match[1]]}}}",
    ),
    (re.compile(r"(\\text\s*\{[^{}]*[A-Za-z])\s*\}\s*\^\s*(?:\{\s*(-?\d)\s*\}|(\d))"), r"\1^\2\3}"),
    (re.compile(r"(\\text\s*\{[^{}]*)\}\s*\\cdot\s*([a-z])\s*\^\s*\{?\s*(-?\d)\}?"), r"\1 \2^\3}"),  # kg m^-3
    (
        re.compile(r"(?<=[\d}])\s*\\text\s*\{\s*([\w^-]+)\s*(?:\}\s*\\cdot\s*\\text\s*\{|\\cdot)\s*([\w^-]+)\s*\}"),
        r"\\text{ \1 \2}",
    ),
)
# The name of a point, P of P(4, -1); not of a distribution or binomial: B(5, 2), C(5, 2), N(0, 1), U(0, 1)
POINT = re.compile(
    r"^(?:\\text\s*\{\s*(?:(?:the )?(?:point|center|vertex|focus))?\s*(?-i:[AD-MO-TV-Z])?\s*(?:is|at|:)?\s*\})?\s*"
    r"(?:(?-i:[AD-MO-TV-Z])'?)?\s*(?=\((?=[^()]*\d)[^()=|]*,[^()=|]*\)\W*$)",
    re.IGNORECASE,
)
WHOLE_PARAMETER = re.compile(  # the remark after pi/4 + k pi
    r"(?<=[\w)}])\s*[,(]?\s*(?:\\text\s*\{[,\s]*(?:for|where)[^{}]*\}\s*)?[kmn]\s*"
    r"(?:\\in\s*\\mathbb\s*\{?[ZN]\}?|\\text\s*\{\s*is an(?:y)? integer\s*\})\s*\)?$"
)
OUTWARD_BRACKETS = re.compile(r"^([\[\]])([^\[\]]+,[^\[\]]+)([\[\]])$")  # ]0, 1[ is (0, 1)
DOLLAR = re.compile(r"(?<!\\)\$")


def clean(text: str) -> str:
    """The normalized spelling of one extracted answer."""
    if not text.isascii():
        text = as_ascii(in_digits(text))
    text = _strip_outer(text.strip())
    text = CASES.sub(_cases, text)
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = DOUBLED_BACKSLASH.sub(r"\\", text)
    text = INDIAN.sub(lambda m: re.sub(r"\D", "", m[0]), text)
    text = DECIMAL_COMMA.sub(lambda m: re.sub(r"\D", "", m[1]) + "." + m[2] if m[1] else ".", text)
    text = MONEY_SCALE.sub(lambda m: f"{m[1]}\\text{{ {SCALE_NAMES[m[2]]}}}", text)
    text = THOUSANDS_SPACED.sub(lambda m: re.sub(r"\D", "", m[0]), THOUSANDS_BRACED.sub("", text))
    text = THOUSANDS_DOTTED.sub(lambda m: m[0].replace(".", ""), text)
    text = INVISIBLE.sub(" ", text)
    text = COLOR.sub(" ", text)
    text = FRACTION_FONT.sub(r"\\frac", TEXT_FONT.sub(r"\\text", FONT.sub("", text)))
    text = UNIT_LETTER.sub(r"\\text{ \1}", text)
    text = DIGITS_OF_BASE.sub(r"\1", ROMAN.sub(_roman, text))
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = BRACED_MARK.sub(r"\1", text)
    text = ORDINAL.sub("", text)
    text = TEMPERATURE.sub(_temperature, text)
    text = re.sub(r"\\([ij])math(?![a-z])", r"\1", text)
    text = NAME_OF_SEGMENT.sub(r" \1 ", text)
    text = MODULUS.sub(r"\\pmod{\1}", text)
    text = ROUNDED_IN_BRACKETS.sub(r"\1", APPROXIMATELY.sub(r"\\approx \1", text))
    if not RELATION.search(text):
        text = WHOLE_PARAMETER.sub("", text)
    text = DEGREE.sub(r" \\degree ", PERCENT.sub(r" \\pct ", text))
    text = TEXT_AS_MATH.sub(r" \1 ", text)
    text = REPEATING_FROM_TO.sub(r"\\overline{\1\2\3}", text)
    text = REPEATING.sub(_repeating, text)
    text = NAME_OF_VALUE.sub("", text)
    text = _strip_outer(re.sub(r"\s+", " ", text).strip())
    text = POINT.sub("", text)
    text = DOLLAR.sub(r"\\$", text)
    if HAS_WORDS.search(text):
        text = with_words_marked(text)
    text = OUTWARD_BRACKETS.sub(lambda m: "(["[m[1] == "["] + m[2] + ")]"[m[3] == "]"], text)
    return text if text.endswith("...") else _peeled(text.rstrip(" .,;:\\"))


def _peeled(text: str) -> str:
    """Remove brackets directly around brackets, ((((1)))) becomes (1), and braces around a letter."""
    text = re.sub(r"^\{\s*(\([A-Z]\)|[A-Za-z](?=\s*\}$))\s*\}", r"\1", text)
    if text[:2] not in ("((", "{{"):
        return text
    closing: dict[int, int] = {}
    stack: list[int] = []
    for position, char in enumerate(text):
        if char in "({":
            stack.append(position)
        elif char in ")}" and stack:
            closing[stack.pop()] = position
    start, end = 0, len(text) - 1
    while text[start] == text[start + 1] and closing.get(start) == end and closing.get(start + 1) == end - 1:
        start, end = start + 1, end - 1
    return text[start : end + 1]


def as_ascii(text: str) -> str:
    out: list[str] = []
    for char in text:
        if char in SUPERSCRIPTS:
            out.append(f"^{{{SUPERSCRIPTS[char]}}}")
        elif char in SUBSCRIPTS:
            out.append(f"_{{{SUBSCRIPTS[char]}}}")
        elif char in SIGNS:
            out.append(SIGNS[char])
        elif char in GREEK:
            out.append(f"\\{GREEK[char]} ")
        elif char.isascii():
            out.append(char)
        else:
            out.append(_one_character(char))
    return re.sub(r"\}\^\{|\}_\{", "", "".join(out))


def _one_character(char: str) -> str:
    category = unicodedata.category(char)
    if category in ("Cf", "Cs"):  # zero-width characters, halves of a character
        return ""
    if category == "Nd":
        return str(unicodedata.digit(char))
    if category[0] == "L" and (letter := unicodedata.normalize("NFD", char)[0]).isascii():  # without its accent
        return letter
    compatible = unicodedata.normalize("NFKC", char)
    if category == "No" and "\u2044" in compatible:  # vulgar fractions
        numerator, _, denominator = compatible.partition("\u2044")
        return f"\\frac{{{numerator}}}{{{denominator}}}"
    return (
        " " if category == "Zs" else "".join((GREEK.get(c) and f"\\{GREEK[c]} ") or SIGNS.get(c, c) for c in compatible)
    )


def _strip_outer(text: str) -> str:
    """The text without formula delimiters around all of it."""
    changed = True
    while changed:
        changed = False
        for opening, closing in OUTER:
            inside = text[len(opening) : -len(closing)]
            if (
                len(text) > len(opening) + len(closing) - 1
                and text.startswith(opening)
                and text.endswith(closing)
                and "$" not in inside.replace(r"\$", "")
                and not inside.endswith("\\")
            ):
                text, changed = inside.strip(), True
    return text.strip()


def _roman(match: re.Match[str]) -> str:
    return f" {match[1]} " if ROMAN_AS_MATH.fullmatch(match[1]) else f"\\text{{{match[1]}}}"


def _cases(match: re.Match[str]) -> str:
    """A system becomes a list of equations; a function defined by cases becomes pairs of value and condition."""
    rows: list[str] = []
    for row in re.split(r"\\\\", match[2]):
        if rows and re.match(r"[\s&]*=", row):  # the next step of a calculation
            rows[-1] += " " + row.strip(" ,")
        elif row.strip(" ,"):
            rows.append(row.strip(" ,"))
    if any("=" in row.partition("&")[0] or "&=" in row for row in rows):
        return ", ".join(row.replace("&", " ") for row in rows)
    pairs = [[CONDITION.sub("", part) for part in row.split("&")] for row in rows]
    return ", ".join(f"({'; '.join(pair)})" if len(pair) > 1 else pair[0] for pair in pairs)


def _temperature(match: re.Match[str]) -> str:
    return r"\text{ celsius}" if match[1][0] in "cC" else r"\text{ fahrenheit}"


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, repeated = match[1] or "0", match[2], match[3] or match[4] or match[5]
    if match[5] and fixed:  # 0.5(3) is a product
        return match[0]
    return _as_fraction(whole, fixed, repeated)


def _as_fraction(whole: str, fixed: str, repeated: str) -> str:
    value = Fraction(int(whole + fixed), 10 ** len(fixed))
    value += Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    return f"({as_latex(value)})"


OPTION_NAMED = re.compile(
    r"(?:(?i:(?:the )?(?:correct )?(?:option|choice|answer)(?: is|:)?)\s*)?\(?\s*([A-Za-z])\s*\)?\s*[.:]?"
)
OPTION_LEADING = re.compile(r"\(?\s*([A-J])\s*(?:\)\s*[.:]?|[.:])\s*(?=\S)")
# Another option after the first: (D), D) or a lone D. The article in "A bird" and letters in a formula do not count.
ANOTHER_OPTION = re.compile(
    r"(?<![\w\\])\(\s*([A-Ja-j])\s*\)|(?!(?<!.)[AI] (?!or\b|and\b|but\b)[a-z]{2})(?<![\w\\'])([A-J])(?![\w'])"
)
OPTIONS = r"\(?[A-J]\)?(?:(?:,| and|, and| or) \(?[A-J]\)?)*"
WRONG = (
    r"(?:is|are|was|were)(?: (?:all|both|clearly|definitely))? "
    r"(?:wrong|incorrect|false|impossible|ruled out|eliminated|too \w+|not (?!wrong|incorrect|false)\w+)"
)
RULED_OUT = re.compile(rf"\b(?:because|since|as) {OPTIONS} {WRONG}\b")  # (C) because A is wrong
FORMULA = re.compile(
    r"(?<![\w\\])[A-Za-z]"
    r"(?:\s*(?:[-=+*^_<>]|\\(?:cup|cap|setminus|subset|cdot|times|le|ge|ne|in)(?![a-z]))+\s*[A-Za-z0-9\\({])+"
)


def option_letter(text: str) -> tuple[str, str] | None:
    """(letter, rest) of a chosen option: C, (c), C., `C) 42`, `(C) 42`, option C; None if the text is no option.

    Also None if another option follows that is not called wrong, `(C) or (D)`, or if the letter itself is called wrong.
    """
    plain = unwrapped(text)
    if named := OPTION_NAMED.fullmatch(plain):
        return named[1].upper(), ""
    if leading := OPTION_LEADING.match(plain):
        rest = plain[leading.end() :].strip()
        if re.match(WRONG, rest):
            return None
        rest = RULED_OUT.sub(" ", rest).strip()
        others = {(other[1] or other[2]).upper() for other in ANOTHER_OPTION.finditer(FORMULA.sub(" ", rest))}
        return None if others - {leading[1]} else (leading[1], rest)
    return None
