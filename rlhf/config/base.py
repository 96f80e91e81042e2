"""The base of every section of the YAML, and the messages about keys that a section does not have."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

REMOVED = {
    "rollout.top_p": "It had to be 1. Delete the line.",
    "reward.start_seconds": "It is 120 now. Delete the line.",
    "reward.cache_size": "It is 100,000 now. Delete the line.",
}


class Section(BaseModel):
    """One section of the config; every field has a default (or is required), a unit and a one-line description.

    Types are strict, unknown keys are refused, and nothing changes after validation.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def unknown_keys(
    schema: type[BaseModel], values: Any, section: str = "", *, elsewhere: Sequence[str] = ()
) -> list[str]:
    """One message for each key of `values` that the schema does not have.

    Args:
        section: dotted name of the section, for messages; empty for the whole config.
        elsewhere: dotted keys of the whole config. One that ends in the unknown key is suggested first.
    """
    prefix = f"{section}." if section else ""
    messages = []
    for name, value in values.items() if isinstance(values, dict) else ():
        if name in schema.model_fields:
            continue
        if (reason := REMOVED.get(f"{prefix}{name}")) is not None:
            messages.append(f"{prefix}{name}={short(value)}: this key was removed. {reason}")
            continue
        moved = [key for key in elsewhere if key.endswith(f".{name}")]
        hint = f"Did you mean {' or '.join(moved)}?" if moved else suggest(name, schema.model_fields, prefix)
        messages.append(f"{prefix}{name}={short(value)}: there is no such key. {hint}")
    return messages


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The known name that is spelled most like `name`, or all known names."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    if nearest:
        return f"Did you mean {prefix}{nearest[0]}?"
    return f"Known: {', '.join(known) or 'none'}."


def short(value: Any) -> str:
    """A value as a message shows it, at most 80 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
