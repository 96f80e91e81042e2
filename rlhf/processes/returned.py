"""The one reader of scores, from functions, environments, judges and endpoints: a number, or a mapping with `score`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_SHOWN = 80  # characters of a value in a message


class Returned(NamedTuple):
    """A reward as it was returned.

    Attributes:
        score: None if the function does not judge, or the response is unscorable.
        numbers: further numbers of a mapping by name; they are logged.
        others: its further values by name.
    """

    score: float | None
    numbers: dict[str, float]
    others: dict[str, Any]


def read_returned(value: Any, *, finite: bool = False) -> Returned:
    """Read a number or a mapping.

    Args:
        finite: refuse infinities. Otherwise a number too large for a float is infinite, which is over every bound.

    Raises:
        TypeError, ValueError: a value cannot be used. The message names its key and begins with `returned`.
    """
    if not isinstance(value, Mapping):
        return Returned(_checked(value, "", finite), {}, {})
    if "score" not in value:
        raise ValueError(f"returned a mapping with {sorted(map(str, value))}, without score")
    score = _checked(value["score"], "score", finite)
    further = {as_utf8(str(name)): item for name, item in value.items() if name != "score"}
    others = {name: item for name, item in further.items() if as_number(item) is None}
    numbers = {name: _checked(item, name, finite) for name, item in further.items() if name not in others}
    return Returned(score, numbers, others)


def read_scores(values: Any, count: int, *, finite: bool = True, booleans: bool = True) -> list[float | None]:
    """Read a list of `count` scores, each as `read_returned` does; a bare NaN is None, as in TRL.

    Args:
        booleans: True and False are the numbers 1 and 0; otherwise they are refused.

    Raises:
        TypeError, ValueError: as `read_returned`, and if it is no list or has another length.
    """
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise TypeError(f"returned {type(values).__name__}, not a list of {count} scores")
    values = list(values)
    if not booleans and any(isinstance(v.get("score") if isinstance(v, Mapping) else v, bool) for v in values):
        raise TypeError("returned true or false for a score, no finite number")
    scores = [
        None if math.isnan(as_number(value) or 0.0) else read_returned(value, finite=finite).score for value in values
    ]
    if len(scores) != count:
        raise ValueError(f"returned {len(scores)} scores, not {count}")
    return scores


def as_utf8(text: str) -> str:
    """Text that can be written as UTF-8: lone surrogates, which stand for invalid bytes, are escaped as \\udc80."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_utf8_json(value: Any) -> Any:
    """The value with `as_utf8` applied to all texts. RecursionError if it is too deep to be written later."""
    if isinstance(value, str):
        return as_utf8(value)
    if isinstance(value, list):
        return [as_utf8_json(item) for item in value]
    if isinstance(value, dict):
        return {as_utf8(key): as_utf8_json(item) for key, item in value.items()}
    return value


def _checked(value: Any, key: str, finite: bool) -> Any:
    """The value as a float; None stays None."""
    number = as_number(value)
    if value is None or (number is not None and (math.isfinite(number) if finite else not math.isnan(number))):
        return number
    if number is not None and math.isinf(number) and not isinstance(value, float):
        raise ValueError("returned a number too large for a float")
    shown = f"{key}={value!r}" if key else type(value).__name__ if number is None else str(number)
    raise (TypeError if number is None else ValueError)(f"returned {shown[:MAX_SHOWN]}, no finite number")


def as_number(value: Any) -> float | None:
    """The value as a float; None if it is no number. Numbers are all values that `float` takes, but no text."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        return None
