"""Plain decimal numbers -> exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction

PLAIN = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
MAX_DIGITS = 4_000  # CPython refuses to convert longer decimals; such numbers are compared as strings


def exact_number(text: str) -> Fraction | None:
    """The value of a plain decimal, thousands separators allowed; None if the text is anything else."""
    text = text.strip().replace("$", "")
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))
    text = text.rstrip(".")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    return Fraction(text) if len(text) <= MAX_DIGITS and PLAIN.fullmatch(text) else None
