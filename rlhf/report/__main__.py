"""Program: a page about one or more runs, in one HTML file that needs no network.

    python -m rlhf.report runs/mine
    python -m rlhf.report runs/k1 runs/k3 runs/k4 --output kl.html
    python -m rlhf.report runs/mine --curve mine.svg

The page begins with the differences between the configs, and between them and the defaults. It shows the curves of all
runs, evaluations, seconds by phase, the diagnosis, and every rollout that was trained on (of long runs those of every
k-th step). Runs whose configs differ only in the seed are one line, their mean, with a 95% bootstrap interval
over seeds as a band. A run need not be finished: write the page again to see the newest steps.

The page of one run is report.html in its folder. The page of several runs is report-RUN-RUN.html, next to the folder of
the first run.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.cli import run_program, started_as
from rlhf.config.printing import say

if TYPE_CHECKING:
    from rlhf.report.run_files import RunFiles

LONGEST_NAME = 60  # characters of run names in the file name of a page; a file name has at most 255 bytes


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=started_as("rlhf.report"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the others are compared with the first")
    parser.add_argument("--output", help="HTML file (default: see above)")
    parser.add_argument("--curve", metavar="FILE.svg", help="also draw the evaluations of the runs as a small picture")
    parser.add_argument("--minutes", action="store_true", help="draw --curve over minutes in place of training steps")
    options = parser.parse_args(argv)
    if options.minutes and not options.curve:
        raise ValueError("--minutes: it is for a curve. Add --curve FILE.svg, or remove it.")
    from rlhf.report.curve import draw_curve
    from rlhf.report.page import write_page
    from rlhf.report.run_files import read_run

    runs = [read_run(folder) for folder in {Path(folder).resolve(): folder for folder in options.runs}.values()]
    output = Path(options.output) if options.output else default_output(runs)
    if options.curve:
        _write("--curve", Path(options.curve), draw_curve(runs, minutes=options.minutes))
    page = write_page(runs)
    _write("--output", output, page)
    say(f"{output}: {len(page) / 2**20:.1f} MiB; open it in a browser")


def _write(key: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, errors="replace")
    except OSError as error:
        raise ValueError(f"{key} {file}: {error.strerror}. Name a file in a folder that exists.") from None


def default_output(runs: Sequence[RunFiles]) -> Path:
    """report.html in the folder of a single run; for several runs, a file next to the folder of the first one."""
    if len(runs) == 1:
        return runs[0].path / "report.html"
    names = re.sub(r"[^\w.,=+-]+", "_", "-".join(run.name for run in runs))
    if len(names) > LONGEST_NAME:
        digest = hashlib.sha256("\n".join(str(run.path.resolve()) for run in runs).encode()).hexdigest()
        names = f"{names[:LONGEST_NAME]}-{len(runs)}-runs-{digest[:8]}"
    first = runs[0].path
    return (first if first.name.strip(".") else first.resolve()).parent / f"report-{names}.html"


if __name__ == "__main__":
    sys.exit(run_program(main))
