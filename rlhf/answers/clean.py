"""Normalizes the spelling of an answer: Unicode, LaTeX spacing and fonts, separators, repeating decimals.

The result is a string of LaTeX-like mathematics. Nothing is evaluated.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from rlhf.answers.chinese import in_digits
from rlhf.answers.tokens import FUNCTIONS
from rlhf.answers.words import MONTHS, as_latex, unwrapped, with_words_marked

SIGNS = {  # the spelling in LaTeX of one or more characters
    "-": "−–—‐‑", r"\times ": "×", r"\cdot ": "·⋅", "*": "∗", "/": "÷∕⁄", ":": "∶", r"\sqrt ": "√", r"\infty ": "∞",
    r"\le ": "≤⩽", r"\ge ": "≥⩾", r"\ne ": "≠", r"\cup ": "∪", r"\cap ": "∩", r"\in ": "∈", r"\emptyset ": "∅",
    r"^\circ ": "°", r"\pm ": "±", r"\mp ": "∓", "'": "′’", r"\approx ": "≈", r"\mathbb{R}": "ℝ",
    r"\text{ cents}": "¢", r"\ldots ": "…", r"\$": "€£¥₹", ",": "，、", "": "✓✔✅", r"\langle ": "⟨", r"\rangle ": "⟩",
    r"\angle ": "∠", r"\to ": "→",
}  # fmt: skip
GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ω": "omega", "Δ": "Delta", "Ω": "Omega", "Σ": "Sigma",
}  # fmt: skip
SPELLED = {  # a character and its spelling in LaTeX
    **{char: f"^{{{plain}}}" for char, plain in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿⁱ", "0123456789+-ni", strict=True)},
    **{char: f"_{{{plain}}}" for char, plain in zip("₀₁₂₃₄₅₆₇₈₉ₙₖ", "0123456789nk", strict=True)},
    **{char: latex for latex, chars in SIGNS.items() for char in chars},
    **{char: f"\\{name} " for char, name in GREEK.items()},
}

OUTER = re.compile(
    r"\s*(?:\$\$?((?:[^$\\]|\\.)*)\$\$?|\\\(((?:[^$\\]|\\.)*)\\\)|\\\[((?:[^$\\]|\\.)*)\\\]|\*\*(.*)\*\*)\s*", re.DOTALL
)
MAX_OUTER = 20  # without a bound, a response of delimiters would take quadratic time
INVISIBLE = re.compile(
    r"(?<!\\)\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])\.?"
    r"|(?<!\\)\\(?:[,;:!> ]|(?:(?:display|text)style|tiny|small|normalsize|[lL]arge|LARGE|huge)"
    r"(?![a-zA-Z])|(?:limits|nolimits|rm|bf|it|tt)(?![a-zA-Z]))"
    r"|\\(?:q?quad|enspace|thinspace|hfill|nobreakspace|newline|nonumber)(?![a-zA-Z])|\\(?:[hv]space\*?|[hv]?phantom)\{[^{}]*\}"
    r"|\\(?:boxed|fbox|ensuremath|underline|mathstrut|checkmark|blacksquare)(?![a-zA-Z])|~"
)
FRACTION_FONT = re.compile(r"\\(?:dfrac|tfrac|cfrac|sfrac|nicefrac|flatfrac)(?![a-zA-Z])")
CIRCLE = r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})|\\degrees?(?![a-zA-Z])"
DOUBLED_BACKSLASH = re.compile(r"\\\\(?=[a-zA-Z(){}\[\]])")
Replacement = str | Callable[[re.Match[str]], str]


def _digits(match: re.Match[str]) -> str:
    return re.sub(r"\D", "", match[0])


def _repeating(match: re.Match[str]) -> str:
    """0.1666... as a fraction; 0.5(3) is a product."""
    whole, fixed, barred, in_brackets = match[1] or "0", match[2], match[3] or match[4], match[5]
    if in_brackets and fixed:
        return match[0]
    repeated = barred or in_brackets
    value = Fraction(int(whole + fixed), 10 ** len(fixed))
    value += Fraction(int(repeated), 10 ** len(fixed) * (10 ** len(repeated) - 1))
    return f"({as_latex(value)})"


def _rows(match: re.Match[str]) -> str:
    """The rows of a system as a list; a row that begins with = is the next step of the row before it."""
    return re.sub(r"\\\\(?!\s*&?\s*=)", ", ", match[2]).replace(r"\\", " ").replace("&", " ")


# A pattern and its replacement in the grammar's spelling; applied in this order
REWRITES: list[tuple[re.Pattern[str], Replacement]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?s)(?:\\left\s*\\(?:\{|lbrace)\s*)?\\begin\s*\{(d?cases|aligned|split|(?:align|equation|gather)\*?)\}(.*?)"
         r"\\end\s*\{\1\}", _rows),
        # separators: 12,50,000; 3{,}5; 1.234,56, but a tuple such as (1.234,56) has brackets; 1{,}234; 1 234; 1.234.567
        (r"(?<=\$)\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])|(?<![\d}])\d{1,2}(?:\{,\}\d{2})+\{,\}\d{3}(?!\d)", _digits),
        (r"(?<=\d)\{,\}(?=(?:\d{1,2}|\d{4,})(?!\d))", "."),
        (r"(?<![\d.,(\[{])(\d{1,3}(?:[. ]\d{3})+),(\d{1,2})(?![\d,.])", lambda m: re.sub(r"\D", "", m[1]) + "." + m[2]),
        (r"(?<=\d)\s*(?:\{\s*,\s*\}|,\\!|')\s*(?=\d{3}(?!\d))", ""),
        (r"(?<![\d.,])\d{1,3}(?:(?:\\,|\\;|\\ |~|\s)\d{3})+(?![\d])", _digits),
        (r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])", _digits),
        # spaces and fonts
        (INVISIBLE.pattern, " "),
        (r"\\(?:text)?color(?:box)?\s*(?:\[\w*\])?\s*\{[\w!#]*\}", " "),
        (r"\\(?:math(?:bf|it|sf|cal|normal|tt)|boldsymbol|bm|vec|overrightarrow|hat)(?![a-zA-Z])\s*", ""),
        (r"\\(?:text(?:bf|it|rm|normal|sf|tt|up|sc)|mbox|hbox|emph)(?=\s*\{)", r"\\text"),
        (FRACTION_FONT.pattern, r"\\frac"),
        (rf"\\(?:operatorname\*?|(?:text|mathrm)(?=\{{[a-z\s]*\}}\())\s*\{{\s*({'|'.join(sorted(FUNCTIONS))})\s*\}}",
         r"\\\1 "),
        (r"\\(?:mathrm|operatorname|rm)\*?\s*\{(?!\})\s*+([A-Za-z]|[-\d.,\s]*+)\s*+\}", r" \1 "),
        (r"\\(?:mathrm|operatorname|rm)\*?\s*\{([^{}]*)\}", r"\\text{\1}"),
        (r"\\([ij])math(?![a-z])", r"\1"),
        # rare notation
        (r"(?<=\w)\s*\{\s*\}", ""),
        (r"\\cents?(?![a-z])", r"\\text{ cents}"),
        (r"\{([^{}]*)\\over(?![a-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![a-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\big(cup|cap)(?![a-z])", r"\\\1"),
        (r"-\s*(?=\\\{)", r"\\setminus "),  # all numbers but some: R - {0}
        (r"(\\text\s*\{[^{}]*[A-Za-z])\s*\}\s*\^\s*(?:\{\s*(-?\d)\s*\}|(\d))", r"\1^\2\3}"),  # cm^2
        (r"(?<=\d)\s?(?:\^\s?)?(?:\\text\s*\{\s*(?:st|nd|rd|th)\s*\}|(?<!\s)(?:st|nd|rd|th)(?![a-zA-Z])"
         r"|\{\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}(?:\s*\})?)"
         rf"(?!\W*(?:text\W*)?(?!text|(?:and|or|of|(?i:{MONTHS}))\b)[A-Za-z]{{2}})", ""),  # not of the 42nd prime
        (rf"(?i)(?:\\text\s*\{{\s*)?(?:{CIRCLE}|degrees?)\s*(?:\\text\s*\{{\s*)?(C(?:elsius)?|F(?:ahrenheit)?)(?![a-zA-Z])"
         r"(?:\s*\})?", lambda m: rf"\text{{ {'celsius' if m[1][0] in 'cC' else 'fahrenheit'}}}"),
        (r"\(\s*\\text\s*\{\s*mod\s*\}\s*(\d+)\s*\)", r"\\pmod{\1}"),
        (r"\(\s*(\\approx[^()]*)\)$", r"\1"),
        (r"^((?:(?!\\(?:[lg]eq?|neq?)(?![a-z]))[^<>])*?[\w)}])\s*[,(]?\s*(?:\\text\s*\{[,\s]*(?:for|where)[^{}]*\}\s*)?"
         r"[kmn]\s*(?:\\in\s*\\mathbb\s*\{?[ZN]\}?|\\text\s*\{\s*is an(?:y)? integer\s*\})\s*\)?$",
         r"\1"),  # pi/4 + k pi, k in Z
        (r"(?i)\\?%|\\text\s*\{\s*(?:percent(?:age)?|pct)\s*\}|(?<![\\a-zA-Z])(?:percent(?:age)?|pct)(?![a-zA-Z])",
         r" \\pct "),
        (rf"{CIRCLE}|\\text\s*\{{\s*deg(?:rees?)?\s*\}}|(?<![\\a-zA-Z])deg(?:rees?)?(?![a-zA-Z])", r" \\degree "),
        (r"\\text\s*\{\s*+((?:[A-Za-z]\s*=)?(?:[-+\d.,:/\s()=<>]|\\pct|\\degree)*)\}", r" \1 "),
        (r"\\dot\s*\{?(\d)\}?(\d{0,58})\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"(?<![\d.])(\d{0,60})\.(\d{0,60})(?:\\(?:overline|bar|dot)\s*(?:\{(\d{1,60})\}|(\d))|\((\d{1,60})\))",
         _repeating),
        # the name of a value before the last =, in notation that the grammar does not know
        (r"^\s*(?:[A-DI-OR-Z]\s?\([\d,\s]+\)|\\\|"
         r"|\\(?:Pr|deg|dim|min|max|gcd|lcm|lim|int|sum|prod|lVert|bar|overline|tilde|mathbb\s*\{[PE]\})(?![a-z])"
         r"|\\frac\s*\{d[\w^]*\}\s*\{d\w\}|\\(?:(?:var)?phi|sigma|tau|text\s*\{\s*(?:gcd|lcm)\s*\})(?=\s*\())"
         r"(?:\([^()]*\)|\{[^{}]*\}|[^=<>{}])*=(?=[^=]+$)", ""),
        (r"\s+", " "),
    )
]  # fmt: skip
# The name of a point, P of P(4, -1); not of a distribution or binomial: B(5, 2), C(5, 2), N(0, 1), U(0, 1)
POINT = re.compile(
    r"^(?:\\text\s*\{\s*(?:(?:the )?(?:point|center|vertex|focus))?\s*(?-i:[AD-MO-TV-Z])?\s*(?:is|at|:)?\s*\})?\s*"
    r"(?:(?-i:[AD-MO-TV-Z])'?)?\s*(?=\((?=[^()]*\d)[^()=|]*,[^()=|]*\)\W*$)",
    re.IGNORECASE,
)
HAS_WORDS = re.compile(r"\d\s?[^\x00-\x7f]|\\text|(?<![\\a-zA-Z])[A-Za-z]{2}|[\d}] [a-zA-Z](?![a-zA-Z])")
OUTWARD_BRACKETS = re.compile(r"^([\[\]])([^\[\]]+,[^\[\]]+)([\[\]])$")  # ]0, 1[ is (0, 1)
DOLLAR = re.compile(r"(?<!\\)\$")
LETTER_IN_BRACES = re.compile(r"^\{\s*(\([A-Z]\)|[A-Za-z](?=\s*\}$))\s*\}")


def clean(text: str) -> str:
    """The normalized spelling of one extracted answer."""
    if not text.isascii():
        text = as_ascii(in_digits(text))
    text = strip_outer(text)
    if "matrix" not in text and "array" not in text and "cases" not in text:
        text = DOUBLED_BACKSLASH.sub(r"\\", text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = DOLLAR.sub(r"\\$", POINT.sub("", strip_outer(text)))
    if HAS_WORDS.search(text):
        text = with_words_marked(text)
    text = OUTWARD_BRACKETS.sub(lambda m: "(["[m[1] == "["] + m[2] + ")]"[m[3] == "]"], text)
    text = text if text.endswith("...") else text.rstrip(" .,;:\\")
    return LETTER_IN_BRACES.sub(r"\1", _without_doubled_brackets(_without_doubled_brackets(text, "{", "}"), "(", ")"))


def strip_outer(text: str) -> str:
    """The text without formula delimiters around all of it, at most MAX_OUTER of them."""
    for _ in range(MAX_OUTER):
        if not (outer := OUTER.fullmatch(text)):
            break
        text = next(filter(None, outer.groups()), "")
    return text.strip()


def _without_doubled_brackets(text: str, opening: str, closing: str) -> str:
    """The text without brackets directly around brackets: (1) of ((((1))))."""
    opened, closed = (len(text) - len(rest) for rest in (text.lstrip(opening), text.rstrip(closing)))
    depth = lowest = opened
    for char in text[opened : len(text) - closed]:
        depth += (char == opening) - (char == closing)
        lowest = min(lowest, depth)
    doubled = max(min(lowest, closed) - 1, 0)
    return text[doubled : len(text) - doubled]


def as_ascii(text: str) -> str:
    return re.sub(r"\}\^\{|\}_\{", "", "".join(map(_one_character, text)))


def _one_character(char: str) -> str:
    if char.isascii() or char in SPELLED:
        return SPELLED.get(char, char)
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
    if compatible == char or category == "Zs":
        return " " if category == "Zs" else char
    return "".join(map(_one_character, compatible))


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
