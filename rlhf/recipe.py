"""Program: lists the recipes, a ladder from a first run to runs on GPUs, or runs one.

    python -m rlhf.recipe                       what each recipe teaches, and how long it takes
    python -m rlhf.recipe 3                     recipes/03-*/run.sh in this folder; the run is runs/recipe-03-*
    python -m rlhf.recipe 3 run.steps=2         with other values of keys in its training, the last one if several

Each recipe is a folder with README.md, the curve of its run, and run.sh: its commands, to read and to change.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

from rlhf.config.cli import end_signals, exit_status, parser_of, run_program, shipped_folder
from rlhf.config.printing import say

# the first lines of a README: its title, then the command with the minutes that it takes
HEAD = re.compile(r"# (?P<title>.*)\n\n    rlhf recipe (?P<number>\d+) +# (?P<note>(?P<minutes>\S+) minutes on .*)\n")


def recipes() -> dict[int, Path]:
    """The folder of each recipe by its number."""
    return {int(folder.name[:2]): folder for folder in sorted(shipped_folder("recipes").glob("[0-9][0-9]-*"))}


def head_of(folder: Path) -> re.Match[str]:
    """The first lines of a recipe's README, as `HEAD` names their parts."""
    head = HEAD.match((folder / "README.md").read_text())
    assert head is not None, f"{folder}/README.md does not begin with a title and the command"
    return head


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("rlhf.recipe", __doc__)
    parser.add_argument("number", nargs="?", type=int, help="of the recipe to run; without one, list all")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key of its training")
    record = "write the curve and the minutes of this run to the recipe's folder"
    parser.add_argument("--record", action="store_true", help=record)
    options = parser.parse_intermixed_args(argv)
    ladder = recipes()
    if options.number is None:
        say(f"{shipped_folder('recipes')}:")
        for folder in ladder.values():
            head = head_of(folder)
            say(f"  {head['title']:<70}  {head['note']}")
        return
    if options.number not in ladder:
        raise ValueError(f"recipe {options.number}: there is no such recipe. There are {min(ladder)} to {max(ladder)}.")
    if named := [override for override in options.overrides if override.startswith("run.dir=")]:
        raise ValueError(f"{named[0]}: a recipe names the folder of its run itself, in runs/. Remove this override.")
    folder = ladder[options.number]
    names = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    run = next(path for name in names if not (path := Path("runs", f"recipe-{folder.name}{name}")).exists())
    began = time.monotonic()
    if status := run_script(folder / "run.sh", run, options.overrides):
        sys.exit(status)
    minutes = f"{(time.monotonic() - began) / 60:.1f}"
    if options.record:
        shutil.copyfile(run / "curve.svg", folder / "curve.svg")
        head = head_of(folder)
        readme = head.string[: head.start("minutes")] + minutes + head.string[head.end("minutes") :]
        (folder / "README.md").write_text(readme)
    say(f"recipe {options.number} took {minutes} minutes; its commands: {folder}/run.sh")


def run_script(script: Path, run: Path, overrides: Sequence[str]) -> int:
    """Run a recipe's commands, with the `rlhf` and the `python` of this environment; returns the exit status.

    A signal goes on to the program that the script is at, which saves and ends the script with its status.
    """
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    bash = psutil.Popen(["bash", str(script), *overrides], env=os.environ | {"PATH": path, "RUN": str(run)})

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
            return  # Ctrl-C: the terminal has sent it to the script's program too, which would count two
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in bash.children() or [bash]:
                process.send_signal(number)

    earlier = {number: signal.signal(number, pass_on) for number in end_signals()}
    try:
        return exit_status(bash.wait())
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(run_program(main))
