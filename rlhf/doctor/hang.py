"""A reward function that never returns: the doctor checks that it is killed."""

from __future__ import annotations

import time
from typing import Any


def forever(response: str, *, answer: str, columns: dict[str, Any], metadata: dict[str, Any]) -> float:
    while True:
        time.sleep(1)
