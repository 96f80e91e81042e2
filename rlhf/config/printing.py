"""What the programs print. Text of data, models and rewards cannot command the terminal that shows it."""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

KEPT = "\n\t\u200c\u200d"  # lines, tabs, and the joiners that Persian, Hindi and emoji are written with


def printable(value: Any) -> str:
    """Text for a terminal; control characters, which could move the cursor or turn the text, are escaped."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(c if c in KEPT or unicodedata.category(c)[0] != "C" else f"\\u{ord(c):04x}" for c in text)


def say(*texts: str, file: TextIO | None = None) -> None:
    """Print text at once, without control characters; every line of a program that is not laid out by rich."""
    print(*map(printable, texts), file=file, flush=True)
