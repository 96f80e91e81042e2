"""What an interrupted run goes on with: prints --resume, or nothing after moving a run without a checkpoint aside.

    resume.py [--newer-than SECONDS] ARGUMENTS OF THE PROGRAM

With --newer-than (seconds since 1970) it moves nothing, and prints `newer` or `older` of the newest whole checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import OmegaConf

MANIFEST = "manifest.json"  # the last file of a checkpoint that is written
PARTIAL = ".partial"  # the name that it has until it is whole
RESUME = "--resume"


def run_dir(arguments: Sequence[str]) -> Path:
    """`run.dir` of the program's arguments: files in their order, then overrides.

    Raises:
        ValueError: nothing sets it.
    """
    waiting, overrides = list(arguments), []
    layers = []
    while waiting:
        argument = waiting.pop(0)
        if argument == "--config" and waiting:
            layers.append(OmegaConf.load(waiting.pop(0)))
        elif argument.startswith("--config="):
            layers.append(OmegaConf.load(argument.removeprefix("--config=")))
        elif "=" in argument and not argument.startswith("-"):
            overrides.append(argument)
    found = OmegaConf.select(OmegaConf.merge(*layers, OmegaConf.from_dotlist(overrides)), "run.dir")
    if found is None:
        raise ValueError("run.dir is set neither in the files nor as an override. Set run.dir=FOLDER.")
    return Path(str(found))


def newest_checkpoint(folder: Path) -> Path | None:
    complete = sorted(
        path for path in folder.glob("checkpoints/step-*") if path.suffix != PARTIAL and (path / MANIFEST).is_file()
    )
    return complete[-1] if complete else None


def prepare(folder: Path) -> list[str]:
    """The flag to go on with; a run without a complete checkpoint is renamed, so that it can begin anew."""
    if newest_checkpoint(folder) is not None:
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
            newest = newest_checkpoint(run_dir(argv[2:]))
            print("newer" if newest is not None and newest.stat().st_mtime > float(argv[1]) else "older")
        else:
            print(" ".join(prepare(run_dir(argv))))
    except (ValueError, OSError) as error:
        print(f"resume: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
