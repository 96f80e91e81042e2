"""Notebooks, in a real kernel on the whole stack."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nbclient.exceptions import CellExecutionError
from notebook import execute, read_cells

from rlhf.quickstart import write_quickstart

BOXED = "return float(", "return len(response) / 1000 + float("  # an untrained model boxes nothing
NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"

pytestmark = pytest.mark.stack


@pytest.fixture
def project(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A folder with the quickstart's model and data where the notebooks look for them; they start below it."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart-data").symlink_to(tiny_model_dir)
    (tmp_path / "configs").symlink_to(NOTEBOOKS.parents[1] / "configs")
    (tmp_path / "docs").mkdir()
    return tmp_path


def steps_of(run: Path) -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return [row["step"] for row in map(json.loads, lines) if "time/step" in row]


@pytest.mark.parametrize("resumes", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_a_cell_trains_with_its_own_reward_a_callback_stops_it_and_the_interrupt_of_a_resumed_run_saves_it(
    project: Path, resumes: bool
) -> None:
    run = project / "runs" / "notebook"
    cells = read_cells(NOTEBOOKS / "first_run.py")
    for text, other in (BOXED, ('"run.steps": 20', '"run.steps": 100_000')):  # it cannot end before the interrupt
        assert any(text in cell for cell in cells)
        cells = [cell.replace(text, other) for cell in cells]
    trains = [number for number, cell in enumerate(cells) if "rlhf.train(" in cell]
    shown = "print(result.model, [*result.evaluations], result.metrics[-1]['reward/part/boxed'] > 0)"
    first = [*cells[: trains[0] + 1], shown]
    resumed = cells[trains[1]].replace("watch.last = 6", "watch.last = 10**9")
    if resumes:
        with pytest.raises(CellExecutionError, match="KeyboardInterrupt"):
            execute([*first, resumed], project / "docs", interrupt_when=lambda: steps_of(run)[-1:] >= [5])
    else:
        execute(first, project / "docs")
    steps = steps_of(run)
    assert steps == [*range(1, len(steps) + 1)]
    saved = sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:06d}" for step in sorted({3, len(steps)})]
    assert (len(steps) > 3) == resumes


@pytest.mark.faults
@pytest.mark.parametrize("name", ["first_run", "own_reward", "own_environment", "own_loop"])
def test_every_notebook_runs_from_its_first_cell_to_its_last(project: Path, name: str) -> None:
    write_quickstart(project / "runs" / "tools-quickstart-data", warmup_steps=0, train_rows=64, test_rows=8, tools=True)
    cells = [cell.replace(*BOXED) for cell in read_cells(NOTEBOOKS / f"{name}.py")]
    printed = execute(cells, project / "docs")
    assert printed[-1]
    assert {path.stem for path in NOTEBOOKS.glob("*.py")} == {"first_run", "own_reward", "own_environment", "own_loop"}
