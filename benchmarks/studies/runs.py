"""Shared by the studies that train: resumable runs of the trainer's programs, and worlds of ranks without Ray."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import report

Steps = list[dict[str, Any]]  # the metrics of a run, by training step

STAMP = "stamp.json"  # date and commit of a run
PLAIN = (
    "data.eval=null", "evaluation.every=null", "checkpoint.every=null", "run.export=false",
    "logging.wandb.mode=disabled",
)  # fmt: skip


def train(program: str, config: str, folder: Path, *, data: Path, steps: int, overrides: Sequence[str]) -> Steps:
    """The metrics of a run of `python -m rlhf.PROGRAM`, which is made unless `folder` has all of its steps.

    A run that ended has a file STAMP.
    """
    if (folder / STAMP).is_file() and len(taken := read_steps(folder)) == steps:
        return taken
    shutil.rmtree(folder, ignore_errors=True)  # a run that was cut short begins anew
    print(f"{folder}: {steps} steps", flush=True)
    line = command(program, config, folder, data=data, steps=steps, overrides=overrides)
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    report.write_json(folder / STAMP, report.stamp())
    return read_steps(folder)


def command(program: str, config: str, folder: Path, *, data: Path, steps: int, overrides: Sequence[str]) -> list[str]:
    """The command line of a run, as a user would type it."""
    return [
        sys.executable, "-m", f"rlhf.{program}", "--config", config, f"run.dir={folder}", f"run.steps={steps}",
        f"model.path={data}/model", f"data.train={data}/train.jsonl", *PLAIN, *overrides,
    ]  # fmt: skip


def read_steps(folder: Path) -> Steps:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def run_world(rank_main: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """What rank_main(rank, processes, port, *arguments) returns on every rank of a new world, by rank."""
    from rlhf.learner.port import free_port

    port = free_port()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(rank_main, rank, processes, port, *arguments) for rank in range(processes)]
        return [future.result() for future in waiting]


def band(panel: Any, curves: Sequence[Sequence[float]], at: Sequence[float], **style: Any) -> None:
    """Draw the mean of curves that share their places `at`, and an area from the lowest to the highest."""
    values = np.array(curves, float)
    (line,) = panel.plot(at, values.mean(0), **style)
    panel.fill_between(at, values.min(0), values.max(0), color=line.get_color(), alpha=0.2, lw=0)
