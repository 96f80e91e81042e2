"""The folder of a run: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/, summary.json.

A checkpoint is written under a temporary name and renamed when it is complete, so the previous one stays intact.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import math
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rlhf.config.base import Section, error_text
from rlhf.config.data import DatasetConfig
from rlhf.config.load import resolved_yaml, stored_values
from rlhf.config.printing import as_utf8
from rlhf.config.program import TrainingProgramConfig, with_values
from rlhf.config.references import from_environment
from rlhf.data.read import is_same_data
from rlhf.log.patient_files import NEW, PatientFiles
from rlhf.log.sinks import SUMMARY, read_summary
from rlhf.run import checkpoint_files
from rlhf.run.checkpoint_mirror import OTHER_MIRROR, Mirror
from rlhf.run.state import RunState
from rlhf.types import WrittenFile

STATE_FILE = "driver.json"
LOCK = ".lock"
# Files and folders of a run that has not finished a step.
FIRST_NAMES = re.compile(
    r"(config\.yaml|run_id)(\.new)?|wandb|tensorboard|logs|report\.html|\.lock|rollouts|checkpoints|metrics\.jsonl"
    r"|objects|status\.(json|new)"
)
GIVEN = "objects"  # rows and models that a Python program gave; they are there before the run
NAMES_SHOWN = 3  # file names in the message about a folder that cannot be used
CONFIG, RESUMED_CONFIG = "config.yaml", "config.resumed.yaml"

C = TypeVar("C", bound=TrainingProgramConfig)


class RunFolder:
    """Paths and files of one run.

    ValueError if the folder already holds a run and `resume` is False, or there is nothing to resume.
    """

    def __init__(
        self, path: str | Path, *, resume: bool, mirror: Mirror | None = None, start_at: str | None = None
    ) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.summary = self.path / SUMMARY
        # of the run; its checkpoints and mirror hold it too, and on a bare node it is read from the checkpoint
        self.id = checkpoint_files.read_line(self.path / checkpoint_files.RUN_ID)
        # the verified checkpoint that a resumed run goes on from: the newest, or the one named `start_at`
        self.restored: Path | None = None
        self.damaged: dict[str, str] = {}  # name -> reason, of newer checkpoints that are damaged or incomplete
        self.saved_step = 0  # of the newest complete checkpoint; 0 if there is none
        self.not_removed: tuple[str, ...] = ()  # why older checkpoints are still there after the last save
        self._resume, self._start_at, self._mirror = resume, start_at, mirror
        self._lock_file: TextIO | None = None
        if resume:
            self._find_undamaged()
        elif problem := why_unusable(self.path):
            raise ValueError(problem)
        elif mirror is not None:
            mirror.check_empty()
        self.id = self.id or f"{self.path.resolve().name}-{secrets.token_hex(4)}"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for a resumed run."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.damaged.items())
        damaged = f"checkpoints passed over as damaged or not complete in {self.checkpoints}: {reasons}."
        warnings = (damaged,) if reasons else ()
        try:
            read_summary(self.path)
        except ValueError as error:
            return (*warnings, f"{error} The run counts as not finished.")
        return warnings

    def create(self, config: Section) -> None:
        """Make the folders and save the resolved config; a resumed run saves its config next to the first one.

        A new run replaces config and metrics of an earlier one that finished no step here. ValueError if another run is
        using the folder, or it cannot be written.
        """
        try:
            for folder in (self.path, self.rollouts, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._write_first_files(config)
        except OSError as error:
            raise ValueError(f"run.dir={self.path}: {error_text(error)}. Name a folder that can be written.") from None
        if self._mirror is not None and not self._resume:
            try:
                self._mirror.claim(self.id, anew=True)
            except OSError as error:
                raise ValueError(f"{error}. {OTHER_MIRROR}") from None

    def _write_first_files(self, config: Section) -> None:
        for left in self.checkpoints.glob(f"step-*{checkpoint_files.PARTIAL}"):
            if checkpoint_files.checkpoint_step(left.stem) >= 0:
                checkpoint_files.remove(left)
        if self.restored is not None:
            for path in self.rollouts.iterdir():  # steps that are run again, and what a killed run left incomplete
                step = checkpoint_files.checkpoint_step(path.stem)
                if step >= 0 and (path.suffix == NEW or (path.suffix == ".jsonl" and step > self.saved_step)):
                    path.unlink()
            if self._start_at is not None:
                self._remove_newer(self.restored.name)
        checkpoint_files.replace_synced(self.path / checkpoint_files.RUN_ID, f"{self.id}\n")
        if not self._resume:
            self.metrics.unlink(missing_ok=True)
        checkpoint_files.replace_synced(self.path / (RESUMED_CONFIG if self._resume else CONFIG), resolved_yaml(config))

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
        checkpoint_files.replace_synced(self.checkpoints / checkpoint_files.LATEST, f"{than}\n")
        step, best = checkpoint_files.checkpoint_step(than), self.checkpoints / checkpoint_files.BEST
        if checkpoint_files.checkpoint_step(checkpoint_files.read_line(best)) > step:
            best.unlink()
        later = [
            path
            for path in checkpoint_files.all_checkpoints(self.checkpoints)
            if checkpoint_files.checkpoint_step(path.name) > step
        ]
        for newer in later:
            if checkpoint_files.belongs_to_run(newer, self.id) and (why := checkpoint_files.remove(newer)):
                raise ValueError(
                    f"--resume-from {self._start_at}: {newer} is newer and could not be removed ({why}). Remove it by "
                    "hand: a later --resume would take it."
                )

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

    # --- checkpoints ---

    def _find_undamaged(self) -> None:
        """Find the newest undamaged checkpoint, here or in the mirror. A checkpoint of the mirror is copied here."""
        mirror, in_mirror = self._mirror, set[str]()
        if mirror is not None:
            try:
                in_mirror = set(mirror.checkpoints())
            except OSError as error:
                self.damaged["the mirror"] = str(error)
        here = {path.name for path in checkpoint_files.all_checkpoints(self.checkpoints)}
        for name in self._checkpoints_to_try(in_mirror | here):
            path = self.checkpoints / name
            owner = checkpoint_files.read_line(path / checkpoint_files.RUN_ID)
            if self.id and owner and owner != self.id:
                damage = f"it is of another run, {owner}"
            elif (damage := checkpoint_files.find_damage(path)) and mirror is not None and name in in_mirror:
                damage = self._fetch(mirror, name)
            if not damage:
                self.restored, self.saved_step = path, self.read_state(path).step
                self.id = self.id or checkpoint_files.read_line(path / checkpoint_files.RUN_ID)
                return
            self.damaged[name] = damage
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.damaged.items())
        remedy = "Put a copy of one in place" if reasons else "Set checkpoint.every so that a run writes some"
        raise ValueError(
            f"run.dir={self.path}: --resume finds no complete, undamaged checkpoint in {self.checkpoints}.{reasons}\n"
            f"{remedy}, or start anew without --resume in another folder."
        )

    def _checkpoints_to_try(self, names: Collection[str]) -> list[str]:
        """The checkpoints to try: all, newest first, or the one that `start_at` names."""
        if self._start_at is None:
            return checkpoint_files.sorted_checkpoints(names)[::-1]
        file = self.checkpoints / self._start_at
        if self._start_at == checkpoint_files.BEST and self._mirror is not None and not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._mirror.fetch_file(file)
        name = checkpoint_files.read_line(file) if file.is_file() else self._start_at
        if name not in names:
            known = ", ".join(checkpoint_files.sorted_checkpoints(names))
            remedy = f"Name one of {known}; `best` needs a run with checkpoint.best" if known else "Start without it"
            raise ValueError(f"--resume-from {self._start_at}: no such checkpoint in {self.checkpoints}. {remedy}.")
        return [name]

    def _fetch(self, mirror: Mirror, name: str) -> str:
        """Replace a missing or damaged checkpoint by that of the mirror; returns why it failed, or an empty string."""
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
        """Make the folder that `finish_checkpoint` renames; OSError if another run's folder has its final name."""
        folder = self.checkpoints / f"step-{step:06d}{checkpoint_files.PARTIAL}"
        final = folder.with_suffix("")
        if final.exists() and not checkpoint_files.belongs_to_run(final, self.id):
            raise OSError(f"{final} already exists, but is not of this run; rename it, or move it away")
        shutil.rmtree(folder, ignore_errors=True)
        if self._lock_file is not None:  # a run folder that was renamed is not made a second time
            self.checkpoints.mkdir(exist_ok=True)
        folder.mkdir(parents=self._lock_file is None)
        try:
            checkpoint_files.write_synced(folder / checkpoint_files.RUN_ID, f"{self.id}\n")
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
        being_copied: str = "",
    ) -> Path:
        """Write the driver's state and the manifest, rename the folder, then point `latest` to it.

        Every file is synced before the next one is written: after a crash at any moment, the newest folder with the
        name of a checkpoint is complete. Older checkpoints beyond `keep`, except `being_copied`, are removed last.
        OSError if the disk is full, or a file of `written` is missing.

        Args:
            best: a metric of the evaluations; the checkpoint with its highest value is kept, and named in `best`.
            written: the files that the learners wrote, by path in the folder.
        """
        if self.metrics.exists():
            checkpoint_files.sync(self.metrics)  # a resumed run appends after its last line
        checkpoint_files.write_synced(folder / STATE_FILE, state.to_json())
        checkpoint_files.write_manifest(folder, written or {})
        final = folder.with_suffix("")
        if final.exists():  # a damaged one, which the run did not resume from
            shutil.rmtree(final)
        folder.rename(final)
        checkpoint_files.sync(self.checkpoints)
        checkpoint_files.replace_synced(self.checkpoints / checkpoint_files.LATEST, f"{final.name}\n")
        self.damaged.pop(final.name, None)
        self.saved_step = state.step
        complete = [
            path
            for path in checkpoint_files.complete_checkpoints(self.checkpoints)
            if path.name not in self.damaged and checkpoint_files.belongs_to_run(path, self.id)
        ]
        kept = [*complete[-keep:], self.checkpoints / being_copied]
        steps = [checkpoint_files.checkpoint_step(path.name) for path in complete]
        if best is not None and (step := best_step(state.evaluations, best, among=steps)) is not None:
            kept.append(self.checkpoints / f"step-{step:06d}")
            checkpoint_files.replace_synced(self.checkpoints / checkpoint_files.BEST, f"{kept[-1].name}\n")
        self.not_removed = tuple(filter(None, (checkpoint_files.remove(path) for path in complete if path not in kept)))
        return final

    @staticmethod
    def read_state(checkpoint: Path) -> RunState:
        """The driver's state; ValueError if this version cannot read it."""
        file = checkpoint / STATE_FILE
        try:
            return RunState.from_json(file.read_text())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not a state that this version reads ({' '.join(str(error).split())}).") from None

    # --- results ---

    def write_rollouts(self, step: int, rows: Sequence[dict[str, Any]], files: PatientFiles) -> None:
        """One file per step and one line per rollout."""
        encode = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
        lines = "".join(encode(row) + "\n" for row in rows)
        for separator in ("\x85", "\u2028", "\u2029"):  # many readers take them for the end of a line
            lines = lines.replace(separator, f"\\u{ord(separator):04x}")
        files.replace(self.rollouts / f"step-{step:06d}.jsonl", as_utf8(lines))

    def write_summary(self, summary: dict[str, Any]) -> None:
        checkpoint_files.replace_synced(self.summary, json.dumps(summary, indent=2) + "\n")


def best_step(
    evaluations: Mapping[int, Mapping[str, float]], metric: str, *, among: Collection[int] | None = None
) -> int | None:
    """The step `among` these with the highest value of a metric; ties go to the first. None if no step has it.

    If `among` is None, all steps count except step 0, which has no checkpoint.
    """
    steps = evaluations.keys() - {0} if among is None else evaluations.keys() & among
    scored = {step: value for step in sorted(steps) if not math.isnan(value := evaluations[step].get(metric, math.nan))}
    return max(scored, key=scored.__getitem__, default=None)


def why_unusable(folder: Path) -> str:
    """Why a new run cannot use this folder; empty if it can. Only a folder that a run made is advised to be removed."""
    if not folder.is_dir() or not any(folder.iterdir()) or _has_no_finished_step(folder):
        return ""
    path = folder if folder.name not in ("", "..") else folder.resolve()
    complete = checkpoint_files.complete_checkpoints(folder / "checkpoints")
    has_log = all((folder / name).is_file() for name in ("config.yaml", "metrics.jsonl"))
    if complete or has_log or (folder / checkpoint_files.RUN_ID).is_file():
        advice = "Go on with it (--resume), write" if complete else "Write"
        return (
            f"run.dir={folder}: already holds a run. {advice} to another folder (run.dir={path}-2), or remove it "
            f"(rm -r {path})."
        )
    names = sorted(file.name for file in folder.iterdir())
    more = ", ..." if len(names) > NAMES_SHOWN else ""
    return (
        f"run.dir={folder}: already holds other files ({', '.join(names[:NAMES_SHOWN])}{more}), but no run. Name a "
        f"new folder, such as run.dir={path / 'run'}."
    )


def _has_no_finished_step(folder: Path) -> bool:
    """Whether the folder holds only files that a run writes before it finishes its first step."""
    rollouts, checkpoints, metrics = folder / "rollouts", folder / "checkpoints", folder / "metrics.jsonl"
    if [path.name for path in folder.iterdir()] == [GIVEN]:
        return True
    if not (rollouts.is_dir() and checkpoints.is_dir()) or any((*rollouts.iterdir(), *checkpoints.iterdir())):
        return False  # no run began here, or it has finished a step
    try:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        only_step_0 = all(json.loads(line)["step"] == 0 for line in lines)
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    return only_step_0 and all(FIRST_NAMES.fullmatch(path.name) for path in folder.iterdir())


def with_date(config: C, models: Iterable[str] = (), *, today: datetime.date | None = None) -> C:
    """The config with `data.date` set, so that a run of several days writes the same prompts each day.

    The date is that of the config, else of the run that is continued, else today. For an evaluation it is the date of
    the run of the first of the `models` that lies in the folder of a run.
    """
    runs = (run for path in models for run in _runs_around(path))
    dates = map(_stored_date, runs) if models else map(_date_of_run, [config])
    date = config.data.date or next(filter(None, dates), today or datetime.date.today())
    return with_values(config, data={"date": date})


def _date_of_run(config: TrainingProgramConfig) -> datetime.date | None:
    folder = Path(config.run.dir)
    if config.checkpoint.mirror is None or (folder / CONFIG).exists():
        return _stored_date(folder)
    with contextlib.suppress(OSError, ValueError), tempfile.TemporaryDirectory() as copied:  # the run will refuse it
        Mirror(config.checkpoint.mirror, waits_s=()).fetch_file(Path(copied, CONFIG))
        return _stored_date(Path(copied))
    return None


def _runs_around(path: str) -> Iterator[Path]:
    """The run folders that contain a model. A checkpoint has a run id too, but no config."""
    folders = dict.fromkeys((*Path(path).absolute().parents, *Path(path).resolve().parents))
    return (
        folder for folder in folders if (folder / checkpoint_files.RUN_ID).is_file() and (folder / CONFIG).is_file()
    )


def config_that_trained_on(source: DatasetConfig, path: str) -> Path | None:
    """The config of the run that made the model `path`, or its start model, if data.train there names this source."""
    seen: set[Path] = set()
    while (folder := next(_runs_around(path), None)) is not None and folder not in seen:
        seen.add(folder)
        try:
            values = from_environment(stored_values(folder / CONFIG))
            below = Path(values["run"]["dir"]).parts
            started_in = Path(*folder.parts[: -len(below)]) if folder.parts[-len(below) :] == below else Path.cwd()
            for entry in values["data"]["train"]:
                trained = DatasetConfig(**{key: entry[key] for key in DatasetConfig.model_fields})
                if is_same_data(source, trained, started_in):
                    return folder / CONFIG
            path = str(started_in / values["model"]["path"])
        except (OSError, ValueError, LookupError, TypeError):  # a config of another version
            return None
    return None


def _stored_date(folder: Path) -> datetime.date | None:
    """`data.date` of the run in a folder; None if there is no run, or it began before there was this key."""
    for file in (folder / RESUMED_CONFIG, folder / CONFIG):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return datetime.date.fromisoformat(from_environment(stored_values(file))["data"]["date"])
    return None
