"""The folder of a run: config.yaml, metrics.jsonl, rollouts/, checkpoints/, model/, summary.json.

A checkpoint is written under a temporary name and renamed when it is whole, so that the newest complete one survives
whatever happens while the next is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.config.base import Section
from rlhf.config.load import resolved_yaml
from rlhf.types import RolloutGroup

STATE_FILE = "driver.json"
PARTIAL = ".partial"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in this folder that were written to their end, oldest first; none where there is no folder."""
    return sorted(path for path in folder.glob("step-*") if path.suffix != PARTIAL)


class RunFolder:
    """Paths and files of one run.

    Raises:
        ValueError: the folder already holds a run and this one does not resume it, or there is nothing to resume.
    """

    def __init__(self, path: str | Path, *, resume: bool) -> None:
        self.path = Path(path)
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.summary = self.path / "summary.json"
        self.resume = resume
        holds_a_run = self.path.is_dir() and any(self.path.iterdir())
        if holds_a_run and not resume:
            raise ValueError(
                f"run.dir={self.path}: already holds a run. Go on with it (--resume), write to another folder "
                f"(run.dir={self.path}-2), or remove it (rm -r {self.path})."
            )
        if resume and self.latest_checkpoint() is None:
            raise ValueError(
                f"run.dir={self.path}: --resume finds no complete checkpoint in {self.checkpoints}. Set "
                "checkpoint.every so that a run writes some, or start anew without --resume in another folder."
            )

    def create(self, config: Section) -> None:
        """Make the folders and save the resolved config; a resumed run saves its own beside the first."""
        for folder in (self.path, self.rollouts, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        name = "config.resumed.yaml" if self.resume else "config.yaml"
        (self.path / name).write_text(resolved_yaml(config))

    # --- checkpoints ---

    def latest_checkpoint(self) -> Path | None:
        complete = complete_checkpoints(self.checkpoints)
        return complete[-1] if complete else None

    def begin_checkpoint(self, step: int) -> Path:
        folder = self.checkpoints / f"step-{step:06d}{PARTIAL}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def finish_checkpoint(self, folder: Path, state: dict[str, Any], *, keep: int) -> Path:
        """Write the driver's state, make the folder complete, and remove the oldest beyond `keep`."""
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2))
        final = folder.with_suffix("")
        shutil.rmtree(final, ignore_errors=True)
        folder.rename(final)
        for old in complete_checkpoints(self.checkpoints)[:-keep]:
            shutil.rmtree(old)
        return final

    @staticmethod
    def read_state(checkpoint: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((checkpoint / STATE_FILE).read_text())
        return state

    # --- results ---

    def write_rollouts(self, step: int, groups: Sequence[RolloutGroup], advantages: Sequence[float]) -> None:
        """One file a step, one line a rollout trained on, in the order of the advantages."""
        rows = []
        remaining = iter(advantages)
        for group in groups:
            for sample in group.samples:
                rollout = sample.rollout
                rows.append(
                    {
                        "step": step,
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
                        "advantage": next(remaining),
                        "finish_reason": rollout.finish_reason,
                        "response_tokens": rollout.response_length,
                        "versions": [list(span) for span in rollout.version_spans],
                    }
                )
        lines = "".join(_one_line(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
        (self.rollouts / f"step-{step:06d}.jsonl").write_text(lines)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self.summary.write_text(json.dumps(summary, indent=2) + "\n")


def _one_line(text: str) -> str:
    """Escape what JSON leaves as it is and many readers take for the end of a line."""
    for mark in ("\x85", "\u2028", "\u2029"):
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text
