"""The checks of `python -m rlhf.doctor`: before a run, that it will start, fit and be right."""

from __future__ import annotations

import time
from typing import Any


def forever(response: str, *, answer: str, columns: dict[str, Any], metadata: dict[str, Any]) -> float:
    """A reward that never returns: the doctor checks that it is killed."""
    while True:
        time.sleep(1)
