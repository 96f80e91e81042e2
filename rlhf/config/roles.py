"""The roles of a run in one table, ROLES. Cluster, plan, doctor and the checks walk `config.roles()`.

A new role is a function here that returns its Role, or None if the config has none, and an entry in ROLES. It names the
class that an actor hosts and the function that estimates its memory, which stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf.config.sections import TrainedConfig

LEARNER, CRITIC, REWARD_MODEL, ENGINE = "learner", "critic", "reward model", "engine"


@dataclass(frozen=True)
class Training:
    """How a role is trained during the run, in all training steps but the first `idle_steps`."""

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
        hosted: module and class that an actor hosts; it is constructed with the config and its `World`.
        memory: module and function that estimates the memory of one actor (`check/memory.py`).
        training: None if the role is not trained.
        guest: shares the GPUs of the learners where they are shared at all (`cluster.placement`).
        scalar: its model gives one number per token, not logits.
        coroutines: the methods of the hosted class are coroutines, and many calls run at once.
        reads: module and function that makes, from the config, a third argument of the hosted class; "": none.
    """

    name: str
    section: str
    model_key: str
    model: str
    count: int
    cpus: float
    gpus: int
    hosted: str
    memory: str
    training: Training | None = None
    guest: bool = False
    scalar: bool = False
    coroutines: bool = False
    reads: str = ""


def learner(config: Any) -> Role:
    """The policy, or the model that a program without engines trains."""
    cluster = config.cluster
    return Role(
        LEARNER, "learner", "model.path", config.model.path, cluster.learners, cluster.cpus_per_learner, _gpus(config),
        hosted=config.hosted_learner, memory="rlhf.check.memory:learner_memory", training=config.training,
        scalar=config.scalar_learner,
    )  # fmt: skip


def critic(config: Any) -> Role | None:
    """PPO's value function, with as many ranks as the policy."""
    if not hasattr(config, "critic"):
        return None
    cluster, (key, model) = config.cluster, config.critic_model
    gpus = 0 if cluster.placement == "colocated" else _gpus(config)
    return Role(
        CRITIC, "critic", key, model, cluster.learners, cluster.cpus_per_learner, gpus,
        hosted="rlhf.learner.critic:Critic", memory="rlhf.check.memory:critic_memory",
        training=config.critic_training, guest=True, scalar=True,
    )  # fmt: skip


def reward_model(config: Any) -> Role | None:
    """Copies of a learned reward. A reward model behind an endpoint is no role."""
    model = getattr(config, "reward_model", None)
    if model is None or model.path is None:
        return None
    return Role(
        REWARD_MODEL, "reward_model", "reward_model.path", model.path, model.replicas, config.cluster.cpus_per_learner,
        _gpus(config), hosted="rlhf.learner.reward_scorer:RewardScorer", memory="rlhf.check.memory:reward_model_memory",
        scalar=True, reads="rlhf.data.templates:reward_input",
    )  # fmt: skip


def engine(config: Any, *, shares_gpus: bool = True) -> Role | None:
    """The vLLM engines. They load last, since an engine takes the memory that is free when it starts."""
    cluster = config.cluster
    if not hasattr(cluster, "engines"):
        return None
    shares = shares_gpus and cluster.placement == "colocated"
    return Role(
        ENGINE, "rollout", "model.path", config.model.path, cluster.engines, cluster.cpus_per_engine,
        0 if shares else _gpus(config) * cluster.tensor_parallel, hosted="rlhf.sampling.engine:RolloutEngine",
        memory="rlhf.check.memory:engine_memory", guest=True, coroutines=True,
        reads="rlhf.data.adapted_layers:adapted_layers",
    )  # fmt: skip


ROLES: tuple[Callable[[Any], Role | None], ...] = (learner, critic, reward_model, engine)


def _gpus(config: Any) -> int:
    return int(config.cluster.device == "cuda")
