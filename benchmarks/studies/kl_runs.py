"""The runs of the KL study: what differs between them, and which of them each table compares.

grid      the loss: every estimator at beta 1 and none, by aggregation and by minibatches of a step; one is on-policy
betas     the loss: every estimator by coefficient, with `token_mean` and two minibatches
reward    the reward: k1 to k3 by coefficient, with the advantages `grpo` and `rloo`
lag       the loss: what samples is the learner, or one training step older
ties      the reward: a coefficient so small that it matters only if something divides by it
slower    the loss: every estimator at two coefficients, at a lower rate; with four minibatches per step k1 alone
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.config.grpo import GRPOConfig

NONE = "none"  # the estimator of a run without a KL
LOSS = ("k1", "k2", "k3", "k3 weighted", "k4")
REWARD = ("k1", "k2", "k3")  # k4 equals k1 there
LAGGING = ("k2", "k3", "k3 weighted", "k4")
BETAS = (0.01, 0.03, 0.1, 0.3, 1.0)
LAGGING_BETAS = (0.1, 1.0)
TIES_BETA = 1e-5
RATE, SLOWER_RATE = 5e-4, 2e-4  # learning rates; at the second, runs of four minibatches per step keep what they learn
SLOWER_BETAS = (0.03, 1.0)  # the largest of the source, and that of `grid`
RESPONSES = (8, 2)  # to a problem: of two, most are both right or both wrong
AGGREGATIONS = ("constant", "token_mean", "sequence_mean")
MINIBATCHES = (1, 2, 4)
ADVANTAGES = ("grpo", "rloo")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """One run of the scan. The defaults are those of the quickstart.

    lag: how many training steps what samples is older than the learner.
    responses: to each problem; the fewer, the more problems a step has.
    rate: the learning rate, constant after the warm-up.
    """

    estimator: str
    place: str
    beta: float
    seed: int
    aggregation: str = "token_mean"
    minibatches: int = 2
    advantage: str = "grpo"
    lag: int = 0
    responses: int = 8
    rate: float = RATE

    @property
    def name(self) -> str:
        kind = self.estimator.replace(" ", "-")
        penalty = kind if kind == NONE else f"{kind}-{self.place}-{self.beta:g}"
        few = "" if self.responses == 8 else f"-{self.responses}-responses"
        slower = "" if self.rate == RATE else f"-{self.rate:g}"
        setting = f"{self.aggregation}-{self.minibatches}-{self.advantage}-lag{self.lag}{few}{slower}"
        return f"{penalty}-{setting}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        """The trainer's config of this run, checked as any config is."""
        estimator, _, weighted = self.estimator.partition(" ")
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["rollout"] |= {
            "max_policy_lag": self.lag,
            "samples_per_prompt": self.responses,
            "prompts_per_step": base.rollouts_per_step // self.responses,
        }
        values["learner"]["minibatches_per_epoch"] = self.minibatches
        values["learner"]["optimizer"]["lr"] = self.rate
        values["algo"] |= {
            "kl_coef": self.beta,
            "kl_place": self.place,
            "kl_estimator": "k3" if estimator == NONE else estimator,
            "kl_ratio_weighted": bool(weighted),
            "loss_aggregation": self.aggregation,
            "advantage": self.advantage,
            "importance_correction": "truncated" if self.lag else "none",
        }
        return GRPOConfig.model_validate(values)


def runs_of_seed(seed: int) -> dict[str, list[Run]]:
    """Part of the study -> its runs; a run may be in several parts, as it is the same."""

    def loss(names: Sequence[str], betas: Sequence[float], **of_run: Any) -> list[Run]:
        free = Run(NONE, "loss", 0.0, seed, **of_run)
        return [free, *(Run(name, "loss", beta, seed, **of_run) for name in names for beta in betas)]

    grid = [(aggregation, count) for aggregation in AGGREGATIONS for count in MINIBATCHES]
    return {
        "grid": [run for a, count in grid for run in loss(LOSS, [1.0], aggregation=a, minibatches=count)],
        "betas": loss(LOSS, BETAS),
        "reward": [
            run
            for advantage in ADVANTAGES
            for run in (
                Run(NONE, "loss", 0.0, seed, advantage=advantage),
                *(Run(name, "reward", beta, seed, advantage=advantage) for name in REWARD for beta in BETAS),
            )
        ],
        "lag": [run for lag in (0, 1) for run in loss(LAGGING, LAGGING_BETAS, lag=lag)],
        "ties": [
            run
            for responses in RESPONSES
            for run in (
                Run(NONE, "loss", 0.0, seed, responses=responses),
                Run("k1", "reward", TIES_BETA, seed, responses=responses),
            )
        ],
        "slower": [
            run
            for names, count in ((LOSS, 2), (("k1",), 4))
            for run in loss(names, SLOWER_BETAS, minibatches=count, rate=SLOWER_RATE)
        ],
    }


def all_runs(seeds: Sequence[int]) -> list[Run]:
    """Every run once, seed after seed, so that a scan that was stopped is a whole one of fewer seeds."""
    parts = (part for seed in seeds for part in runs_of_seed(seed).values())
    return list(dict.fromkeys(run for part in parts for run in part))
