"""docs/environments.md is correct: its classes run, and the defaults in it are those of the code."""

from __future__ import annotations

import ast
import asyncio
import random
import re
from pathlib import Path
from typing import Any

from rlhf.environments.contract import Environment

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_class_to_copy_is_short_and_runs(tmp_path: Path) -> None:
    (tmp_path / "guess.py").write_text(BLOCKS[0])
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 20
    environment = Environment(f"{tmp_path / 'guess.py'}:GuessTheNumber")

    async def rollout() -> dict[str, Any]:
        episode = environment.episode()
        assert "guess" in (await episode.reset({}, {"group": 0, "sample": 0}))["text"]
        low, high = 1, 100
        for _ in range(7):
            number = (low + high) // 2
            call = {"type": "function", "function": {"name": "guess", "arguments": {"number": number}}}
            said = (await episode.call([call]))["answers"][0]["content"]
            low, high = (number + 1, high) if said == "higher" else (low, number - 1)
            if said == "Correct!":
                break
        return await episode.finish()

    state = random.getstate()
    assert 1 / 7 <= asyncio.run(rollout())["reward"] <= 1
    assert random.getstate() == state


def test_every_block_of_python_is_valid() -> None:
    assert len(BLOCKS) == 7
    for block in BLOCKS:
        ast.parse(block)
