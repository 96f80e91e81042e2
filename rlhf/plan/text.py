"""Plain aligned lines of at most 100 columns, readable in a terminal and in a file."""

from __future__ import annotations

import textwrap

COLUMNS = 100
LABEL = 28


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 minibatches`."""
    plural = f"{noun}es" if noun.endswith(("batch", "pass")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def rows(*pairs: tuple[str, str]) -> list[str]:
    """Label and value side by side; long values continue below their own beginning."""
    return [line for label, value in pairs for line in wrapped(f"  {label:<{LABEL}}", value)]


def wrapped(first: str, text: str) -> list[str]:
    """Text after a label, broken at COLUMNS and continued under its own beginning."""
    indent = " " * len(first)
    lines = textwrap.wrap(
        text, COLUMNS, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines or [first.rstrip()]
