"""Tables and picture of the study of slow groups.

What is trained, and in what time, is that of the middle steps (*groups discarded*: of all up to their end): the first
ones wait for nothing yet, and at the end of a run, where nothing is dispatched, also `drop` has to take what is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import outcomes, report, runs

Record = dict[str, Any]
COLOURS = {"wait": "C0", "drop": "C3"}
PICTURED = (0.25, 6.0)  # share of hard prompts, slowness


Kind = tuple[float, float, int, str]  # share of hard prompts, slowness, lag, rule


def kinds(records: Sequence[Record]) -> dict[Kind, list[Record]]:
    """The records of each kind; the largest share first, then in order."""
    found: dict[Kind, list[Record]] = {}
    for r in sorted(
        records, key=lambda r: (-r["hard_share"], r["slowness"], r["lag"], r["on_stale"] == "drop", r["seed"])
    ):
        found.setdefault((r["hard_share"], r["slowness"], r["lag"], r["on_stale"]), []).append(r)
    return found


def columns_of(hard_share: float, slowness: float, lag: int, rule: str) -> report.Row:
    return {
        "hard, of what is drawn": f"{hard_share:g}",
        "a hard group takes": f"{slowness:g}",
        "lag": lag,
        "`on_stale`": rule if lag else "either",
    }


def middle(record: Record) -> slice:
    """Steps 11 to 35 of 40."""
    count = len(record["steps"])
    return slice(count // 4, count - count // 8)


def time_per_step(record: Record) -> float:
    ended, steps = [step["ended"] for step in record["steps"]], middle(record)
    return float((ended[steps.stop - 1] - ended[steps.start - 1]) / (steps.stop - steps.start))


def data_table(records: Sequence[Record]) -> list[report.Row]:
    """What is trained, and how long that takes: median and range of the seeds."""
    rows = []
    for kind, chosen in kinds(records).items():
        means = {
            key: [report.mean(step[key] for step in r["steps"][middle(r)]) for r in chosen]
            for key in ("trained hard", "age")
        }
        rows.append(
            columns_of(*kind)
            | {
                "seeds": len(chosen),
                "hard, of what is trained": outcomes.spread(means["trained hard"]),
                "groups discarded": outcomes.spread([r["steps"][middle(r)][-1]["discarded"] for r in chosen]),
                "mean age, steps": outcomes.spread(means["age"]),
                "time per step": outcomes.spread([time_per_step(r) for r in chosen]),
            }
        )
    return rows


def accuracy_table(records: Sequence[Record]) -> list[report.Row]:
    """What is learned after all steps, and after the time that the faster rule takes to the end of the middle ones."""

    def about(record: Record, rule: str) -> tuple[Any, ...]:
        return record["hard_share"], record["slowness"], record["lag"], record["seed"], rule

    ended = {about(r, r["on_stale"]): r["steps"][middle(r)][-1]["ended"] for r in records}

    def first_end(record: Record) -> float:
        return min(ended[key] for rule in COLOURS if (key := about(record, rule)) in ended)

    rows = []
    for kind, chosen in kinds(records).items():
        rows.append(
            columns_of(*kind)
            | {
                "seeds": len(chosen),
                "easy": outcomes.spread([evaluated(r, "easy")[-1] for r in chosen]),
                "hard": outcomes.spread([evaluated(r, "hard")[-1] for r in chosen]),
                "hard, after equal time": outcomes.spread(
                    [np.interp(first_end(r), evaluated(r, "ended"), evaluated(r, "hard")) for r in chosen]
                ),
            }
        )
    return rows


def evaluated(record: Record, key: str) -> list[float]:
    """The numbers of the steps after which accuracy was measured."""
    return [step[key] for step in record["steps"] if "held-out" in step]


def draw(records: Sequence[Record], path: Path, results: report.Row) -> None:
    """Columns: the lags. Rows: accuracy by step, that of hard problems by time, and what is trained."""
    share, slowness = PICTURED if any((r["hard_share"], r["slowness"]) == PICTURED for r in records) else (0.5, 3)
    of_kind = {kind[2:]: chosen for kind, chosen in kinds(records).items() if kind[:2] == (share, slowness)}
    lags = sorted({lag for lag, _ in of_kind if lag})
    drawn, axes = report.figure(3, len(lags), width=9.5, height=7, sharey="row")
    for (above, between, below), lag in zip(axes.T, lags, strict=True):
        for rule, colour in COLOURS.items():
            chosen = of_kind.get((lag, rule), [])
            if not chosen:
                continue
            at = evaluated(chosen[0], "step")
            runs.band(above, [evaluated(r, "hard") for r in chosen], at, color=colour, label=f"{rule}, hard")
            style: dict[str, Any] = {"color": colour, "ls": "--", "lw": 1}
            runs.band(above, [evaluated(r, "easy") for r in chosen], at, label=f"{rule}, easy", **style)
            times = np.mean([evaluated(r, "ended") for r in chosen], 0)
            runs.band(between, [evaluated(r, "hard") for r in chosen], times, color=colour, label=rule)
            shares = [smooth([step["trained hard"] for step in r["steps"]]) for r in chosen]
            runs.band(below, shares, range(1, len(shares[0]) + 1), color=colour, label=rule)
        above.set_title(f"max_policy_lag {lag}")
        above.set_xlabel("training step")
        between.set_xlabel("time, in training steps without any wait")
        below.set_xlabel("training step")
        below.axhline(share, color="0.6", lw=1, ls=":")
    labels = ("held-out accuracy", "held-out accuracy, hard", "hard, of what is trained")
    for row, label, empty in zip(axes, labels, ("center", "upper left", "center"), strict=True):
        row[0].set_ylabel(label)
        row[-1].legend(loc=empty, fontsize=7)
    report.save(drawn, path, results)


def smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """The mean of each value and those up to `over` - 1 before it."""
    return [report.mean(values[max(0, i + 1 - over) : i + 1]) for i in range(len(values))]


def write(played: Sequence[Record], records: Sequence[Record], folder: Path) -> None:
    """Tables and picture below `folder`; ValueError if there are no runs."""
    if not records:
        raise ValueError(f"{folder}: there are no runs yet. Take --workers 1 or more.")
    tables = {"data": data_table(played), "accuracy": accuracy_table(records)}
    for name, rows in tables.items():
        report.write_table(folder / f"waiting-{name}", rows)
        print(report.markdown(rows))
    command = "python -m benchmarks.studies.waiting"
    results = report.results(command, records, tables=tables, runs=outcomes.by_run(records))
    draw(records, folder / "waiting.png", results)
