"""Why an answer has no value here."""

from __future__ import annotations


class UnsupportedError(Exception):
    """Not in the notation that is read here; another method may know."""


class UndefinedError(Exception):
    """No number: division by zero, an infinity where a number is needed, or too large to write down."""
