"""Shared by all studies: the quickstart's data, tables as Markdown and CSV, and small pictures with their numbers.

    python -m benchmarks.studies.report        # after numbers, and the picture of them, were copied to docs/studies

writes the tables of the pages in docs/ that stand below a line `<!-- studies/NAME.json: TABLE -->` anew.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DATA = Path("runs/quickstart-data")  # where `make quickstart` puts its model and data
# Keys that configs/quickstart.yaml has otherwise: the studies were recorded with these.
RECORDED_WITH = ("learner.optimizer.lr=5.0e-4",)
COLOURS = 64  # of a picture: lines, their edges, and greys
DIGITS = 6  # of a number in the JSON of a picture
DIGEST = "results"  # key of the digest in a PNG


def parser(
    module: str, description: str, *, trains: bool, scans: bool = False, seeds: Sequence[int] = (0, 1, 2)
) -> argparse.ArgumentParser:
    """The arguments of every study: where its picture and table go and, if it draws anything, from what and how often.

    `--quick` only shows that the study runs; its output is a folder of its own, so that no full study takes it up.
    """
    arguments_parser = argparse.ArgumentParser(prog=f"python -m benchmarks.studies.{module}", description=description)
    arguments_parser.add_argument(
        "--output", type=Path, default=Path("runs/studies") / module, help="folder of picture and table"
    )
    arguments_parser.add_argument("--quick", action="store_true", help="minutes, in place of the numbers of the docs")
    if trains:
        arguments_parser.add_argument(
            "--data", type=Path, default=DATA, help="the quickstart's model and data; made if not there"
        )
        arguments_parser.add_argument(
            "--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=list(seeds), help="0,1,2"
        )
    if scans:
        workers = len(os.sched_getaffinity(0))
        arguments_parser.add_argument("--workers", type=int, default=workers, help="processes; 0: only what is there")
    return arguments_parser


def parse(arguments_parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ends the program at once if matplotlib is missing, not after minutes of work."""
    options = arguments_parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        arguments_parser.error("matplotlib is not installed. Run `make setup-bench` first.")
    if options.quick:
        options.output /= "quick"
    return options


def ensure_data(folder: Path, maker: str = "rlhf.quickstart") -> Path:
    """The folder; model and data, the quickstart's or another task's, are made first if it is empty."""
    if not (folder / "test.jsonl").is_file():
        print(f"making {folder} first ({maker})", flush=True)
        subprocess.run([sys.executable, "-m", maker, "--output", str(folder)], check=True)
    return folder


def number(value: Any) -> str:
    """Three significant digits; text stays."""
    if isinstance(value, float):
        return f"{value:.3g}" if value == 0 or 1e-4 <= abs(value) < 1e4 else f"{value:.2e}"
    return str(value)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table; the keys of the first row are the columns."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([number(row[name]) for name in columns] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """`path` with .md for people and with .csv, unrounded, for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".md").write_text(markdown(rows))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    """The file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def figure(rows: int, columns: int, *, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A grid of axes, [rows][columns] always, in one plain style."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 8, "axes.titlesize": 8.5, "axes.grid": True, "grid.alpha": 0.3, "legend.frameon": False,
            "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110,
        }
    )  # fmt: skip
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def save(drawn: Any, path: Path, results: Row) -> None:
    """Write a figure as a PNG, and beside it what it was drawn from, as `results` gives it, as JSON."""
    save_picture(drawn, path, [save_results(results, path.with_suffix(".json"))])


def save_results(results: Row, path: Path) -> Path:
    """Write the JSON of a study."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(results), separators=(",", ":")) + "\n")
    return path


def save_picture(drawn: Any, path: Path, numbers: Sequence[Path]) -> None:
    """Write a figure as a PNG of few colours, small enough for the documentation, and print its path.

    The picture holds the digest of the files `numbers`, from which it was drawn.
    """
    from PIL import Image, PngImagePlugin

    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE)  # keeps the colours of small dots
    about = PngImagePlugin.PngInfo()
    about.add_text(DIGEST, digest(numbers))
    small.save(path, optimize=True, pnginfo=about)
    print(f"wrote {path}", flush=True)


def digest(numbers: Sequence[Path]) -> str:
    """SHA-256 of these files, one after the other."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in numbers)).hexdigest()


def rounded(value: Any) -> Any:
    """Floats anywhere in a JSON value with DIGITS significant digits; what is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def stamp() -> Row:
    """When a run was made and with which code: the short id of the commit, with -dirty if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {"date": f"{datetime.date.today():%Y-%m-%d}", "commit": commit}


def results(command: str, records: Iterable[Row], **parts: Any) -> Row:
    """What a picture was drawn from: the last date and all commits of the runs `records`, tables and whatever else."""
    dates, commits = zip(*((record["date"], record["commit"]) for record in records), strict=True)
    return {"command": command, "date": max(dates), "commit": ", ".join(sorted(set(commits))), **parts}


def mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def tables_of_docs(docs: Path) -> dict[Path, str]:
    """Page -> its text, with every marked table as it is in the numbers of its picture."""

    def table(match: re.Match[str]) -> str:
        results = json.loads((docs / match["file"]).read_text())
        return f"{match['mark']}\n{markdown(results['tables'][match['table']])}"

    marked = re.compile(r"(?P<mark><!-- (?P<file>studies/\w+\.json): (?P<table>\S+) -->)\n(\|.*\n)*")
    return {page: marked.sub(table, page.read_text()) for page in sorted(docs.rglob("*.md"))}


if __name__ == "__main__":
    for page, text in tables_of_docs(Path("docs")).items():
        page.write_text(text)
