#!/usr/bin/env python3
"""A grid over overrides: runs the program once a cell, one line each, and prints a table of the results.

With `--grid run.seed=0,1,2` the table has a row for each setting: the mean of its seeds, and an interval over them.

    python launch/sweep.py --output runs/kl-scan --config configs/quickstart.yaml \\
        --grid algo.kl_estimator=k1,k2,k3,k4 --grid algo.kl_coef=0.01,0.05,0.1

Every cell is a run of its own in OUTPUT/NAME, its terminal output in OUTPUT/NAME.log. The same command again leaves
finished cells alone, goes on with interrupted ones from their checkpoints, and begins those without one anew.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launcher
import yaml
from resume import prepare

GRACE_S = 180.0  # on SIGTERM a run saves within run.grace_s, and ends its engines
LOG_LINES = 5
WITH_WANDB = ("rlhf.grpo", "rlhf.ppo")
SEED = "run.seed"
OVER_SEEDS = (
    "Where seeds differ: their mean (95% bootstrap interval over seeds; for two or three seeds, the lowest and the "
    "highest value)."
)
DEFAULT_COLUMNS = ("evaluation_before.*", "evaluation_after.*", "updates_taken", "updates_skipped")


@dataclass(frozen=True)
class Cell:
    """One point of the grid: its values, the keys' last parts making the name, and its run folder."""

    values: tuple[tuple[str, str], ...]
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def summary(self) -> dict[str, Any] | None:
        """The summary that the run wrote at its end; None if it has not finished."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        return summary if isinstance(summary, dict) else None

    def last_step(self) -> dict[str, Any]:
        """The metrics of the last training step; empty if no step has finished."""
        try:
            rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        except (FileNotFoundError, ValueError):
            return {}
        return next((row for row in reversed(rows) if "time/step" in row), {})


def parse_axis(text: str) -> tuple[str, list[str]]:
    """`key=a,b` -> the key and its values; commas inside brackets and quotes belong to a value, as in YAML."""
    key, _, values = text.partition("=")
    try:
        listed = yaml.compose(f"[{values}]")
        parts = [values[node.start_mark.index - 1 : node.end_mark.index - 1] for node in listed.value]
    except yaml.YAMLError:
        parts = []
    if not key or not parts or values.endswith(","):
        raise ValueError(f"--grid {text!r}: write section.key=value,value, such as algo.kl_coef=0.01,0.1.")
    if len(set(parts)) < len(parts):
        raise ValueError(f"--grid {text!r}: a value is repeated. Name each once.")
    return key, parts


def cells(axes: Sequence[tuple[str, list[str]]], output: Path) -> list[Cell]:
    """The grid, the last axis turning fastest.

    Raises:
        ValueError: a key is given twice, or two cells have the same name.
    """
    keys = [key for key, _ in axes]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"--grid: {repeated[0]} is given twice. Give each key one list.")
    short = [key.rsplit(".", 1)[-1] for key in keys]
    names = keys if len(set(short)) < len(short) else short
    grid = []
    for values in itertools.product(*(values for _, values in axes)):
        name = ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        folder = re.sub(r"[^\w.,=+-]+", "_", name)
        grid.append(Cell(tuple(zip(keys, values, strict=True)), output / folder))
    if len({cell.folder for cell in grid}) < len(grid):
        raise ValueError(
            "--grid: two cells would have the same folder: their values differ only in characters that become `_`."
        )
    return grid


def command(cell: Cell, module: str, arguments: Sequence[str]) -> list[str]:
    overrides = [f"{key}={value}" for key, value in cell.values]
    group = [f"logging.wandb.group={cell.folder.parent.name}"] if module in WITH_WANDB else []  # a later one wins
    return [sys.executable, "-m", module, *group, *arguments, *overrides, f"run.dir={cell.folder}"]


# --- running ---


def run_cells(waiting: list[Cell], options: argparse.Namespace) -> list[Cell]:
    """Run the cells without a result, `--jobs` at a time; prints a line per cell and returns the cells that failed."""
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    waiting, total = list(waiting), len(waiting)
    running: list[tuple[Cell, subprocess.Popen[bytes], float]] = []
    failed: list[Cell] = []
    done = 0
    try:
        while (waiting or running) and not launcher.interrupts:
            while waiting and len(running) < options.jobs:
                cell = waiting.pop(0)
                if cell.summary() is not None:
                    done += 1
                    print(f"[{done}/{total}] {cell.folder.name}: has its result", flush=True)
                    continue
                arguments = [*options.program, *prepare(cell.folder)]
                process = launcher.start(command(cell, options.module, arguments), cell.log, RAY_AUTH_TOKEN=token)
                running.append((cell, process, time.monotonic()))
            for entry in list(running):
                cell, process, began = entry
                if process.poll() is None:
                    continue
                running.remove(entry)
                done += 1
                how = _ending(cell, process.returncode)
                print(f"[{done}/{total}] {cell.folder.name}: {how}, {time.monotonic() - began:.0f} s", flush=True)
                if how != "done":
                    failed.append(cell)
                    print(_tail(cell.log), file=sys.stderr, flush=True)
            time.sleep(0.1)
    finally:
        for _, process, _ in running:  # all end at the same time
            process.terminate()
        for _, process, _ in running:
            launcher.stop(process, GRACE_S, told=True)
    return failed


def _ending(cell: Cell, returncode: int) -> str:
    if returncode != 0:
        return f"failed with status {launcher.exit_status(returncode)}"
    return "done" if cell.summary() is not None else "ended with 0 but wrote no summary.json"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"  {log}:", *(f"    {line}" for line in lines)])


# --- the table ---


def flatten(summary: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in summary.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def table(grid: Sequence[Cell], columns: Sequence[str]) -> str:
    """Markdown: a row a cell with its values, then columns of its summary and its last step's metrics.

    `a.*` is all that begin with `a.`. A cell without a summary has not finished, and shows nothing. Cells that differ
    in their seed alone are one row, of the seeds that have finished.
    """
    summaries = {cell: flatten(cell.summary() or {}) for cell in grid}
    flat = {cell: cell.last_step() | values if values else {} for cell, values in summaries.items()}
    known = list(dict.fromkeys(name for values in flat.values() for name in values))
    wanted = []
    for column in columns:
        if column.endswith("*"):
            wanted += [n for n in known if n.startswith(column[:-1]) and not n.endswith(("/low", "/high"))]
        else:
            wanted.append(column)
    wanted = list(dict.fromkeys(wanted))
    settings: dict[tuple[tuple[str, str], ...], list[Cell]] = {}
    for cell in grid:
        settings.setdefault(tuple(pair for pair in cell.values if pair[0] != SEED), []).append(cell)
    has_seeds = len(settings) < len(grid)
    if not has_seeds:
        settings = {cell.values: [cell] for cell in grid}
    rows = [[*(key for key, _ in next(iter(settings))), *(["seeds"] if has_seeds else []), *wanted]]
    for values, seeds in settings.items():
        finished = [flat[cell] for cell in seeds if flat[cell]]
        count = f"{len(finished)} of {len(seeds)}" if len(finished) < len(seeds) else str(len(seeds))
        shown = [_show_all([values_of[name] for values_of in finished if name in values_of]) for name in wanted]
        rows.append([*(value for _, value in values), *([count] if has_seeds else []), *shown])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    text = "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
    return f"{text}\n\n{OVER_SEEDS}" if has_seeds else text


def _show_all(values: Sequence[Any]) -> str:
    """A value per finished seed, as one cell."""
    if not all(isinstance(value, int | float) for value in values) or len(set(values)) < 2:
        return " / ".join(dict.fromkeys(map(_show, values))) or "-"
    import numpy as np

    from rlhf.report.settings import over_seeds

    mean, low, high = (_show(float(each[0])) for each in over_seeds(np.array(values, dtype=float)[:, None]))
    return f"{mean} ({low} to {high})"


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --output DIR --grid KEY=V,V ... [flags] --config FILE ... [section.key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs, their logs and table.md")
    parser.add_argument("--grid", action="append", required=True, metavar="KEY=V,V", help="an axis; repeat it")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each with its own Ray (default: 1)")
    parser.add_argument(
        "--column",
        action="append",
        help="of summary.json, such as seconds.update or tokens.*, or of the last step's metrics, such as "
        "policy/kl_k3; repeat it",
    )
    parser.add_argument("--module", default="rlhf.grpo", help="the program (default: rlhf.grpo)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    parser.add_argument("--table", action="store_true", help="print the table of the finished cells and stop")
    parser.add_argument("--config", action="append", metavar="FILE", help="goes to the program, as do the overrides")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args(argv)
    options.program = [argument for file in options.config or [] for argument in ("--config", file)] + options.overrides
    if options.jobs < 1:
        parser.error(f"--jobs={options.jobs}: at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        grid = cells([parse_axis(text) for text in options.grid], options.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return launcher.USER_ERROR
    if options.dry_run:
        for cell in grid:
            print(shlex.join(command(cell, options.module, options.program)))
        return 0
    failed: list[Cell] = []
    if not options.table:
        launcher.end_on_signals()
        options.output.mkdir(parents=True, exist_ok=True)
        failed = run_cells(grid, options)
        if launcher.interrupts:
            return launcher.interrupts[0]
    text = table(grid, options.column or DEFAULT_COLUMNS)
    print(text)
    if not options.table:
        (options.output / "table.md").write_text(text + "\n")
    if failed:
        print(f"{len(failed)} of {len(grid)} runs failed; the same command tries them again.", file=sys.stderr)
    return launcher.RUN_ERROR if failed else 0


if __name__ == "__main__":
    sys.exit(main())
