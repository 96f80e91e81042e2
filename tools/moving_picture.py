"""Makes the moving picture of the README from a run.

Its curve draws itself, next to a typical response of the first step and one of the last.

    python tools/moving_picture.py runs/quickstart docs/quickstart.svg

The file is one SVG without scripts, which GitHub shows. A viewer that does not animate shows the finished curve.
"""

from __future__ import annotations

import html
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

from rlhf.config.printing import say
from rlhf.report.curve import COLORS, GREY, LEFT, RIGHT, WIDTH, draw_curve
from rlhf.report.run_files import read_run

PERIOD_S = 12  # the curve draws itself in the first half, and stays for the second
LINE = 20  # pixels from one line of text to the next
COLUMNS, MOST_LINES = 36, 5  # of a response


def moving_picture(folder: Path) -> str:
    """The SVG of a run; ValueError if it has no rollouts."""
    steps = sorted((folder / "rollouts").glob("step-*.jsonl"))
    if not steps:
        raise ValueError(f"{folder}: it has no rollouts. Name the folder of a finished run.")
    curve = draw_curve([read_run(folder)])
    height = int(re.search(r'height="(\d+)"', curve)[1])  # type: ignore[index]
    curve = curve.replace("<polyline ", '<polyline pathLength="1" stroke-dasharray="1" ')
    curve = re.sub(
        r"(<polyline [^>]*)/>", rf"\1>{animated('stroke-dashoffset', (1, 0, 0), (0, 0.5, 1))}</polyline>", curve
    )
    curve = re.sub(r'(<circle cx="([\d.]+)"[^>]*)/>', lambda dot: appearing(dot[1], float(dot[2])), curve)
    last = animated("opacity", (0, 0, 1, 1), (0, 0.45, 0.5, 1))
    before, after = card(steps[0]), card(steps[-1])
    total = height + LINE * max(len(before), len(after))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" font-size="14" '
            f'font-family="sans-serif" fill="{GREY}">',
            curve.strip(),
            f'<g transform="translate({LEFT},{height + LINE})">',
            *before,
            f'</g><g transform="translate({(LEFT + WIDTH) // 2},{height + LINE})">{last}',
            *after,
            "</g></svg>\n",
        ]
    )


def animated(attribute: str, values: tuple[float, ...], times: tuple[float, ...]) -> str:
    texts = (";".join(f"{number:g}" for number in numbers) for numbers in (values, times))
    return '<animate attributeName="{}" values="{}" keyTimes="{}" dur="{}s" repeatCount="indefinite"/>'.format(
        attribute, *texts, PERIOD_S
    )


def appearing(circle: str, x: float) -> str:
    """A point of the curve that appears when the curve has come to it."""
    time = round(0.01 + 0.48 * (x - LEFT) / (WIDTH - LEFT - RIGHT), 3)
    return f"{circle}>{animated('opacity', (0, 0, 1, 1), (0, time, time + 0.005, 1))}</circle>"


def card(file: Path) -> list[str]:
    """The first response of a step that has the most frequent reward of the step."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    usual = statistics.mode(row["reward"] for row in rows)
    row = next(row for row in rows if row["reward"] == usual)
    color = COLORS[2] if usual == max(row["reward"] for row in rows) and usual > 0 else COLORS[1]
    text = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in row["text"])
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, COLUMNS) or [""]][:MOST_LINES]
    texts = [
        (f"step {row['step']}", f'font-weight="bold" fill="{color}"'),
        (row["prompt"], ""),
        *((line, 'font-family="monospace"') for line in lines),
        (f"reward {usual:g}, like most responses of this step", f'fill="{color}"'),
    ]
    shown = [
        f'<text x="12" y="{LINE * number}" {style} xml:space="preserve">{html.escape(text)}</text>'
        for number, (text, style) in enumerate(texts)
    ]
    bar = f'<path d="M0 -14v{LINE * len(texts)}" stroke="{color}" stroke-width="3"/>'
    return [bar, *shown]


if __name__ == "__main__":
    run, picture = map(Path, sys.argv[1:])
    picture.write_text(moving_picture(run))
    say(f"{picture}: a moving picture of {run}")
