"""The grader that never answers, which the doctor has killed to see that it can be."""

from __future__ import annotations

import time
from typing import Any


def forever(response: str, *, answer: str, columns: dict[str, Any], metadata: dict[str, Any]) -> float:
    while True:
        time.sleep(1)
