"""Program: a page about one or more runs, in one HTML file that needs no network.

    python -m rlhf.report runs/mine
    python -m rlhf.report runs/k1 runs/k3 runs/k4 --output kl.html

It shows curves with the runs overlaid, evaluations, where the time went, what differs between the configs, what looks
wrong (the diagnosis), and every rollout that was trained on; of long runs a sample, whose share it states. It reads a
run that is not finished too: write the page again to see the newest steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf.config.cli import run_program, started_as
from rlhf.config.printing import say


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=started_as("rlhf.report"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders; the first is the one to compare with")
    parser.add_argument("--output", help="HTML file (default: report.html in the folder of the first run)")
    options = parser.parse_args(argv)
    from rlhf.report.page import write_page
    from rlhf.report.run_files import read_run

    runs = [read_run(folder) for folder in options.runs]
    output = Path(options.output) if options.output else runs[0].path / "report.html"
    page = write_page(runs)
    try:
        output.write_text(page, errors="replace")
    except OSError as error:
        raise ValueError(f"--output {output}: {error.strerror}. Name a file in a folder that exists.") from None
    say(f"{output}: {len(page) / 2**20:.1f} MiB; open it in a browser")


if __name__ == "__main__":
    sys.exit(run_program(main))
