"""Tables of the study of slow groups.

What is trained, and in what time, is that of the middle steps (*groups discarded*: of all up to their end): the first
ones wait for nothing yet, and at the end of a run, where nothing is dispatched, also `drop` has to take what is slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import outcomes, report

Record = dict[str, Any]
RULES = ("wait", "drop")


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


def played_line(record: Record) -> report.Row:
    """What a run trains, and how long that takes."""
    steps = record["steps"][middle(record)]
    return {key: record[key] for key in ("hard_share", "slowness", "lag", "on_stale", "seed")} | {
        "hard, of what is trained": report.mean(step["trained hard"] for step in steps),
        "groups discarded": steps[-1]["discarded"],
        "mean age, steps": report.mean(step["age"] for step in steps),
        "time per step": time_per_step(record),
    }


def data_table(lines: Sequence[report.Row]) -> list[report.Row]:
    """The median and range of the seeds."""
    measured = ("hard, of what is trained", "groups discarded", "mean age, steps", "time per step")
    return [
        columns_of(*kind)
        | {"seeds": len(chosen)}
        | {name: outcomes.spread([line[name] for line in chosen]) for name in measured}
        for kind, chosen in kinds(lines).items()
    ]


def accuracy_table(records: Sequence[Record]) -> list[report.Row]:
    """What is learned after all steps, and after the time that the faster rule takes to the end of the middle ones."""

    def about(record: Record, rule: str) -> tuple[Any, ...]:
        return record["hard_share"], record["slowness"], record["lag"], record["seed"], rule

    ended = {about(r, r["on_stale"]): r["steps"][middle(r)][-1]["ended"] for r in records}

    def first_end(record: Record) -> float:
        return min(ended[key] for rule in RULES if (key := about(record, rule)) in ended)

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


def write(played: Sequence[Record], records: Sequence[Record], folder: Path) -> None:
    """Tables below `folder`, and their JSON; ValueError if there are no runs."""
    if not records:
        raise ValueError(f"{folder}: there are no runs yet. Take --workers 1 or more.")
    lines = [played_line(record) for record in played]
    tables = {"data": data_table(lines), "accuracy": accuracy_table(records)}
    for name, rows in tables.items():
        report.write_table(folder / f"waiting-{name}", rows)
        print(report.markdown(rows))
    command = "python -m benchmarks.studies.waiting"
    results = report.results(command, records, tables=tables, played=lines, runs=outcomes.by_run(records))
    report.save_results(results, folder / "waiting.json")
