"""The folder of a run: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/, summary.json.

A checkpoint is written under a temporary name and renamed when it is complete, so that the previous one stays intact
whatever happens meanwhile. Its `manifest.json` has the size and the checksum of every file.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.config.base import Section
from rlhf.config.load import resolved_yaml
from rlhf.types import RolloutGroup, ScoredRollout

STATE_FILE = "driver.json"
MANIFEST = "manifest.json"
PARTIAL = ".partial"
CHUNK_BYTES = 2**24
# Files of a run that has not finished a step; besides them it has empty folders and metrics of step 0.
FIRST_FILES = re.compile(r"config\.yaml|(config|metrics)\.earlier-\d+\.\w+|wandb|tensorboard|logs|report\.html|\.lock")


def all_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in this folder, damaged ones too, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != PARTIAL)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Those that are complete by the sizes of their files, oldest first."""
    return [path for path in all_checkpoints(folder) if not find_damage(path, contents=False)]


class RunFolder:
    """Paths and files of one run.

    Attributes:
        restored: the newest undamaged checkpoint of a resumed run, its files verified.
        damaged: newer checkpoints that are damaged or incomplete, with the reason.

    Raises:
        ValueError: the folder already holds a run and `resume` is False, or there is nothing to resume.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.summary = self.path / "summary.json"
        self.resume = resume
        self.restored: Path | None = None
        self.damaged: dict[Path, str] = {}
        if resume:
            self._find_undamaged()
        elif self.path.is_dir() and any(self.path.iterdir()) and not self._has_no_finished_step():
            advice = "Go on with it (--resume), write" if complete_checkpoints(self.checkpoints) else "Write"
            raise ValueError(
                f"run.dir={self.path}: already holds a run. {advice} to another folder (run.dir={self.path}-2), or "
                f"remove it (rm -r {self.path})."
            )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for a resumed run."""
        if not self.damaged:
            return ()
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in self.damaged.items())
        return (f"checkpoints passed over as damaged or not complete in {self.checkpoints}: {reasons}.",)

    def _has_no_finished_step(self) -> bool:
        """Whether the folder holds nothing but what a run writes before it finishes its first step."""
        if not (self.rollouts.is_dir() and self.checkpoints.is_dir()):
            return False  # no run began here
        for path in self.path.iterdir():
            if path in (self.rollouts, self.checkpoints):
                harmless = not any(path.iterdir())
            elif path == self.metrics:
                try:
                    harmless = all(json.loads(line)["step"] == 0 for line in path.read_text().splitlines())
                except (ValueError, LookupError, TypeError):
                    harmless = False
            else:
                harmless = FIRST_FILES.fullmatch(path.name) is not None
            if not harmless:
                return False
        return True

    def create(self, config: Section) -> None:
        """Make the folders and save the resolved config; a resumed run saves its own next to the first.

        The files of an earlier run that finished no step are kept: its config and metrics are renamed.

        Raises:
            ValueError: another run is using the folder.
        """
        for folder in (self.path, self.rollouts, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        text = resolved_yaml(config)
        file = self.path / ("config.resumed.yaml" if self.resume else "config.yaml")
        if file.exists() and file.read_text() != text:
            _set_aside(file)
        if not self.resume and self.metrics.exists() and self.metrics.stat().st_size:
            _set_aside(self.metrics)
        file.write_text(text)

    def _lock(self) -> None:
        """Keep other runs out until this process ends; its child processes do not inherit the lock."""
        self._lock_file = (self.path / ".lock").open("a")
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"run.dir={self.path}: another run is using it. Wait for its end, or write to another folder "
                f"(run.dir={self.path}-2)."
            ) from None
        except OSError:
            pass  # a file system without locks

    # --- checkpoints ---

    def _find_undamaged(self) -> None:
        for path in reversed(all_checkpoints(self.checkpoints)):
            if not (damage := find_damage(path)):
                self.restored = path
                return
            self.damaged[path] = damage
        reasons = "".join(f"\n  {path.name}: {reason}" for path, reason in self.damaged.items())
        remedy = "Put a copy of one in place" if reasons else "Set checkpoint.every so that a run writes some"
        raise ValueError(
            f"run.dir={self.path}: --resume finds no complete, undamaged checkpoint in {self.checkpoints}.{reasons}\n"
            f"{remedy}, or start anew without --resume in another folder."
        )

    def begin_checkpoint(self, step: int) -> Path:
        folder = self.checkpoints / f"step-{step:06d}{PARTIAL}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish_checkpoint(self, folder: Path, state: dict[str, Any], *, keep: int) -> Path:
        """Write the driver's state and the manifest, rename the folder, and remove checkpoints beyond `keep`."""
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2))
        write_manifest(folder)
        final = folder.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        self.damaged.pop(final, None)
        complete = [path for path in complete_checkpoints(self.checkpoints) if path not in self.damaged]
        for old in complete[:-keep]:
            shutil.rmtree(old)
        return final

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
        return state

    # --- results ---

    def write_rollouts(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """One file per step and one line per rollout."""
        with (self.rollouts / f"step-{step:06d}.jsonl").open("w") as file:
            file.writelines(_escape_line_ends(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")


def rollout_rows(step: int, groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> list[dict[str, Any]]:
    """The graded responses of a step as rows of a JSON file, in the order of the advantages."""
    rows = [rollout_row(group, sample) for group in groups for sample in group.samples]
    return [{"step": step, **row, "advantage": advantage} for row, advantage in zip(rows, advantages, strict=True)]


def rollout_row(group: RolloutGroup, sample: ScoredRollout) -> dict[str, Any]:
    """A graded response as a row of a JSON file."""
    rollout = sample.rollout
    return {
        "prompt_id": rollout.prompt_id,
        "epoch": rollout.epoch,
        "sample": rollout.sample,
        "prompt": group.prompt.messages[-1]["content"] if group.prompt.messages else "",
        "answer": group.prompt.answer,
        "text": sample.text,
        "extracted": sample.extracted,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "status": sample.status,
        "finish_reason": rollout.finish_reason,
        "response_tokens": rollout.response_length,
        "versions": [list(span) for span in rollout.version_spans],
    }


def write_manifest(folder: Path) -> None:
    """Write the size and checksum of every file of a finished checkpoint, those in its folders too."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2))


def find_damage(folder: Path, *, contents: bool = True) -> str:
    """How a checkpoint differs from what was written, "" if it does not, by file sizes and (`contents`) checksums."""
    name = MANIFEST
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        for name, written in files.items():
            size = (folder / name).stat().st_size
            if size != written["bytes"]:
                return f"{name} has {size:,} bytes, {written['bytes']:,} were written"
            if contents and checksum(folder / name) != written["crc32"]:
                return f"{name} has another checksum than what was written"
    except FileNotFoundError:
        older = ", as where it was not finished or is of a version that wrote none" if name == MANIFEST else ""
        return f"{name} is missing{older}"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return ""


def checksum(file: Path) -> str:
    """CRC-32 of a file: any flipped bit changes it, and it is faster than most disks (4 GiB/s and more on one core).

    A cryptographic hash takes 3 to 8 times as long and protects against forgery, which is no risk here.
    """
    crc, chunk = 0, bytearray(CHUNK_BYTES)
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(chunk):
            crc = zlib.crc32(memoryview(chunk)[:count], crc)
    return f"{crc:08x}"


def _set_aside(file: Path) -> None:
    """Rename `config.yaml` to `config.earlier-N.yaml`, with the first N that is free."""
    number = 1
    while (aside := file.with_name(f"{file.stem}.earlier-{number}{file.suffix}")).exists():
        number += 1
    file.rename(aside)


def _escape_line_ends(text: str) -> str:
    """Escape characters that JSON does not escape and many readers take for the end of a line."""
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text
