"""The folder of a run: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/, summary.json.

A checkpoint is written under a temporary name and renamed when it is complete, so that the previous one stays intact
whatever happens meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhf.config.base import Section
from rlhf.config.load import resolved_yaml
from rlhf.log.patient_files import NEW, PatientFiles
from rlhf.log.sinks import SUMMARY, read_summary
from rlhf.run.manifest import (
    BEST,
    LATEST,
    PARTIAL,
    RUN_ID,
    all_checkpoints,
    complete_checkpoints,
    find_damage,
    in_order,
    is_of_run,
    partial_checkpoints,
    read_line,
    reason,
    remove,
    replace_synced,
    step_of,
    sync,
    write_manifest,
    write_synced,
)
from rlhf.run.mirror import OTHER_MIRROR, Mirror
from rlhf.run.state import RunState
from rlhf.run.used_folder import why_taken
from rlhf.types import RolloutGroup, ScoredRollout, WrittenFile

STATE_FILE = "driver.json"
LOCK = ".lock"


class RunFolder:
    """Paths and files of one run.

    Attributes:
        id: of the run; its checkpoints and its mirror hold it too. A run on a bare node takes that of its checkpoint.
        restored: the checkpoint that a resumed run goes on from, its files verified: the newest undamaged one, or the
            one that `start_at` names.
        damaged: newer checkpoints that are damaged or incomplete, with the reason.
        saved_step: the step of the newest complete checkpoint; 0 if there is none.
        not_removed: why older checkpoints are still there after the last save.
        being_copied: the name of a checkpoint that saves do not remove; "" if there is none.

    Raises:
        ValueError: the folder already holds a run and `resume` is False, or there is nothing to resume.
    """

    def __init__(
        self, path: str | Path, *, resume: bool, mirror: Mirror | None = None, start_at: str | None = None
    ) -> None:
        self._use(Path(path))
        self.id = read_line(self.path / RUN_ID)
        self.resume = resume
        self.restored: Path | None = None
        self.damaged: dict[str, str] = {}
        self.saved_step = 0
        self.not_removed: tuple[str, ...] = ()
        self.being_copied = ""
        self._start_at, self._mirror = start_at, mirror
        self._lock_file: TextIO | None = None
        if resume:
            self._find_undamaged(mirror)
        elif taken := why_taken(self.path):
            raise ValueError(taken)
        elif mirror is not None:
            mirror.check_empty()
        self.id = self.id or f"{self.path.resolve().name}-{secrets.token_hex(4)}"

    def _use(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.summary = path / SUMMARY

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for a resumed run."""
        warnings = []
        if self.damaged:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.damaged.items())
            warnings.append(f"checkpoints passed over as damaged or not complete in {self.checkpoints}: {reasons}.")
        try:
            read_summary(self.path)
        except ValueError as error:
            warnings.append(f"{error} The run counts as not finished.")
        return tuple(warnings)

    def create(self, config: Section) -> None:
        """Make the folders and save the resolved config; a resumed run saves its config next to the first one.

        The files of an earlier run that finished no step are kept: its config and metrics are renamed.

        Raises:
            ValueError: another run is using the folder, or it cannot be written.
        """
        try:
            for folder in (self.path, self.rollouts, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._fill(config)
        except OSError as error:
            raise ValueError(f"run.dir={self.path}: {reason(error)}. Name a folder that can be written.") from None
        if self._mirror is not None and not self.resume:
            try:
                self._mirror.claim(self.id, anew=True)
            except OSError as error:
                raise ValueError(f"{error}. {OTHER_MIRROR}") from None

    def _fill(self, config: Section) -> None:
        for left in partial_checkpoints(self.checkpoints):
            remove(left)
        if self.restored is not None:
            self._remove_rollouts_after(self.saved_step)
        if self.restored is not None and self._start_at is not None:
            self._remove_newer(self.restored.name)
        replace_synced(self.path / RUN_ID, f"{self.id}\n")
        text = resolved_yaml(config)
        file = self.path / ("config.resumed.yaml" if self.resume else "config.yaml")
        if file.exists() and file.read_bytes() != text.encode():
            _set_aside(file)
        if not self.resume and self.metrics.exists() and self.metrics.stat().st_size:
            _set_aside(self.metrics)
        replace_synced(file, text)

    def _remove_newer(self, than: str) -> None:
        """Remove newer checkpoints here and in the mirror, and their names: a later --resume would take them."""
        if self._mirror is not None:
            try:
                self._mirror.remove_newer(than, self.id)
            except OSError as error:
                raise ValueError(
                    f"{error}. --resume-from {self._start_at} removes newer checkpoints there: correct the address or "
                    "the access to it, or set it to null."
                ) from None
        replace_synced(self.checkpoints / LATEST, f"{than}\n")
        step, best = step_of(than), self.checkpoints / BEST
        if step_of(read_line(best)) > step:
            best.unlink()
        for newer in all_checkpoints(self.checkpoints):
            if step_of(newer.name) > step and is_of_run(newer, self.id) and (why := remove(newer)):
                raise ValueError(
                    f"--resume-from {self._start_at}: {newer} is newer and could not be removed ({why}). Remove it by "
                    "hand: a later --resume would take it."
                )

    def _remove_rollouts_after(self, step: int) -> None:
        """Remove the rollouts of later steps, which will be run again, and files that a killed run left incomplete."""
        for path in self.rollouts.iterdir():
            of_step = step_of(path.stem)
            if of_step >= 0 and (path.suffix == NEW or (path.suffix == ".jsonl" and of_step > step)):
                path.unlink()

    def _lock(self) -> None:
        """Keep other runs out until this process ends; its child processes do not inherit the lock."""
        self._lock_file = (self.path / LOCK).open("a")
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ValueError(
                f"run.dir={self.path}: another run is using it. Wait for its end, or write to another folder "
                f"(run.dir={self.path}-2)."
            ) from None
        except OSError:
            pass  # a file system without locks

    def unlock(self) -> None:
        """Let another run of this process use the folder."""
        if self._lock_file is not None:
            self._lock_file.close()

    def follow(self) -> str:
        """Find the folder again if it was renamed or removed meanwhile: all paths are then those of where it is now.

        Returns:
            What happened; "" if it is where it was.
        """
        if self._lock_file is None:
            return ""
        before, lock = self.path, Path(f"/proc/self/fd/{self._lock_file.fileno()}")
        try:
            if read_line(before / RUN_ID) == self.id or (before / LOCK).samefile(lock):
                return ""
        except FileNotFoundError:
            pass
        except OSError:  # a file system that does not answer is no reason to end a run
            return ""
        now = Path(os.readlink(lock)).parent
        if read_line(now / RUN_ID) != self.id:
            for folder in (self.rollouts, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            return f"run.dir={before}: the folder was removed while the run used it."
        self._use(now)
        return f"run.dir={before}: the folder was renamed to {now} while the run used it."

    # --- checkpoints ---

    def _find_undamaged(self, mirror: Mirror | None) -> None:
        """Find the newest undamaged checkpoint, here or in the mirror; one from the mirror is copied here."""
        here = {path.name for path in all_checkpoints(self.checkpoints)}
        there: set[str] = set()
        if mirror is not None:
            try:
                there = set(mirror.checkpoints())
            except OSError as error:
                self.damaged["the mirror"] = str(error)
        for name in self._candidates(in_order(here | there)[::-1]):
            path = self.checkpoints / name
            owner = read_line(path / RUN_ID)
            is_foreign = bool(self.id and owner and owner != self.id)
            damage = find_damage(path) if name in here else ""
            if is_foreign:
                damage = f"it is of another run, {owner}"
            elif mirror is not None and name in there and (damage or name not in here):
                damage = self._fetch(mirror, name)
            if not damage:
                self.restored, self.saved_step = path, self.read_state(path).step
                self.id = self.id or read_line(path / RUN_ID)
                return
            self.damaged[name] = damage
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.damaged.items())
        remedy = "Put a copy of one in place" if reasons else "Set checkpoint.every so that a run writes some"
        raise ValueError(
            f"run.dir={self.path}: --resume finds no complete, undamaged checkpoint in {self.checkpoints}.{reasons}\n"
            f"{remedy}, or start anew without --resume in another folder."
        )

    def _candidates(self, names: list[str]) -> list[str]:
        """The checkpoints to try: all, newest first, or the one that `start_at` names."""
        if self._start_at is None:
            return names
        file = self.checkpoints / self._start_at
        if self._start_at == BEST and self._mirror is not None and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._mirror.fetch_file(file)
        name = read_line(file) if file.is_file() else self._start_at
        if name not in names:
            raise ValueError(
                f"--resume-from {self._start_at}: {self.checkpoints} has {', '.join(reversed(names)) or 'none'}. Name "
                "one of them; `best` needs a run with checkpoint.best."
            )
        return [name]

    def _fetch(self, mirror: Mirror, name: str) -> str:
        """Copy a checkpoint from the mirror, in place of a missing or damaged one; "" or why that failed."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock()
        try:
            damage = mirror.fetch(name, self.checkpoints, self.id)
            if not damage and not self.metrics.exists():
                mirror.fetch_file(self.metrics)
        except OSError as error:
            damage = str(error)
        return damage and f"{mirror.url}: {damage}"

    def begin_checkpoint(self, step: int) -> Path:
        """Make the folder that `finish_checkpoint` renames.

        Raises:
            OSError: the disk takes no more, or a folder that is not of this run has the name already.
        """
        folder = self.checkpoints / f"step-{step:06d}{PARTIAL}"
        final = folder.with_suffix("")
        if final.exists() and not is_of_run(final, self.id):
            raise OSError(f"{final} is there and not of this run; rename it, or move it away")
        if folder.exists():
            shutil.rmtree(folder)
        if self._lock_file is not None:  # a renamed folder is not made again; in an emptied one, what is missing is
            self.checkpoints.mkdir(exist_ok=True)
        folder.mkdir(parents=self._lock_file is None)
        try:
            write_synced(folder / RUN_ID, f"{self.id}\n")
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def finish_checkpoint(
        self,
        folder: Path,
        state: RunState,
        *,
        keep: int,
        best: str | None = None,
        written: Mapping[str, WrittenFile] | None = None,
    ) -> Path:
        """Write the driver's state and the manifest, rename the folder, then point `latest` to it.

        Everything is on the disk before the next thing is written: after a crash at any moment, the newest folder with
        the name of a checkpoint is whole. Older checkpoints beyond `keep`, except `being_copied`, are removed last.

        Args:
            best: a metric of the evaluations; the checkpoint with its highest value is kept, and named in `best`.
            written: what the learners have written, by path in the folder.

        Raises:
            OSError: the disk takes no more, or a file of `written` is missing.
        """
        if self.metrics.exists():
            sync(self.metrics)  # a resumed run appends after its last line
        write_synced(folder / STATE_FILE, state.to_json())
        write_manifest(folder, written or {})
        final = folder.with_suffix("")
        if final.exists():  # a damaged one, which the run did not resume from
            shutil.rmtree(final)
        folder.rename(final)
        sync(self.checkpoints)
        replace_synced(self.checkpoints / LATEST, f"{final.name}\n")
        self.damaged.pop(final.name, None)
        self.saved_step = state.step
        complete = [
            path
            for path in complete_checkpoints(self.checkpoints)
            if path.name not in self.damaged and is_of_run(path, self.id)
        ]
        kept = [*complete[-keep:], self.checkpoints / self.being_copied]
        steps = [step_of(path.name) for path in complete]
        step = None if best is None else best_step(state.evaluations, best, among=steps)
        if step is not None:
            kept.append(self.checkpoints / f"step-{step:06d}")
            replace_synced(self.checkpoints / BEST, f"{kept[-1].name}\n")
        self.not_removed = tuple(filter(None, (remove(path) for path in complete if path not in kept)))
        return final

    @staticmethod
    def read_state(checkpoint: Path) -> RunState:
        """The driver's state.

        Raises:
            ValueError: this version cannot read it.
        """
        file = checkpoint / STATE_FILE
        try:
            return RunState.from_json(file.read_text())
        except ValueError as error:
            raise ValueError(f"{file}: not a state that this version reads ({' '.join(str(error).split())}).") from None

    # --- results ---

    def write_rollouts(self, step: int, rows: Sequence[dict[str, Any]], files: PatientFiles) -> None:
        """One file per step and one line per rollout."""
        encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
        lines = _escape_line_ends("".join(encode(row) + "\n" for row in rows))
        files.replace(self.rollouts / f"step-{step:06d}.jsonl", lines)

    def write_summary(self, summary: dict[str, Any]) -> None:
        replace_synced(self.summary, json.dumps(summary, indent=2) + "\n")


def best_step(
    evaluations: Mapping[int, Mapping[str, float]], metric: str, *, among: Collection[int] | None = None
) -> int | None:
    """The step with the highest value of a metric, the first of equal ones; None if none of them has it.

    Args:
        among: steps to choose from; None: all except step 0, which has no checkpoint.
    """
    steps = evaluations.keys() - {0} if among is None else evaluations.keys() & among
    scored = {step: evaluations[step][metric] for step in sorted(steps) if metric in evaluations[step]}
    return max(scored, key=scored.__getitem__, default=None)


def rollout_rows(step: int, groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> list[dict[str, Any]]:
    """The graded rollouts of a step as rows of a JSON file, in the order of the advantages."""
    rows = [rollout_row(group, sample) for group in groups for sample in group.samples]
    return [{"step": step, **row, "advantage": advantage} for row, advantage in zip(rows, advantages, strict=True)]


def rollout_row(group: RolloutGroup, sample: ScoredRollout) -> dict[str, Any]:
    """A graded rollout as a row of a JSON file; `context` has the messages before `prompt`, the last one.

    `turns` and `facts` are there if the rollout has any.
    """
    rollout, messages = sample.rollout, group.prompt.messages
    optional = {"turns": list(rollout.turns), "facts": rollout.facts}
    return {
        "prompt_id": rollout.prompt_id,
        "epoch": rollout.epoch,
        "sample": rollout.sample,
        "context": list(messages[:-1]),
        "prompt": messages[-1]["content"] if messages else "",
        "answer": group.prompt.answer,
        "text": sample.text,
        "extracted": sample.extracted,
        "reward": sample.reward,
        "reward_parts": sample.reward_parts,
        "status": sample.status,
        "finish_reason": rollout.finish_reason,
        "response_tokens": rollout.response_length,
        "versions": [list(span) for span in rollout.version_spans],
        **{name: value for name, value in optional.items() if value},
    }


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
