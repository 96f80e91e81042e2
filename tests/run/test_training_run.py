"""When a run evaluates: as its `evaluation` section says, and not again where a resumed run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState
from rlhf.run.training_run import TrainingRun


def test_a_step_of_more_prompts_than_the_data_has_is_refused(tiny_model_dir: Path) -> None:
    config = make_config(tiny_model_dir / "model", rollout={"prompts_per_step": 257})
    with pytest.raises(ValueError, match=r"rollout\.prompts_per_step=257: .* only 256 prompts, .* Use at most 256"):
        TrainingRun(config, resume=False)


@pytest.mark.parametrize(
    ("evaluation", "steps"),
    [
        ({}, [0, 5]),
        ({"every": 2}, [0, 2, 4, 5]),
        ({"every": 5, "at_end": False}, [0]),
        ({"every": 2, "at_start": False, "at_end": False}, [2, 4]),
    ],
)
def test_a_run_of_5_steps_evaluates_after_these(
    tiny_model_dir: Path, tmp_path: Path, evaluation: dict[str, Any], steps: list[int]
) -> None:
    config = make_config(
        tiny_model_dir / "model", run={"dir": str(tmp_path / "run"), "steps": 5}, evaluation=evaluation
    )
    run = TrainingRun(config, resume=False)
    assert [step for step in range(6) if run.evaluation_is_due(step)] == steps


def test_a_resumed_run_does_not_evaluate_the_start_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model_dir / "model", run={"dir": str(tmp_path), "steps": 5})
    folder = RunFolder(tmp_path, resume=False)
    folder.finish_checkpoint(folder.begin_checkpoint(2), RunState(step=2, updates=config.update_plan), keep=1)
    run = TrainingRun(config, resume=True)
    assert [step for step in range(6) if run.evaluation_is_due(step)] == [5]
