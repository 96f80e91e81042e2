"""A small config that is sound, for tests that change a key of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

BASE = {
    "run": {"dir": "runs/test", "steps": 10},
    "model": {"path": "some/model"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 100},
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_response_tokens": 28},
    "learner": {"max_tokens_per_microbatch": 256},
}


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The file of the config."""
    file = tmp_path / "base.yaml"
    file.write_text(yaml.safe_dump(BASE))
    return str(file)
