"""The world of this recipe: some rows take their time before the model answers, as a sandbox or a search would."""

from __future__ import annotations

import asyncio
from typing import Any


async def play(row: dict[str, Any], generate: Any) -> None:
    """Wait as long as the row says, then let the model answer. The `math` reward judges what it says."""
    await asyncio.sleep(row.get("wait_s", 0.0))
    await generate(row["prompt"])
