"""The page: data of the runs, a plotting library and a program in JavaScript, all in one HTML file.

Responses are untrusted text. The file holds them as compressed base64, the program shows them as text only, and the
page's policy forbids it to load anything.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from rlhf.config.printing import as_utf8
from rlhf.log.diagnosis import diagnose_run, outside_at_the_end, range_of
from rlhf.log.panels import SECTIONS, Panel, matching
from rlhf.log.sinks import BOUNDS, Row, on_training_data
from rlhf.report.run_files import (
    RunFiles,
    conversation,
    differing_keys,
    response_blocks,
    sample_groups,
    states_no_answer,
)

ROLLOUT_BYTES = 96 * 2**20  # of rollout files that a page holds; 100,000 rollouts of the quickstart are 35 MB
MAX_POINTS = 2000  # of one curve
TEXT_KEYS = ("prompt_id", "prompt", "answer", "text", "extracted", "status", "finish_reason")
TOKEN_KEYS = ("tokens", "token_advantages", "token_differences")


def write_page(runs: Sequence[RunFiles]) -> str:
    """The HTML of a report of these runs."""
    from plotly.offline import get_plotlyjs

    parts = files("rlhf.report")
    notes = [on_training_data(run.rows) for run in runs]
    names = ", ".join(name + note for name, note in zip(_names(runs), notes, strict=True))
    page = (parts / "page.html").read_text()
    for slot, text in {
        "title": html.escape(names),
        "note": html.escape("".join(f": {name}{note}" for name, note in zip(_names(runs), notes, strict=True) if note)),
        "style": (parts / "page.css").read_text(),
        "program": (parts / "page.js").read_text(),
        "metrics": _packed(json.dumps(_metrics(runs))),
        "rollouts": _packed(json.dumps(_rollouts(runs), ensure_ascii=False)),
        "plotly": _packed(get_plotlyjs()),
    }.items():
        page = page.replace(f"<!--{slot}-->", text, 1)
    return page


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(as_utf8(text).encode(), compresslevel=6, mtime=0)).decode()


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the folders; their paths if two names are equal."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(runs) else [str(run.path) for run in runs]


def _metrics(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Everything that the page shows except rollouts."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    sections: list[dict[str, Any]] = [
        {"title": title, "panels": [shown for panel in panels for shown in _panels(panel, metrics, len(runs))]}
        for title, panels in SECTIONS.items()
    ]
    named = {name for section in sections for panel in section["panels"] for name in panel["metrics"]}
    others = [name for name in metrics if name not in named and not name.endswith(BOUNDS)]
    rest = [shown for name in others for shown in _panels(Panel(name, (name,)), [name], 1)]
    sections.append({"title": "Everything else", "panels": rest})
    configs = [run.config for run in runs]
    return {
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "runs": [_run(run, name) for run, name in zip(runs, _names(runs), strict=True)],
        "sections": [section for section in sections if section["panels"]],
        "keys": list(dict.fromkeys(key for config in configs for key in config)),
        "differing": differing_keys(configs),
    }


def _panels(panel: Panel, metrics: Sequence[str], runs: int) -> list[dict[str, Any]]:
    """The charts of a panel: one, or one per metric where several runs would have more than two lines each."""
    names = matching(panel, metrics)
    charts = [[name] for name in names] if runs > 1 and len(names) > 2 else [names] if names else []
    return [
        {"title": panel.title, "metrics": chart, "unit": panel.unit, "log": panel.log, "healthy": _healthy(chart)}
        for chart in charts
    ]


def _healthy(metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The bounds of the healthy range of those metrics that have one, and the range in words."""
    ranges = {metric: range_of(metric) for metric in metrics}
    return {metric: {**found._asdict(), "words": str(found)} for metric, found in ranges.items() if found}


def _run(run: RunFiles, name: str) -> dict[str, Any]:
    every = -(-len(run.rows) // MAX_POINTS)
    evaluated = {id(row) for row in run.rows if any(key.startswith("eval/") for key in row)}
    rows = [row for number, row in enumerate(run.rows) if number % every == 0 or id(row) in evaluated]
    planned = run.planned_learning_rates()
    return {
        "name": name,
        "path": str(run.path),
        "program": run.program_config.program if run.program_config else "another version",
        "finished": run.finished,
        "config": run.config,
        "every": every,
        "steps": [row["step"] for row in rows],
        "times": [row.get("time") for row in rows],
        "series": {metric: [_number(row.get(metric)) for row in rows] for metric in run.metrics},
        "planned_lr": [planned.get(row["step"]) for row in rows] if planned else [],
        "seconds": _seconds(run),
        "findings": [vars(finding) for finding in diagnose_run(run.rows, run.config)],
        "outside": [each._asdict() | {"value": _number(each.value)} for each in outside_at_the_end(run.rows)],
    }


def _number(value: Any) -> float | None:
    """Six digits are more than a curve shows."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds(run: RunFiles) -> dict[str, float]:
    """Seconds by phase of the steps, with what came before and between them."""
    totals: dict[str, float] = defaultdict(float)
    for row in run.rows:
        for name, value in row.items():
            if name.startswith("time/") and name not in ("time/step", "time/engine_idle", "time/learner_idle"):
                totals[name.removeprefix("time/")] += value
    return {phase: round(seconds, 1) for phase, seconds in totals.items()}


def _rollouts(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """The rollouts in columns; a text that several rows have is stored once, in `texts`."""
    texts: dict[str, int] = {}
    columns: dict[str, list[Any]] = defaultdict(list)
    samples = [sample_groups(run, ROLLOUT_BYTES // len(runs)) for run in runs]
    groups = [(number, group) for number, (of_run, _) in enumerate(samples) for group in of_run]
    for count, (number, group) in enumerate(groups):
        for row in group:
            _add_row(columns, row, texts, run=number, group=count)
    return {"columns": columns, "texts": list(texts), "shares": [round(share, 4) for _, share in samples]}


def _add_row(columns: dict[str, list[Any]], row: Row, texts: dict[str, int], *, run: int, group: int) -> None:
    def text(value: Any) -> int:
        return texts.setdefault(value if isinstance(value, str) else json.dumps(value), len(texts))

    blocks = response_blocks(row)
    is_plain = blocks in ([], [("text", row["text"])])
    if not (row.get("turns") or is_plain):
        row = {**row, "text": blocks[-1][1]}  # without its thought, which may be long and is stored once
    cells: dict[str, Any] = {"run": run, "group": group}
    cells |= {key: row[key] for key in ("step", "sample", "response_tokens")}
    cells |= {key: _number(row[key]) for key in ("reward", "advantage")}
    cells |= {key: text(row[key]) for key in TEXT_KEYS}
    cells |= {"conversation": text(conversation(row)), "no_answer": states_no_answer(row)}
    cells["parts"] = text(json.dumps(row["reward_parts"]))
    cells["blocks"] = None if is_plain else [(kind, text(block)) for kind, block in blocks]
    cells["version"] = min((span[2] for span in row["versions"]), default=None)
    cells["tokens"] = {key: row[key] for key in TOKEN_KEYS if key in row} or 0
    for key, value in cells.items():
        columns[key].append(value)
