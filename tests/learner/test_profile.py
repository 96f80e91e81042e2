"""A trace that cannot be written costs the trace, not the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worlds import make_config

from rlhf.run.run import Run

RANK: Any = SimpleNamespace(apply=lambda function, *arguments: function(RANK, *arguments))


class OneLearner:
    async def call_one(self, rank: int, ask: Callable[[Any], Any], *, what: str) -> Any:
        return ask(RANK)


def test_a_trace_that_cannot_be_written_is_a_warning_and_the_next_one_is_written(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        tiny_model_dir / "model", run={"dir": str(tmp_path / "run"), "steps": 3}, logging={"profile_steps": (1, 3)}
    )
    cluster: Any = SimpleNamespace(learners=OneLearner(), checkpoints=None)
    run = Run(config, resume=False, make_cluster=lambda *_, **__: cluster)
    warnings: list[str] = []
    steps: list[int] = []
    monkeypatch.setattr(run.log, "warn", warnings.append)
    folder = tmp_path / "run" / "profile"
    folder.parent.mkdir()

    async def step(number: int) -> None:
        async with run.profiled(number):
            steps.append(int(torch.ones(number).sum()))

    folder.write_text("a file where the folder should be")
    asyncio.run(step(1))
    folder.unlink()
    asyncio.run(step(2))
    asyncio.run(step(3))
    assert steps == [1, 2, 3]
    assert warnings == [f"{folder}/step-000001.json.gz was not written: File exists."]
    assert [path.name for path in folder.iterdir()] == ["step-000003.json.gz"]
