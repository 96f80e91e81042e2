"""Whether a new run can use a folder that is not empty: only one in which an earlier run has finished no step."""

from __future__ import annotations

import json
import re
from pathlib import Path

from rlhf.run.manifest import RUN_ID, complete_checkpoints

# Files of a run that has not finished a step; it also has empty folders and metrics of step 0.
FIRST_FILES = re.compile(
    r"(config\.yaml|run_id)(\.new)?|(config|metrics)\.earlier-\d+\.\w+|wandb|tensorboard|logs|report\.html|\.lock"
)
NAMES_SHOWN = 3  # of the files in a folder that cannot be used


def why_taken(folder: Path) -> str:
    """Why a new run cannot use this folder, "" if it can. To remove it is advised only if a run made it."""
    if not folder.is_dir() or not any(folder.iterdir()) or _has_no_finished_step(folder):
        return ""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    complete = complete_checkpoints(folder / "checkpoints")
    is_run = (folder / RUN_ID).is_file() or all((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if complete or is_run:
        advice = "Go on with it (--resume), write" if complete else "Write"
        return (
            f"run.dir={folder}: already holds a run. {advice} to another folder (run.dir={named}-2), or remove it "
            f"(rm -r {named})."
        )
    names = sorted(path.name for path in folder.iterdir())
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return (
        f"run.dir={folder}: already holds other files ({', '.join(names[:NAMES_SHOWN])}{more}), and no run. Name a "
        f"new folder, such as run.dir={named / 'run'}."
    )


def _has_no_finished_step(folder: Path) -> bool:
    """Whether the folder holds nothing but what a run writes before it finishes its first step."""
    rollouts, checkpoints = folder / "rollouts", folder / "checkpoints"
    if not (rollouts.is_dir() and checkpoints.is_dir()):
        return False  # no run began here
    for path in folder.iterdir():
        if path in (rollouts, checkpoints):
            harmless = not any(path.iterdir())
        elif path.name == "metrics.jsonl":
            try:
                harmless = all(json.loads(line)["step"] == 0 for line in path.read_text().splitlines())
            except (ValueError, LookupError, TypeError, RecursionError):
                harmless = False
        else:
            harmless = FIRST_FILES.fullmatch(path.name) is not None
        if not harmless:
            return False
    return True
