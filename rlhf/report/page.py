"""Writes the page: data of the runs, a plotting library and a JavaScript program, all in one HTML file.

Responses are untrusted text. The file holds them as compressed base64, the program shows them as text only, and the
page's security policy forbids loading anything.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from rlhf.config.load import flat_keys
from rlhf.config.printing import as_utf8
from rlhf.log.diagnosis import diagnose_run, healthy_range, outside_at_the_end
from rlhf.log.panels import METRIC, SECTIONS, Panel, matching, metric_titles
from rlhf.log.sinks import BOUNDS, Row, training_data_note
from rlhf.report.run_files import RunFiles, conversation, response_blocks, sample_groups, states_no_answer
from rlhf.report.settings import RUN_KEYS, differing_keys, over_seeds, settings_of

ROLLOUT_BYTES = 96 * 2**20  # most bytes of rollout files in a page; 100,000 rollouts of the quickstart are 35 MB
MAX_POINTS, MAX_POINTS_WITH_BAND = 2000, 500  # per curve; drawing a band is slow
TEXT_KEYS = ("prompt_id", "prompt", "answer", "text", "extracted", "status", "finish_reason")
# The page of a file loads nothing: all that it shows is in it.
EMBEDDED = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
MADE_TEXTS = ("conversation", "parts")  # further columns of texts
TOKEN_KEYS = ("tokens", "token_advantages", "token_differences")


def write_page(runs: Sequence[RunFiles]) -> str:
    """The HTML of a report of these runs."""
    notes = [training_data_note(run.rows) for run in runs]
    names = ", ".join(name + note for name, note in zip(run_names(runs), notes, strict=True))
    marked = [f": {name}{note}" for name, note in zip(run_names(runs), notes, strict=True) if note]
    samples = [sample_groups(run, ROLLOUT_BYTES // len(runs)) for run in runs]
    rollouts = page_rollouts((number, group) for number, (groups, _) in enumerate(samples) for group in groups)
    data = {
        "metrics": json.dumps(page_metrics(runs)),
        "rollouts": json.dumps(rollouts | {"every": [every for _, every in samples]}, ensure_ascii=False),
    }
    packed = {name: compressed(text) for name, text in data.items()} | {"plotly": compressed_plotly()}
    slots = {name: base64.b64encode(content).decode() for name, content in packed.items()}
    return fill_page(EMBEDDED, names, **slots, note=html.escape("".join(marked)))


def fill_page(policy: str, title: str, **slots: str) -> str:
    """The page with this security policy and title (text), and HTML in further slots; the others stay empty."""
    parts = files("rlhf.report")
    page = (parts / "page.html").read_text()
    fixed = {"title": html.escape(title), "style": (parts / "page.css").read_text(), "program": page_program()}
    for slot, text in {"policy": policy, **fixed, **slots}.items():
        page = page.replace(f"<!--{slot}-->", text, 1)
    return page


def page_program() -> str:
    """The JavaScript of the page."""
    return (files("rlhf.report") / "page.js").read_text()


def compressed(text: str, *, level: int = 6) -> bytes:
    return gzip.compress(as_utf8(text).encode(), compresslevel=level, mtime=0)


@cache
def compressed_plotly() -> bytes:
    """The plotting library, which makes most of a page."""
    from plotly.offline import get_plotlyjs

    return compressed(get_plotlyjs())


def run_names(runs: Sequence[RunFiles]) -> list[str]:
    """The names of the run folders, or their paths if two names are equal."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(runs) else [str(run.path) for run in runs]


def page_metrics(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """All data of the page except rollouts."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    settings, names = settings_of(runs), run_names(runs)
    sections: list[dict[str, Any]] = [
        {
            "title": title,
            "panels": [shown for panel in panels for shown in _panels(panel, metrics, runs, settings=len(settings))],
        }
        for title, panels in SECTIONS.items()
    ]
    named = {name for section in sections for panel in section["panels"] for name in panel["metrics"]}
    others = [name for name in metrics if name not in named and not name.endswith(BOUNDS)]
    rest = [shown for name in others for shown in _panels(Panel(name, (name,)), [name], runs, settings=1)]
    sections.append({"title": "Everything else", "panels": rest})
    configs = [run.config for run in runs]
    differing = differing_keys(configs)
    changed = dict.fromkeys(key for run in runs for key in flat_keys(run.changed))
    return {
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "settings": [_setting([runs[number] for number in numbers], names, numbers) for numbers in settings],
        "runs": [_run(run, name) for run, name in zip(runs, names, strict=True)],
        "sections": [section for section in sections if section["panels"]],
        "keys": list(dict.fromkeys(key for config in configs for key in config)),
        "differing": differing,
        "changed": [key for key in changed if key not in differing and not (runs[1:] and RUN_KEYS.fullmatch(key))],
    }


def _panels(panel: Panel, metrics: Sequence[str], runs: Sequence[RunFiles], *, settings: int) -> list[dict[str, Any]]:
    """The charts of a panel: one, or one per metric if several settings would have more than two lines each."""
    by_title: dict[str, list[str]] = defaultdict(list)
    for name in matching(panel, metrics):
        by_title[_metric_title(name, runs) if panel.title == METRIC else panel.title].append(name)
    charts = [
        (title, chart)
        for title, names in by_title.items()
        for chart in ([[name] for name in names] if settings > 1 and len(names) > 2 else [names])
    ]
    return [
        {"title": title, "metrics": chart, "unit": panel.unit, "log": panel.log, "healthy": _healthy(chart)}
        for title, chart in charts
    ]


def _metric_title(name: str, runs: Sequence[RunFiles]) -> str:
    """The title of eval/<data set>/avg@<k>: accuracy, or the name of the metric; several if the runs differ."""
    source = name.split("/")[1]
    by_run = [metric_titles(run.program_config.metrics, run.rows) for run in runs if run.program_config]
    titles = dict.fromkeys(titles[source] for titles in by_run if source in titles)
    return " / ".join(titles).replace("accuracy (", "Accuracy (") or METRIC


def _healthy(metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The healthy ranges of the metrics that have one: bounds, and the range in words."""
    ranges = {metric: healthy_range(metric) for metric in metrics}
    return {metric: {**healthy._asdict(), "words": str(healthy)} for metric, healthy in ranges.items() if healthy}


def _setting(runs: Sequence[RunFiles], names: Sequence[str], numbers: Sequence[int]) -> dict[str, Any]:
    """A line of every chart: a run, or the mean of several runs, with the bounds of its interval in `bands`.

    `names` has the names of all runs of the page, and `numbers` the indices of `runs` among them.
    """
    several = len(runs) > 1
    steps = sorted({row["step"] for run in runs for row in run.rows})
    every = -(-len(steps) // (MAX_POINTS_WITH_BAND if several else MAX_POINTS))
    evaluated = {row["step"] for run in runs for row in run.rows if any(key.startswith("eval/") for key in row)}
    steps = [step for number, step in enumerate(steps) if number % every == 0 or step in evaluated]
    rows = [{row["step"]: row for row in run.rows} for run in runs]
    began = [next((row["time"] for row in run.rows if "time" in row), 0.0) for run in runs]

    def cells(metric: str, since: Sequence[float]) -> np.ndarray:
        """[S, P]: the metric of S runs at P steps, minus the run's `since`; NaN where a run has no finite value."""
        logged = [[by_step.get(step, {}).get(metric) for step in steps] for by_step in rows]
        finite = [[v if isinstance(v, int | float) and math.isfinite(v) else math.nan for v in line] for line in logged]
        return np.array(finite, dtype=float).reshape(len(rows), len(steps)) - np.array(since)[:, None]

    metrics = dict.fromkeys(metric for run in runs for metric in run.metrics)
    shown = [metric for metric in metrics if not (several and metric.endswith(BOUNDS))]
    lines = {metric: over_seeds(cells(metric, [0.0] * len(rows))) for metric in shown}
    return {
        "name": names[numbers[0]] + (f" and {len(numbers) - 1} more" if several else ""),
        "runs": numbers,
        "seeds": [run.config.get("run.seed") for run in runs],
        "shared": min((run.rows[-1]["step"] for run in runs if run.rows), default=0),
        "every": every,
        "steps": steps,
        "seconds": _numbers(over_seeds(cells("time", began))[0]),
        "series": {metric: _numbers(mean) for metric, (mean, _, _) in lines.items()},
        "bands": {metric: [_numbers(low), _numbers(high)] for metric, (_, low, high) in lines.items() if several},
    }


def _run(run: RunFiles, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "program": run.program_config.program if run.program_config else None,
        "finished": run.finished,
        "last": run.rows[-1]["step"] if run.rows else 0,
        "config": run.config,
        "phases": _seconds(run),
        "findings": [vars(finding) for finding in diagnose_run(run.rows, run.config)],
        "outside": [each._asdict() | {"value": _number(each.value)} for each in outside_at_the_end(run.rows)],
    }


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values.tolist()]


def _number(value: Any) -> float | None:
    """A number with six digits, which is more than a curve shows; None for other values."""
    return float(f"{value:.6g}") if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds(run: RunFiles) -> dict[str, float]:
    """Seconds of the run by phase, with the phases before and between steps."""
    totals: dict[str, float] = defaultdict(float)
    for row in run.rows:
        for name, value in row.items():
            if name.startswith("time/") and name not in ("time/step", "time/engine_idle", "time/learner_idle"):
                totals[name.removeprefix("time/")] += value
    return {phase: round(seconds, 1) for phase, seconds in totals.items()}


def page_rollouts(groups: Iterable[tuple[int, Sequence[Row]]]) -> dict[str, Any]:
    """The rollouts of (number of the run, group) as columns. Each distinct text is stored once, in `texts`."""
    texts: dict[str, int] = {}
    columns: dict[str, list[Any]] = defaultdict(list)
    for count, (number, group) in enumerate(groups):
        for row in group:
            _add_row(columns, row, texts, run=number, group=count)
    return {"columns": columns, "texts": list(texts), "text_columns": [*TEXT_KEYS, *MADE_TEXTS]}


def _add_row(columns: dict[str, list[Any]], row: Row, texts: dict[str, int], *, run: int, group: int) -> None:
    """Append a rollout to the columns; texts are stored once, by number."""

    def text_number(value: Any) -> int:
        return texts.setdefault(value if isinstance(value, str) else json.dumps(value), len(texts))

    blocks = response_blocks(row)
    is_plain = blocks in ([], [("text", row["text"])])
    if not (row.get("turns") or is_plain):
        row = {**row, "text": blocks[-1][1]}  # without its thought, which may be long and is stored among the blocks
    cells: dict[str, Any] = {"run": run, "group": group}
    cells |= {key: row[key] for key in ("step", "sample", "response_tokens")}
    cells |= {key: _number(row[key]) for key in ("reward", "advantage")}
    cells |= {key: text_number(row[key]) for key in TEXT_KEYS}
    cells |= {"conversation": text_number(conversation(row)), "no_answer": states_no_answer(row)}
    cells["parts"] = text_number(json.dumps(row["reward_parts"]))
    cells["blocks"] = None if is_plain else [(kind, text_number(block)) for kind, block in blocks]
    cells["version"] = min((span[2] for span in row["versions"]), default=None)
    cells["tokens"] = {key: row[key] for key in TOKEN_KEYS if key in row} or 0
    for key, value in cells.items():
        columns[key].append(value)
