"""When a run evaluates and saves: as its config says, and not again where a resumed run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.data.model_files import load_tokenizer
from rlhf.run.folder import RunFolder
from rlhf.run.prompts import read_data
from rlhf.run.run import Run
from rlhf.run.state import RunState


def test_a_step_of_more_prompts_than_the_data_has_is_refused(tiny_model_dir: Path) -> None:
    config = make_config(tiny_model_dir / "model", rollout={"prompts_per_step": 257})
    with pytest.raises(ValueError, match=r"rollout\.prompts_per_step=257: .*\b256\b"):
        read_data(config, load_tokenizer(config.model))


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
    run = Run(config, resume=False)
    assert [step for step in range(6) if run.evaluation_is_due(step)] == steps


def test_a_resumed_run_does_not_evaluate_the_start_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model_dir / "model", run={"dir": str(tmp_path), "steps": 5})
    folder = RunFolder(tmp_path, resume=False)
    folder.finish_checkpoint(folder.begin_checkpoint(2), RunState(step=2, updates=config.update_plan), keep=1)
    run = Run(config, resume=True)
    assert [step for step in range(6) if run.evaluation_is_due(step)] == [5]


def test_a_checkpoint_is_due_at_its_interval_at_the_end_and_where_the_evaluation_is_best(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = make_config(
        tiny_model_dir / "model",
        run={"dir": str(tmp_path / "run"), "steps": 9},
        data={"eval": str(tiny_model_dir / "test.jsonl")},
        evaluation={"every": 1},
        checkpoint={"every": 4, "best": "eval/test/avg@1"},
    )
    run, due = Run(config, resume=False), []
    for step, score in enumerate((0.9, 0.2, 0.1, 0.2, 0.1, 0.5, 0.6, 0.6, 0.0, 0.1)):
        run.state.evaluations[step] = {"eval/test/avg@1": score}
        due += [step] if step and run.checkpoint_is_due(step) else []
    assert due == [1, 4, 5, 6, 8, 9]
