"""Keeps the batch of each step with skipped optimizer steps in a file, to show what made a number not finite."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlhf.config.base import reason
from rlhf.log.reductions import UpdateOutcome
from rlhf.types import StepBatch

MAX_KEPT = 10  # files of one process; a run that skips for days would fill the disk
MAX_SHOWN = 5


class SkippedUpdates:
    """Writes `skipped/step-000012.npz` in the run folder, and warns.

    A file has the columns of tokens of the step (`token_ids`, `response_mask`, `rollout_logprobs` and those that the
    learners computed), of its sequences (`cu_seqlens`, `rollouts`, `rollout_tokens`), and of its rollouts (`rewards`,
    `advantages`). Rollouts are numbered as in rollouts/.
    """

    def __init__(self, folder: Callable[[], Path], warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._kept = 0

    def keep(
        self,
        step: int,
        batch: StepBatch,
        updates: Sequence[UpdateOutcome],
        non_finite: Mapping[str, np.ndarray],
        **columns: np.ndarray | None,
    ) -> None:
        """Write the batch and these columns if an optimizer step of it was skipped.

        Args:
            non_finite: column -> its rollouts that were not finite, if the whole step was skipped for them; else {}.
        """
        skipped = sum(not update.taken for update in updates)
        if not skipped:
            return
        reasons = []
        for name, rollouts in non_finite.items():
            shown = ", ".join([*map(str, rollouts[:MAX_SHOWN])] + ["..."] * (len(rollouts) > MAX_SHOWN))
            reasons.append(f"{name} of {len(rollouts)} rollouts ({shown})")
        text = f"step {step}: {skipped} of {len(updates)} optimizer steps were skipped: NaN or inf in "
        text += " and ".join(reasons) or "a gradient"
        if self._kept < MAX_KEPT:
            self._kept += 1
            file = self._folder() / f"step-{step:06d}.npz"
            arrays = {**vars(batch.tokens), "rollouts": batch.rollouts, "rewards": batch.rewards, **columns}
            try:
                file.parent.mkdir(exist_ok=True)
                np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
                text += f"; the batch is in {file}"
            except OSError as error:
                text += f"; the batch could not be written ({reason(error)})"
        self._warn(text)
