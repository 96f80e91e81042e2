"""Draws the curve of one or more runs as a small SVG: what the evaluation measured, and the reward in training.

Its text is text, in the reader's own font, and its colors are readable on a white and on a dark ground, so that the
README of a repository can show it. The same runs always give the same file.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from rlhf.log.panels import metric_titles
from rlhf.report.run_files import RunFiles

WIDTH, PLOT_HEIGHT, LEFT, RIGHT, BOTTOM, ROW = 720, 240, 40, 16, 44, 22  # in pixels; a row of the legend
METRIC = re.compile(r"eval/(.*)/avg@\d+")
GREY = "#7d8590"  # its contrast with white and with a dark page is about 4, that of the others at least 3
COLORS = ("#2f81f7", "#d9730d", "#2da44e", "#a371f7", "#db61a2")
MOST_TICKS = 6


class Line(NamedTuple):
    """One line of the picture: a metric at the steps that have it."""

    name: str
    points: list[tuple[float, float]]  # (step or minutes, value)
    is_reward: bool = False  # has a value at every step, so it is drawn thin and without dots

    @property
    def label(self) -> str:
        (_, before), (_, after) = self.points[0], self.points[-1]
        return f"{self.name}: {before:.2f} → {after:.2f}"

    def height(self, value: float) -> float:
        """The place of a value between the bottom (0) and the top (1) of the picture."""
        values = [value for _, value in self.points]
        low, high = min(0.0, *values), max(1.0, *values)
        if (low, high) != (0.0, 1.0):
            low, high = min(values), max(values)
        return (value - low) / (high - low) if high > low else 0.5


def draw_curve(runs: Sequence[RunFiles], *, minutes: bool = False) -> str:
    """An SVG of the evaluations of each run, and of the mean reward of each step of a single run.

    The axis goes from 0 to 1. A line that leaves this range is drawn between its own lowest and highest value.
    The label of a line has its first and its last value.

    Args:
        minutes: draw over the minutes since the first row of each run, for runs that differ in speed.

    Raises:
        ValueError: no run has an evaluation or a reward.
    """
    lines = [line for run in runs for line in _lines(run, alone=len(runs) == 1, minutes=minutes)]
    if not lines:
        names = ", ".join(str(run.path) for run in runs)
        raise ValueError(f"--curve: {names}: there is no evaluation and no reward to draw. Name runs of grpo or ppo.")
    last = max(1, *(math.ceil(x) for line in lines for x, _ in line.points))
    top = 12 + ROW * len(lines)
    height = top + PLOT_HEIGHT + BOTTOM

    def place(step: float, share: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / last, top + PLOT_HEIGHT * (1 - share)

    title = html.escape("; ".join(line.label for line in lines))
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" font-family="sans-serif" font-size="14" fill="{GREY}">',
        f"<title>{title}</title>",
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = place(0, share)
        svg.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - RIGHT}" stroke="{GREY}" stroke-opacity="0.3"/>')
        svg.append(f'<text x="{x - 6:.1f}" y="{y + 5:.1f}" text-anchor="end">{share:g}</text>')
    for step in range(0, last + 1, step_between_ticks(last)):
        x, y = place(step, 0)
        svg.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{step}</text>')
    svg.append(f'<text x="{LEFT}" y="{height - 6}">{"minutes of training" if minutes else "training step"}</text>')
    for row, line in enumerate(lines):
        color, wide = COLORS[row % len(COLORS)], 1.5 if line.is_reward else 3
        points = [place(step, line.height(value)) for step, value in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        svg.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{wide}"/>')
        if not line.is_reward:
            svg += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in points]
        y = 18 + ROW * row
        svg.append(f'<path d="M{LEFT} {y - 5}h24" stroke="{color}" stroke-width="{wide}"/>')
        svg.append(f'<text x="{LEFT + 32}" y="{y}">{html.escape(line.label)}</text>')
    return "\n".join([*svg, "</svg>", ""])


def _lines(run: RunFiles, *, alone: bool, minutes: bool) -> list[Line]:
    """The lines of a run: its evaluations and, if it is alone or has none, its reward."""
    titles = metric_titles(run.program_config.metrics, run.rows) if run.program_config else {}
    names = {metric: titles.get(match[1], metric) for metric in run.metrics if (match := METRIC.fullmatch(metric))}
    lines = [Line(name, _points(run, metric, minutes=minutes)) for metric, name in names.items()]
    if "reward/mean" in run.metrics and (alone or not lines):
        lines.append(Line("reward in training", _points(run, "reward/mean", minutes=minutes), is_reward=True))
    lines = [line for line in lines if line.points]
    return lines if alone else [line._replace(name=f"{run.name}, {line.name}") for line in lines]


def _points(run: RunFiles, metric: str, *, minutes: bool) -> list[tuple[float, float]]:
    values = [
        ((row["time"] - run.rows[0]["time"]) / 60 if minutes else row["step"], row.get(metric)) for row in run.rows
    ]
    return [(x, value) for x, value in values if isinstance(value, int | float) and math.isfinite(value)]


def step_between_ticks(last: int) -> int:
    """The steps between two numbers of the axis: 1, 2 or 5 times a power of ten."""
    exact = max(1.0, last / MOST_TICKS)
    power = 10 ** math.floor(math.log10(exact))
    return next(int(factor * power) for factor in (1, 2, 5, 10) if factor * power >= exact)
