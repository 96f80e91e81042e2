"""The metrics that docs/metrics.md describes, to hold against those that a run logs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs/metrics.md"


def documented() -> dict[str, str]:
    """By name, with placeholders such as <part>, when the metric is logged; "" for every training step."""
    metrics = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `"):
            metrics |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[1]), cells[-2].replace("`", ""))
    return metrics


def matches(name: str, metric: str) -> bool:
    pattern = re.sub(r"<[^>]+>", "[^/]+", metric.replace("@", "\\@"))
    return re.fullmatch(pattern, name) is not None


def check_documented(rows: Iterable[dict[str, Any]], *, logged: Collection[str]) -> None:
    """Every metric of a run is on the page, and every one that the page says such a run logs is in the run.

    Args:
        logged: what the run has, of the column *logged*.
    """
    names = {name for row in rows for name in row} - {"step", "time"}
    metrics = documented()
    unknown = [name for name in names if not any(matches(name, metric) for metric in metrics)]
    assert unknown == [], f"not in {PAGE.name}: {unknown}"
    expected = [metric for metric, when in metrics.items() if when in logged]
    missing = [metric for metric in expected if not any(matches(name, metric) for name in names)]
    assert missing == [], f"{PAGE.name} says that such a run logs {missing}"


# --- docs/first_run.md ---

FIRST_RUN = PAGE.parent / "first_run.md"


def transcript() -> dict[str, list[str]]:
    """The commands of the page and the lines that it shows below each."""
    shown: dict[str, list[str]] = {}
    for block in re.findall(r"```console\n(.*?)```", FIRST_RUN.read_text(), flags=re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                lines = shown.setdefault(line.removeprefix("$ "), [])
            else:
                lines.append(line)
    return shown


def check_shown(command: str, printed: str, **names: str) -> None:
    """Every line that the page shows below a command has the shape of a line that a program printed.

    Args:
        names: what the page calls the paths of the test, for example run="runs/first".
    """
    for page, path in names.items():
        printed = printed.replace(path, page.replace("__", "/"))
    shapes = {shape(line) for line in printed.splitlines()}
    other = [line for line in transcript()[command] if line != "..." and shape(line) not in shapes]
    assert other == [], f"{FIRST_RUN.name} shows other lines than {sorted(shapes)}"


def shape(line: str) -> str:
    """A line without its numbers, durations, spaces and borders; of a step or evaluation, with the first columns."""
    line = re.sub(r"-?\d[\d.,]*", "#", line)
    line = re.sub(r"# (s|min|h|d)\b", "# s", line)
    line = re.sub(r"[─━]+", "─", " ".join(line.split()))
    return re.sub(r"^(step .*? tok/s #|eval at step # \w+ avg@#).*", r"\1", line)
