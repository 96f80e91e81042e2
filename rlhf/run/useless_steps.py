"""Steps that teach the policy nothing: a warning for skipped updates, and the end of the run after many in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf.config.roles import LEARNER
from rlhf.config.sections import RunConfig
from rlhf.log.diagnosis import Diagnosis
from rlhf.log.reductions import UpdateOutcome
from rlhf.types import RolloutGroup, rewards_differ

MAX_SHOWN = 5  # rollouts in a warning
SKIPPED = "every optimizer step was skipped"


def skipped_updates_warnings(
    step: int, updates: Sequence[UpdateOutcome], non_finite: Mapping[str, np.ndarray]
) -> list[str]:
    """A warning with the number of skipped optimizer steps of a step and the reason; none if all were taken.

    `non_finite`: column -> the rollouts with NaN or inf in it, numbered as in rollouts/, if the whole step was skipped
    for them; else {}, and a gradient was not finite.
    """
    skipped = sum(not update.taken for update in updates)
    if not skipped:
        return []
    reasons = []
    for name, rollouts in non_finite.items():
        shown = ", ".join([*map(str, rollouts[:MAX_SHOWN])] + ["..."] * (len(rollouts) > MAX_SHOWN))
        reasons.append(f"{name} of {len(rollouts)} rollouts ({shown})")
    cause = " and ".join(reasons) or "a gradient"
    return [f"step {step}: {skipped} of {len(updates)} optimizer steps were skipped: NaN or inf in {cause}"]


class UselessSteps:
    """Counts steps in a row that taught the policy nothing; the diagnosis says what to change.

    `teachers` give a signal besides the rewards. `loss_teaches`: a loss of the user, or a teacher in the loss, may
    teach where advantages are 0.
    """

    def __init__(
        self, config: RunConfig, diagnosis: Diagnosis, *, teachers: bool = False, loss_teaches: bool = False
    ) -> None:
        self._allowed, self._diagnosis = config.max_useless_steps, diagnosis
        self._teachers, self._loss_teaches = teachers, loss_teaches
        self._budget = min(self._allowed or config.steps, config.steps)
        self._useless: list[str] = []  # the reason of each

    def after_step(
        self, groups: Sequence[RolloutGroup], advantages: np.ndarray, updates: Sequence[UpdateOutcome], *, trained: int
    ) -> None:
        """Count a finished step; `trained` is the number of its rollouts in the loss."""
        policy = [update for update in updates if update.module == LEARNER]
        # advantages alone are no signal: they also depend on the critic, and with a KL in the reward on that KL
        has_signal = self._teachers or rewards_differ(reward for group in groups for reward in group.rewards())
        if not trained:
            self._useless.append("no rollout was trained on")
        elif not any(update.taken for update in policy or updates):  # a critic may learn alone
            self._useless.append(SKIPPED)
        elif not self._loss_teaches and not (advantages.any() and has_signal):
            self._useless.append("no group had a signal")
        else:
            self._useless.clear()

    def check(self) -> None:
        """Raise a RuntimeError if the last `run.max_useless_steps` steps taught the policy nothing."""
        if self._allowed is None or len(self._useless) < self._budget:
            return
        reasons = ", ".join(f"{reason} ({count})" for reason, count in Counter(self._useless).most_common())
        advice = [finding.text for finding in self._diagnosis.now()]
        if SKIPPED in self._useless:
            advice.append("Lower learner.optimizer.lr, or go back to an earlier checkpoint (--resume-from).")
        which = (
            f"all {self._budget} steps of the run" if self._budget < self._allowed else f"the last {self._budget} steps"
        )
        raise RuntimeError(
            f"run.max_useless_steps={self._allowed}: {which} taught the policy nothing: "
            f"{reasons}. {' '.join(advice) or 'rollouts/ in the run folder has the responses.'}"
        )
