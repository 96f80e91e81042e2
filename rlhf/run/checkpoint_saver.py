"""Checkpoints of a run: written while the run goes on, copied to the mirror, tried again after a failure."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.rank_group import RoleCheckpoints
from rlhf.config.base import error_text
from rlhf.config.sections import CheckpointConfig
from rlhf.learner.rank_checkpoint import MODEL_FOLDER
from rlhf.run.checkpoint_files import BEST, LATEST, read_line
from rlhf.run.checkpoint_mirror import Mirror
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState


def tokenizer_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a tokenizer by their paths in its folder; ValueError if it cannot be saved."""
    with tempfile.TemporaryDirectory(prefix="rlhf-tokenizer-") as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # tokenizers raise any type, also on a full disk
            raise ValueError(
                f"model.path={tokenizer.name_or_path}: its tokenizer cannot be saved ({error_text(error)}), "
                f"so no checkpoint or export could hold it. Make room in {tempfile.gettempdir()} if it "
                "is full; else correct its files, or name another model."
            ) from None
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class CheckpointSaver:
    """Saves one checkpoint at a time; first `write_log` writes the rows that wait for room on the disk, or OSError.

    If a checkpoint cannot be written, the run goes on and tries again after the next step: the previous one is
    complete, and ending the run would lose as much.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: RunFolder,
        checkpoints: RoleCheckpoints,
        tokenizer: Any,
        mirror: Mirror | None,
        warn: Callable[[str], None],
        write_log: Callable[[], None] = lambda: None,
    ) -> None:
        self.save_error = ""  # why the newest checkpoint could not be written; empty if it was
        self.writing_step = 0  # the step of the current save, or of the last one; 0 if it failed
        self._tokenizer = tokenizer_files(tokenizer)
        self._config, self._folder, self._mirror, self._warn = config, folder, mirror, warn
        self._checkpoints, self._write_log = checkpoints, write_log
        self._writing: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._has_unsent, self._being_copied = False, ""
        self._removing = asyncio.Lock()  # held while checkpoints are removed, and while one is chosen to be copied

    async def save(self, state: RunState) -> None:
        """Begin to save; returns when the run may change its weights again."""
        await self._finish_writing()
        self.save_error, self.writing_step = "", state.step
        partial: Path | None = None
        try:
            partial = await asyncio.to_thread(self._folder.begin_checkpoint, state.step)
            self._write_log()  # a resumed run does not write rows from before its checkpoint again
            needed, free = await self._checkpoints.bytes(), shutil.disk_usage(self._folder.checkpoints).free
            if free < needed:
                raise OSError(
                    f"{self._folder.checkpoints}: a checkpoint takes {needed:,} bytes, but only {free:,} are free"
                )
            for name, content in self._tokenizer.items():
                file = partial / MODEL_FOLDER / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            await self._checkpoints.save(partial)
        except ClusterError:
            raise
        except Exception as error:
            self.fail(state.step, error, partial)
            return
        self._writing = asyncio.create_task(self._complete(partial, state))

    async def _complete(self, partial: Path, state: RunState) -> None:
        try:
            written = await self._checkpoints.finish_save()
            keep, best = self._config.keep, self._config.best
            async with self._removing:
                await asyncio.to_thread(  # the loop must serve the engines meanwhile
                    self._folder.finish_checkpoint, partial, state,
                    keep=keep, best=best, written=written, being_copied=self._being_copied,
                )  # fmt: skip
        except ClusterError:
            raise
        except Exception as error:
            self.fail(state.step, error, partial)
            return
        for why in self._folder.not_removed:
            self._warn(f"an old checkpoint is still there: {why}. Remove it by hand.")
        if self._mirror is not None:
            self._has_unsent = True
            if self._sending is None or self._sending.done():
                self._sending = asyncio.create_task(self._send(self._mirror))

    async def _send(self, mirror: Mirror) -> None:
        """Copy the best and the newest checkpoint, and again while newer ones are written; the run does not wait."""
        while self._has_unsent:
            await self._send_named(mirror, BEST)
            self._has_unsent = False
            await self._send_named(mirror, LATEST)

    async def _send_named(self, mirror: Mirror, pointer: str) -> None:
        async with self._removing:
            name = read_line(self._folder.checkpoints / pointer)
            checkpoint = self._folder.checkpoints / name
            if not name or not checkpoint.is_dir():
                return
            self._being_copied = name
        others = [self._folder.path / "config.yaml", self._folder.metrics]
        try:
            await asyncio.to_thread(
                mirror.send, checkpoint, others, pointer=pointer, keep=self._config.keep, run_id=self._folder.id
            )
        except Exception as error:
            why = str(error) if isinstance(error, OSError) else error_text(error)
            self._warn(f"{name} was not copied: {why}. The next checkpoint will be.")
        finally:
            self._being_copied = ""

    def fail(self, step: int, error: Exception, partial: Path | None = None) -> None:
        """Warn that the checkpoint of a step could not be written, and remove its partial folder."""
        self.save_error = f"the checkpoint of step {step} could not be written: {error_text(error)}."
        self.writing_step = 0
        remedy = "Make room meanwhile." if isinstance(error, OSError) else "Remove the cause meanwhile."
        self._warn(f"{self.save_error} It is tried again after the next step. {remedy}")
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)

    async def finish(self) -> None:
        """Wait until the save that is under way is complete, and copied; ClusterError if a learner does not end it."""
        await self._finish_writing()
        if self._sending is not None:
            await asyncio.shield(self._sending)

    async def _finish_writing(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)  # if this wait is cancelled, the save goes on, and `close` completes it
            self._writing = None

    async def close(self, within_s: float) -> None:
        """At the end of a run, also of one that failed: complete the save and the copy, if that is possible."""
        await self._end(self._writing, "completed", within_s)
        await self._end(self._sending, "copied", within_s)
        if self._mirror is not None:
            self._mirror.close()

    async def _end(self, task: asyncio.Task[None] | None, what: str, within_s: float) -> None:
        if task is None:
            return
        try:
            done, _ = await asyncio.wait({task}, timeout=within_s)
        finally:
            task.cancel()
        if error := task.exception() if done else f"it took longer than {within_s:g} s":
            self._warn(f"the last checkpoint was not {what}: {error}")
