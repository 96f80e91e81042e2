"""The README of an exported model, from the state of a checkpoint and the metrics of its run."""

from __future__ import annotations

from pathlib import Path

from worlds import make_config

from rlhf.run.model_card import model_card
from rlhf.run.state import RunState


def test_a_killed_run_whose_last_line_of_metrics_is_cut_short_has_its_card(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 2, "time/step": 1.0, "reward/mean": 0.75}\n{"step": 3, "time/st')
    config = make_config(tmp_path / "model").model_dump(mode="json")
    assert "| 2 | 0.75 |" in model_card(RunState(step=2, config=config), metrics)
    assert "## Training" not in model_card(RunState(step=3, config=config), metrics)
