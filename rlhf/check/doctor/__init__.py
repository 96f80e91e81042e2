"""The checks of `python -m rlhf.doctor`: that a run will start, fit and compute correctly."""

from __future__ import annotations

import time
from typing import Any


def forever(response: str, *, answer: str, columns: dict[str, Any], metadata: dict[str, Any]) -> float:
    """A reward that never returns: the doctor checks that it is killed."""
    while True:
        time.sleep(1)
