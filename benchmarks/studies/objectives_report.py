"""Tables and picture of the study of objectives, from one line per run.

A table for each task and learning rate. *Minus its control* is the mean of the differences of pairs that share seed and
commit, and half of its 95% interval by Student's t; of twenty such intervals one misses the true mean by chance. A run
that another commit repeats bit for bit, as on the same kind of machine, counts once in the mean of its setting.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.studies import report
from benchmarks.studies.objectives_runs import SETTINGS, SITUATIONS, Run

Line = dict[str, Any]
COLUMNS = (
    "task", "rate", "setting", "seed", "held-out", "by digits", "touched", "most touched", "engine KL", "entropy",
    "seconds", "date", "commit",
)  # fmt: skip
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # by freedom
COLOURS = {True: "tab:green", False: "tab:red"}  # of an interval that is above 0, or below


def line_of(record: dict[str, Any]) -> Line:
    """A run in one line: accuracies at each quarter, and by digits at the end; means over its steps."""
    steps = record["steps"]
    evaluated = [step for step in steps if "held-out" in step]
    metric = SETTINGS[record["setting"]].touches
    touched = [step[metric] for step in steps if metric in step]
    return {key: record[key] for key in ("task", "rate", "setting", "seed", "seconds", "date", "commit")} | {
        "held-out": [round(step["held-out"], 4) for step in evaluated],
        "by digits": {count: round(value, 4) for count, value in evaluated[-1]["by digits"].items()},
        "touched": report.mean(touched) if touched else None,
        "most touched": max(touched, default=None),
        "engine KL": report.mean(step["policy/engine_kl"] for step in steps if "policy/engine_kl" in step),
        "entropy": next(step["policy/entropy"] for step in reversed(steps) if "policy/entropy" in step),
    }


def known_lines(path: Path) -> list[Line]:
    """The runs in the JSON of a picture."""
    runs = json.loads(path.read_text())["runs"]
    return [dict(zip(runs["columns"], row, strict=True)) for row in runs["rows"]]


def short(rate: float) -> str:
    """Such as 5e-4: a name of a file with a point would lose what follows it."""
    return f"{rate:.0e}".replace("e-0", "e-")


def run_of(line: Line) -> Run:
    return Run(line["setting"], line["task"], line["rate"], line["seed"])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of its 95% interval by Student's t; NaN of a single pair."""
    if len(differences) < 2:
        return differences[0], math.nan
    half = T95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), half


def pairs(lines: Sequence[Line], setting: str, measure: str = "") -> list[float]:
    """The setting minus its control, by commit and seed: held-out accuracy at the end, or that of so many digits."""
    control = SETTINGS[setting].control
    of = {(line["setting"], line["commit"], line["seed"]): accuracy(line, measure) for line in lines}
    shared = [pair for name, *pair in of if name == setting and (control, *pair) in of]
    return [of[setting, *pair] - of[control, *pair] for pair in shared]


def distinct(lines: Iterable[Line]) -> list[Line]:
    """The runs of one setting in the order of their making, without those that repeat another."""
    made = sorted(lines, key=itemgetter("date", "commit", "seed"))
    return list({(line["seed"], line["engine KL"], *line["held-out"]): line for line in made}.values())


def accuracy(line: Line, digits: str = "") -> float:
    return float(line["by digits"][digits] if digits else line["held-out"][-1])


def table(lines: Sequence[Line]) -> list[report.Row]:
    """A row for each setting of one task and rate; with the hardest problems where the task has several kinds."""
    hardest = max(lines[0]["by digits"]) if len(lines[0]["by digits"]) > 1 else ""
    rows = []
    for name, setting in SETTINGS.items():
        if not (own := distinct(line for line in lines if line["setting"] == name)):
            continue
        row = {
            "setting": setting.label,
            "held-out, by seed": ", ".join(f"{accuracy(line):.2f}" for line in own),
            "mean": f"{report.mean(map(accuracy, own)):.3f}",
            "control": SETTINGS[setting.control].label if name != "control" else "",
            "minus its control": signed(pairs(lines, name)) if name != "control" else "",
        }
        if hardest:
            row[f"the same, {hardest} digits"] = signed(pairs(lines, name, hardest)) if name != "control" else ""
        touched, most = ([line[key] for line in own if line[key] is not None] for key in ("touched", "most touched"))
        row |= {
            "tokens touched": f"{report.mean(touched):.1%}" if touched else "",
            "in the worst step": f"{max(most):.0%}" if most else "",
        }
        rows.append(row)
    return rows


def signed(differences: Sequence[float]) -> str:
    """`+0.12 ± 0.05`; empty without a pair."""
    if not differences:
        return ""
    mean, half = interval(differences)
    return f"{mean:+.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


def draw(by_situation: dict[str, list[Line]], path: Path, results: report.Row) -> None:
    """A panel for each task and rate: each setting's differences by seed, their mean and its interval."""
    names = [name for name in SETTINGS if name != "control"]
    panels = len(by_situation)
    drawn, axes = report.figure(1, panels, width=3.4 + 2 * panels, height=4.6, sharex=True, sharey=True)
    for panel, (title, lines) in zip(axes[0], by_situation.items(), strict=True):
        for at, name in enumerate(names):
            if differences := pairs(lines, name):
                mean, half = interval(differences)
                colour = COLOURS[mean > 0] if abs(mean) > half else "0.4"
                panel.errorbar(mean, at, xerr=0 if math.isnan(half) else half, fmt="o", ms=4, lw=1.2, color=colour)
                panel.plot(differences, [at] * len(differences), ".", ms=3, color=colour, alpha=0.5)
        panel.axvline(0, color="0.6", lw=1, ls=":")
        control = report.mean(map(accuracy, distinct(line for line in lines if line["setting"] == "control")))
        panel.set(title=f"{title}\ncontrol {control:.2f}", xlabel="held-out accuracy\nminus that of the control")
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].invert_yaxis()
    report.save(drawn, path, results)


def write(lines: Sequence[Line], output: Path, *, steps: int) -> None:
    """All tables, the picture and its JSON, which keeps the runs of other situations too.

    Raises:
        ValueError: there is no run of a control yet.
    """
    by_situation = {}
    for task, rate in SITUATIONS:
        own = [line for line in lines if (line["task"], line["rate"]) == (task, rate)]
        if any(line["setting"] == "control" for line in own):
            by_situation[f"{task}, {short(rate)}"] = own
    if not by_situation:
        raise ValueError(f"{output}: there is no run of a control yet. Take --workers 1 or more.")
    tables = {title.replace(", ", "-"): table(own) for title, own in by_situation.items()}
    for name, rows in tables.items():
        report.write_table(output / f"objectives-{name}", rows)
        print(f"{name}\n\n{report.markdown(rows)}")
    seeds = sorted({line["seed"] for line in lines})
    rows = {"columns": COLUMNS, "rows": [[line[key] for key in COLUMNS] for line in lines]}
    command = "python -m benchmarks.studies.objectives"
    results = report.results(command, lines, steps=steps, seeds=seeds, tables=tables, runs=rows)
    draw(by_situation, output / "objectives.png", results)
