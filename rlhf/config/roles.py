"""The roles of a run in one table: name, section, model, number of actors, and what each actor reserves.

Cluster, plan, doctor and the checks walk this table, so they need not know which program a config belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf.config.sections import TrainedConfig

LEARNER, CRITIC, REWARD_MODEL, ENGINE = "learner", "critic", "reward model", "engine"


@dataclass(frozen=True)
class Training:
    """How a role is trained during the run.

    Attributes:
        section: optimizer, schedule and ZeRO stage of the role.
        steps: training steps of the run.
        idle_steps: first training steps, in which the role does not learn.
    """

    section: TrainedConfig
    epochs_per_step: int
    minibatches_per_epoch: int
    steps: int
    idle_steps: int = 0

    @property
    def updates_per_step(self) -> int:
        return self.epochs_per_step * self.minibatches_per_epoch

    @property
    def total_updates(self) -> int:
        """Planned optimizer steps: N of the role's learning-rate schedule."""
        return self.updates_before(self.steps)

    @property
    def counted_as(self) -> str:
        """The product of keys that gives `total_updates`, for messages."""
        steps = "(run.steps - critic.warmup_steps)" if self.idle_steps else "run.steps"
        return f"{steps} x epochs_per_step x minibatches_per_epoch"

    @property
    def warmup_updates(self) -> int:
        return self.section.schedule.warmup_updates(self.total_updates)

    @property
    def schedule_arguments(self) -> dict[str, Any]:
        """The arguments of `learning_rate` except the optimizer step."""
        shape = self.section.schedule.model_dump(exclude={"warmup_steps", "warmup_fraction"})
        peak, updates = self.section.optimizer.lr, self.total_updates
        return shape | {"lr": peak, "total_updates": updates, "warmup_steps": self.warmup_updates}

    def updates_before(self, step: int) -> int:
        """Optimizer steps, taken and skipped, before this training step."""
        return max(0, step - self.idle_steps) * self.updates_per_step


@dataclass(frozen=True)
class Role:
    """One kind of actor.

    Attributes:
        name: as messages and metrics show it; the plural takes an s.
        section: the section of the config that describes the role.
        model_key, model: the key that names the model, and its value.
        count: actors of the role, over all nodes.
        cpus, gpus: what each actor reserves; 0 GPUs on CPU, or if it shares the GPUs of the learners.
        training: None if the role is not trained.
    """

    name: str
    section: str
    model_key: str
    model: str
    count: int
    cpus: float
    gpus: int
    training: Training | None = None
