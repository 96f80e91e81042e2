"""The whole config of a PPO run: the GRPO config with a critic and per-token rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rlhf.config.base import FilePath
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Training
from rlhf.config.sections import AlgoConfig, Fraction, KLEstimator, NonNegativeInt, TrainedConfig


class PPOAlgoConfig(AlgoConfig):
    """The policy loss as in GRPO; advantages by GAE, and by default the KL in the reward."""

    advantage: Literal["gae"] = Field(  # type: ignore[assignment]
        "gae", description="generalized advantage estimation with the critic's values; for the others use rlhf.grpo"
    )
    kl_estimator: KLEstimator = Field("k1", description="estimator of KL(policy || reference)")
    kl_place: Literal["loss", "reward"] = Field(
        "reward", description="where the KL penalty goes; in the reward it is per token"
    )
    gamma: Fraction = Field(1.0, description="discount per token")
    lam: Fraction = Field(0.95, description="GAE's lambda; 1 is the return minus the value, 0 one step ahead")
    whiten_advantages: bool = Field(True, description="give advantages mean 0 and variance 1 over the step's tokens")
    whiten_rewards: Literal["none", "scale", "shift"] = Field(
        "none",
        description="give per-token rewards variance 1: with the same mean (scale) or with mean 0 (shift)",
    )
    reward_clip: PositiveFloat | None = Field(
        None, description="rewards are clipped to +-this, before the KL; null: no clipping"
    )
    kl_controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="keep kl_coef fixed, or adapt it so that the KL to the reference approaches kl_target"
    )
    kl_target: PositiveFloat = Field(6.0, description="target of the adaptive controller, nats per response")
    kl_horizon: PositiveInt = Field(
        10_000, description="rollouts, of the adaptive controller; a smaller value reacts faster"
    )


class CriticConfig(TrainedConfig):
    """The value function: a second model with as many ranks as the policy, trained on the same rollouts."""

    path: FilePath | None = Field(
        None,
        description="start model; a reward model keeps its head, divided by the recorded std of its scores; "
        "null: model.path with a head of zeros",
    )
    epochs_per_step: PositiveInt | None = Field(
        None, description="passes of the critic over the rollouts of a step; null: as many as the policy"
    )
    minibatches_per_epoch: PositiveInt | None = Field(
        None, description="optimizer steps of the critic in a pass; null: as many as the policy"
    )
    value_clip: PositiveFloat | None = Field(
        0.2, description="largest change of a value from its old value that the loss trains; null: no bound"
    )
    warmup_steps: NonNegativeInt = Field(
        0, description="first training steps, in which only the critic learns; the policy's schedule starts after them"
    )


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
        algo, critic = self.algo, self.critic
        if critic.warmup_steps >= self.run.steps:
            yield (
                f"critic.warmup_steps={critic.warmup_steps}: the run has run.steps={self.run.steps}, so the policy "
                "would never be updated. Shorten the warm-up or run longer."
            )
        if algo.kl_controller == "adaptive" and not self.kl_in_reward:
            yield (
                f"algo.kl_controller=adaptive with algo.kl_coef={algo.kl_coef} and algo.kl_place={algo.kl_place}: the "
                "controller multiplies a coefficient in the reward. Set kl_place=reward and a kl_coef above 0, or "
                "kl_controller=fixed."
            )
