r"""Text in one spelling: without LaTeX's marks around words, in Unicode's compatible forms, with ASCII punctuation.

`$\text{New York}$` is New York, `５` is 5, `−5` is -5, `½` is 1/2, `x²` is x^2, `你好。` is 你好. with a full stop.
"""

from __future__ import annotations

import re
import unicodedata

from rlhf.answers.clean import INVISIBLE, strip_outer

FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|sc|sl|normal|md)?|math(?:rm|bf|it|sf|tt|normal|up)|operatorname\*?|[mh]box|emph"
    r"|boldsymbol|bm|boxed|underline)\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
MAX_NESTED = 10  # fonts in fonts
ESCAPED = re.compile(r"\\([%$#&_{}])")
SCRIPT = re.compile(r"([\^_])\{([^{}]*)\}|\{(,)\}")
BESIDE_A_DIGIT = re.compile(  # 5½ is 5 1/2, 10² is 10^2, 101₂ is 101_2; Unicode's compatible forms are 51/2, 102, 1012
    r"(?P<fraction>(?<=\d)[¼-¾⅐-⅞↉])|(?P<power>[⁰¹²³⁴-⁹⁺⁻]+)|(?P<index>(?<=\d)[₀-₉]+)"
)
MARK_OF = {"fraction": " ", "power": "^", "index": "_"}
SPELLINGS = {
    "-": "‐‑‒–—―−", '"': "“”„‟«»「」『』〝〞〟", "'": "‘’‚‛′´ʼ", ".": "。٫।॥։۔።", ",": "、،٬၊፣", ";": "؛፤", ":": "፡፦",
    "?": "؟፧", "%": "٪", "/": "⁄∕", "~": "〜∼", "·": "・‧•∙⋅", "(": "〔【〖", ")": "〕】〗", "<": "《〈⟨‹",
    ">": "》〉⟩›",
}  # fmt: skip
ASCII_MARKS = str.maketrans({char: mark for mark, chars in SPELLINGS.items() for char in chars})


def plain_text(text: str) -> str:
    """The text in one spelling; its words, case and punctuation stay."""
    text = strip_outer(text)
    if "\\" in text:
        for _ in range(MAX_NESTED):
            text, count = FONT.subn(r"\1", text)
            if not count:
                break
        text = strip_outer(ESCAPED.sub(r"\1", INVISIBLE.sub(" ", text)))
    text = SCRIPT.sub(r"\1\2\3", text)
    if text.isascii():
        return text
    text = BESIDE_A_DIGIT.sub(lambda match: MARK_OF[str(match.lastgroup)] + match[0], text)
    text = unicodedata.normalize("NFKC", text.translate(ASCII_MARKS)).translate(ASCII_MARKS)
    return "".join(filter(None, map(_character, text)))


def _character(char: str) -> str:
    """The character; a digit of any script as 0 to 9; an empty string for a character without width."""
    if char.isascii():
        return char
    category = unicodedata.category(char)
    return str(unicodedata.digit(char)) if category == "Nd" else "" if category == "Cf" else char
