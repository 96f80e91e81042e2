"""Prints --resume if an interrupted run has a checkpoint; else moves its folder aside and prints nothing.

    resume.py [--newer-than SECONDS] ARGUMENTS OF THE PROGRAM

With --newer-than (seconds since 1970) it moves nothing, and prints whether the newest whole checkpoint is `newer` or
`older` than that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

from rlhf.config.base import with_home
from rlhf.config.load import read_values
from rlhf.run.checkpoint_files import complete_checkpoints
from rlhf.run.checkpoint_mirror import Mirror

RESUME = "--resume"


def run_dir(arguments: Sequence[str]) -> Path:
    """`run.dir` of the program's arguments.

    Raises:
        ValueError: nothing sets it.
    """
    folder = value_of("run.dir", arguments)
    if folder is None:
        raise ValueError("run.dir is set neither in the files nor as an override. Set run.dir=FOLDER.")
    return Path(folder)


def value_of(key: str, arguments: Sequence[str]) -> str | None:
    """The value of a key in the program's arguments: files in their order, then overrides."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--config", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    known, _ = parser.parse_known_intermixed_args(arguments)
    overrides = [argument for argument in known.overrides if "=" in argument]
    value = OmegaConf.select(OmegaConf.create(read_values(known.config, overrides)), key)
    return None if value is None else with_home(str(value))


def prepare(folder: Path, mirror: str | None = None) -> list[str]:
    """The flag to go on with; a run without a complete checkpoint is renamed, so that it can begin anew.

    Args:
        mirror: checkpoint.mirror, which may have a checkpoint where the folder has none.
    """
    if complete_checkpoints(folder / "checkpoints") or (mirror is not None and Mirror(mirror).checkpoints()):
        return [RESUME]
    if folder.is_dir() and any(folder.iterdir()):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.interrupted-{number}")).exists():
            number += 1
        folder.rename(aside)
        print(f"{folder} has no complete checkpoint: moved to {aside}, beginning anew", file=sys.stderr)
    return []


def main(argv: Sequence[str]) -> int:
    try:
        if argv[:1] == ["--newer-than"]:
            times = [path.stat().st_mtime for path in complete_checkpoints(run_dir(argv[2:]) / "checkpoints")]
            print("newer" if max(times, default=0.0) > float(argv[1]) else "older")
        else:
            print(" ".join(prepare(run_dir(argv), value_of("checkpoint.mirror", argv))))
    except (ValueError, OSError) as error:
        print(f"resume: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
