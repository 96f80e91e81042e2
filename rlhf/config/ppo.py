"""The whole config of a PPO run: the GRPO config with a critic and per-token rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt

from rlhf.config.base import FilePath, Fraction, NonNegativeInt, key
from rlhf.config.conditions import unread_keys
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Training
from rlhf.config.sections import AlgoConfig, KLEstimator, TrainedConfig


class PPOAlgoConfig(AlgoConfig):
    """The policy loss as in GRPO; advantages by GAE, and by default the KL in the reward."""

    advantage: Literal["gae"] = key("gae", "generalized advantage estimation; for the others use rlhf.grpo")
    kl_estimator: KLEstimator = key("k1", "estimator of KL(policy || reference)")
    kl_place: Literal["loss", "reward"] = key("reward", "where the KL penalty goes; in the reward it is per token")
    gamma: Fraction = key(1.0, "discount per token")
    lam: Fraction = key(0.95, "GAE's lambda; 1 is the return minus the value, 0 one step ahead")
    whiten_advantages: bool = key(True, "give advantages mean 0 and variance 1 over the step's tokens")
    whiten_rewards: Literal["none", "scale", "shift"] = key(
        "none", "give per-token rewards variance 1: with the same mean (scale) or with mean 0 (shift)"
    )
    reward_clip: PositiveFloat | None = key(None, "rewards are clipped to +-this, before the KL; null: no clipping")
    kl_controller: Literal["fixed", "adaptive"] = key("fixed", "adaptive: kl_coef changes to bring the KL to kl_target")
    kl_target: PositiveFloat = key(6.0, "target of the adaptive controller, nats per response")
    kl_horizon: PositiveInt = key(10_000, "rollouts, of the adaptive controller; a smaller value reacts faster")


class CriticConfig(TrainedConfig):
    """The value function: a second model with as many ranks as the policy, trained on the same rollouts."""

    path: FilePath | None = key(
        None,
        "start model; of a reward model the head is divided by the std of its scores; null: model.path, head of zeros",
        resume="free",
    )
    epochs_per_step: PositiveInt | None = key(None, "its passes over the rollouts of a step; null: as the policy")
    minibatches_per_epoch: PositiveInt | None = key(None, "its optimizer steps in a pass; null: as the policy")
    value_clip: PositiveFloat | None = key(0.2, "largest change of a value from its old value; null: no bound")
    warmup_steps: NonNegativeInt = key(0, "first training steps without the policy, whose schedule starts after them")


class PPOConfig(GRPOConfig):
    """Everything that `python -m rlhf.ppo` reads."""

    program: ClassVar[str] = "ppo"

    algo: PPOAlgoConfig = PPOAlgoConfig()
    critic: CriticConfig = CriticConfig()

    @property
    def training(self) -> Training:
        return dataclasses.replace(super().training, idle_steps=self.critic.warmup_steps)

    @property
    def critic_training(self) -> Training:
        """How the critic is trained: with the policy's epochs and minibatches where the critic sets none."""
        critic, learner = self.critic, self.learner
        return Training(
            critic,
            critic.epochs_per_step or learner.epochs_per_step,
            critic.minibatches_per_epoch or learner.minibatches_per_epoch,
            self.run.steps,
        )

    @property
    def critic_model(self) -> tuple[str, str]:
        """The key that names the critic's model, and the model."""
        return ("critic.path", self.critic.path) if self.critic.path else ("model.path", self.model.path)

    @property
    def update_plan(self) -> dict[str, int]:
        return super().update_plan | {"critic.warmup_steps": self.critic.warmup_steps}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        yield from unread_keys(self, {"algo.kl_controller": "algo.kl_place=reward and algo.kl_coef"})
        run, critic = self.run, self.critic
        if critic.warmup_steps >= run.steps:
            reason = f"the run has {run.steps=}, so the policy would never be updated. Shorten it, or run longer."
            yield f"{critic.warmup_steps=}: {reason}"
        if self.algo.teacher is not None:
            yield "algo.teacher: advantages of rlhf.ppo are those of the critic. Use rlhf.grpo, or remove the key."
