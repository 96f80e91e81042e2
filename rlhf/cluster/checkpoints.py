"""Checkpoints of the trained roles: every rank writes its own part while the run goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rlhf.cluster.actors import ClusterError
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.roles import LEARNER
from rlhf.types import WrittenFile

FIRST_POLL_S, LAST_POLL_S = 0.05, 2.0  # seconds between two checks whether the ranks have written their files


class Checkpoints:
    """One save at a time.

    Args:
        trained: the ranks of each trained role, by its name.
    """

    def __init__(self, trained: Callable[[], Mapping[str, RankGroup]]) -> None:
        self._trained = trained
        self._saving = Path()

    async def bytes(self) -> int:
        """Bytes that `save` will write, over all ranks."""
        return sum([sum(await ranks.call("checkpoint_bytes")) for ranks in self._trained().values()])

    async def save(self, folder: Path) -> None:
        """Begin to write weights and optimizer state of every trained role; `saved` waits for the end."""
        self._saving = folder
        for name, ranks in self._trained().items():
            part = folder_of(name, folder)
            part.mkdir(exist_ok=True)
            await ranks.call("save", str(part))

    async def saved(self) -> dict[str, WrittenFile]:
        """Wait until every rank has written what `save` began.

        Returns:
            The files by path in the folder.

        Raises:
            OSError: the first rank's error from its disk; no rank is writing any more.
            ClusterError: the deadline of an update has passed, for example on a file system that hangs.
        """
        files: dict[str, WrittenFile] = {}
        errors, wait_s, began = [], FIRST_POLL_S, time.monotonic()
        for name, ranks in self._trained().items():
            deadline_s = ranks.update_deadline_s
            while None in (reports := await ranks.call("saved", deadline_s=deadline_s)):
                if time.monotonic() - began > deadline_s:
                    raise ClusterError(f"{self._saving}: not written within {deadline_s:.0f} s. Does the disk hang?")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LAST_POLL_S)
            below = folder_of(name, self._saving).relative_to(self._saving.resolve())
            for report in reports:
                files |= {(below / file).as_posix(): written for file, written in report.files.items()}
                errors += [report.error] if report.error else []
        if errors:
            raise OSError(errors[0])
        return files


def folder_of(role: str, checkpoint: Path) -> Path:
    """The policy's files are in the checkpoint itself, those of another role in a folder of its name."""
    return checkpoint.resolve() if role == LEARNER else checkpoint.resolve() / role
