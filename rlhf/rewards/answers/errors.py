"""The two reasons why an expression has no value."""

from __future__ import annotations


class UnsupportedError(Exception):
    """The parser does not know this notation."""


class UndefinedError(Exception):
    """There is no number: division by zero, an infinity, or a number that is too large."""
