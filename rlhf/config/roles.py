"""The roles of a run in one table: what computes, with which model, how many there are, and what each reserves.

Whatever places, estimates, checks or examines a run walks this table; nothing else asks which program it belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.sections import TrainedConfig

LEARNER, CRITIC, REWARD_MODEL, ENGINE = "learner", "critic", "reward model", "engine"


@dataclass(frozen=True)
class Training:
    """How a role is trained during the run.

    Attributes:
        section: its optimizer, schedule and ZeRO stage.
        steps: training steps of the run. waits: the first of them, in which the role does not learn.
    """

    section: TrainedConfig
    epochs_per_step: int
    minibatches_per_epoch: int
    steps: int
    waits: int = 0

    @property
    def updates_per_step(self) -> int:
        return self.epochs_per_step * self.minibatches_per_epoch

    @property
    def total_updates(self) -> int:
        """Planned optimizer steps: N of the role's learning-rate schedule."""
        return self.updates_before(self.steps)

    @property
    def warmup_updates(self) -> int:
        return self.section.schedule.warmup_updates(self.total_updates)

    def updates_before(self, step: int) -> int:
        """Optimizer steps, taken and skipped, before this training step."""
        return max(0, step - self.waits) * self.updates_per_step


@dataclass(frozen=True)
class Role:
    """One kind of actor.

    Attributes:
        name: in messages and metrics; the plural takes an s.
        section: of the config that describes it.
        model_key, model: the key that names its model, and the model.
        count: how many there are, over all nodes.
        cpus, gpus: what each of them reserves; no GPUs on CPU, or where it shares those of the learners.
        training: None where it is not trained.
    """

    name: str
    section: str
    model_key: str
    model: str
    count: int
    cpus: float
    gpus: int
    training: Training | None = None
