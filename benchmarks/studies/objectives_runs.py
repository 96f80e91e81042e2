"""The runs of the study of objectives: what each setting changes, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rlhf.config.grpo import GRPOConfig

SEEDS = range(5)
OWN = "benchmarks/studies/own_loss.py"
OUTSIDE, CLIPPED = "policy/importance_outside_fraction", "policy/clip_fraction"
OFF_POLICY, GEOMETRIC = "policy/off_policy_mask_fraction", "policy/geometric_mask_fraction"
DUAL_CLIPPED = "policy/dual_clip_fraction"
METRICS = (OUTSIDE, CLIPPED, OFF_POLICY, GEOMETRIC, DUAL_CLIPPED, "policy/engine_kl", "policy/entropy")


@dataclass(frozen=True)
class Setting:
    """The keys of `algo` that a setting changes, and the metric of the tokens that it touches.

    control: the setting that it is compared with; the keys that both have are no difference.
    touches: the metric of the tokens that are left out, or whose weight or gradient is cut; empty: it has none.
    """

    label: str
    algo: dict[str, Any] = field(default_factory=dict)
    touches: str = ""
    control: str = "control"


MEAN, ENGINE = {"loss_aggregation": "sequence_mean"}, {"old_policy": "engine", "importance_correction": "none"}
MASKED = {"importance_correction": "masked", "importance_floor": 0.5, "importance_cap": 5.0}
DPPO = {"policy_loss": "dppo_tv", "clip_low": 0.15, "clip_high": 0.15}
GSPO = MEAN | {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
CISPO = {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}
SETTINGS = {
    "control": Setting("the defaults", {}, OUTSIDE),
    "off_policy_mask_0.02": Setting("`off_policy_mask: 0.02`", {"off_policy_mask": 0.02}, OFF_POLICY),
    "off_policy_mask_0.5": Setting("`off_policy_mask: 0.5`", {"off_policy_mask": 0.5}, OFF_POLICY),
    "masked": Setting("`importance_correction: masked`, 0.5 to 5", MASKED, OUTSIDE),
    "geometric_mask": Setting("`geometric_mask: [0.99, 1.01]`", {"geometric_mask": (0.99, 1.01)}, GEOMETRIC),
    "engine": Setting("`old_policy: engine`", ENGINE, CLIPPED),
    "importance_floor": Setting("`importance_floor: 0.5`: weights of 0.5 to 2", {"importance_floor": 0.5}, OUTSIDE),
    "sequence_mean": Setting("`loss_aggregation: sequence_mean`", MEAN, OUTSIDE),
    "sapo": Setting("`policy_loss: sapo`", MEAN | {"policy_loss": "sapo"}, control="sequence_mean"),
    "dppo": Setting("`policy_loss: dppo_tv`, 0.15", DPPO, CLIPPED),
    "gspo": Setting("`policy_loss: gspo`, 3e-4 and 4e-4", GSPO, CLIPPED, control="sequence_mean"),
    "cispo": Setting("`policy_loss: cispo`, 1 and 4", CISPO, CLIPPED),
    "maxrl": Setting("`advantage: maxrl`", {"advantage": "maxrl"}),
    "by_prompt": Setting("aggregation by prompt (ScaleRL)", {"advantage": f"{OWN}:by_prompt"}),
    "dppo_engine": Setting("`policy_loss: dppo_tv`, 0.15, and `old_policy: engine`", ENGINE | DPPO, CLIPPED, "engine"),
    "dual_clip": Setting("`dual_clip: 3`", {"dual_clip": 3.0}, DUAL_CLIPPED),
    "geometric_mask_wide": Setting("`geometric_mask: [0.9, 1.1]`", {"geometric_mask": (0.9, 1.1)}, GEOMETRIC),
    "own": Setting("REINFORCE: a loss of one's own, without a clip", {"policy_loss": f"{OWN}:reinforce"}),
}


class Situation(NamedTuple):
    """A task and a learning rate; the settings of one are compared."""

    task: str
    rate: float


SITUATIONS = [Situation("quickstart", 5e-4), Situation("quickstart", 2e-4), Situation("mixed", 2e-4)]


@dataclass(frozen=True)
class Run:
    setting: str
    task: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task}-{self.rate:g}-{self.setting}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        """The trainer's config of this run, checked as any config is."""
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["learner"]["optimizer"]["lr"] = self.rate
        values["algo"] |= SETTINGS[self.setting].algo
        return GRPOConfig.model_validate(values)


def runs_of(situation: Situation, settings: Sequence[str], seeds: Sequence[int]) -> list[Run]:
    """Setting after setting, so that a scan that was stopped has all pairs of the first ones."""
    return [Run(setting, *situation, seed) for setting in settings for seed in seeds]


def with_controls(runs: Sequence[Run]) -> list[Run]:
    """The runs, after the controls that they are compared with."""
    controls = [replace(run, setting=SETTINGS[run.setting].control) for run in runs]
    return list(dict.fromkeys([*controls, *runs]))
