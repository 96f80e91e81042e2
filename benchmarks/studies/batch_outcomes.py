"""The second half of the study of batch sizes: what a run learns if a size is per device, or an accumulation count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import in_process, outcomes, report
from benchmarks.studies.schedule_outcomes import PEAKS
from rlhf.config.grpo import GRPOConfig

FACTORS = (2, 4, 8)
LEARNERS = (1, 2)
OURS, PER_DEVICE, ACCUMULATED = "sizes are global", "sizes per device", "accumulation count"


@dataclass(frozen=True)
class Outcome:
    """A run whose sizes are wrong by a factor.

    PER_DEVICE: so many processes, each of which samples as many rollouts as one should, and minibatches that grow
    alike. The run sees as many rollouts in all, so it has fewer steps and updates.
    ACCUMULATED: microbatches are so many times smaller, to fit into memory, and the number that an update accumulates
    stays as it was. So an update consumes less, and a step takes more of them.
    """

    fault: str
    factor: int
    peak: float
    learners: int
    seed: int

    @property
    def name(self) -> str:
        learners = f"{self.learners}learners" if self.learners > 1 else f"x{self.factor}"
        return f"{self.fault.replace(' ', '_')}-{self.peak:g}-{learners}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["learner"]["optimizer"]["lr"] = self.peak
        values["cluster"]["learners"] = self.learners
        if self.fault == PER_DEVICE:
            values["rollout"]["prompts_per_step"] *= self.factor
            values["run"]["steps"] //= self.factor
        if self.fault == ACCUMULATED:
            values["learner"]["minibatches_per_epoch"] *= self.factor
        return GRPOConfig.model_validate(values)


def all_runs(seeds: Sequence[int], factors: Sequence[int] = FACTORS) -> list[Outcome]:
    """Seed after seed, so that a scan that was stopped is a whole one of fewer seeds."""
    return [
        Outcome(fault, factor, peak, learners, seed)
        for seed in seeds
        for peak in PEAKS
        for fault, factor, learners in (
            *((OURS, 1, learners) for learners in LEARNERS),
            *((fault, factor, 1) for fault in (PER_DEVICE, ACCUMULATED) for factor in factors),
        )
    ]


def summarize(records: Sequence[dict[str, Any]], base: GRPOConfig) -> list[report.Row]:
    """A line for each fault and factor: sizes, then median and range of the seeds.

    Differences are those of a seed, whose runs begin with the same weights; they compare runs on one learner.
    """
    ours = {(r["peak"], r["seed"]): r for r in records if (r["fault"], r["learners"]) == (OURS, 1)}
    rows = []
    for kind in sorted(dict.fromkeys(map(kind_of, records)), key=lambda kind: kind[0]):
        peak, fault, factor, learners = kind
        chosen = [r for r in records if kind_of(r) == kind]
        config = Outcome(fault, factor, peak, learners, 0).config(base)
        pairs = [(r, ours[peak, r["seed"]]) for r in chosen if (peak, r["seed"]) in ours]
        rows.append(
            {
                "peak": f"{peak:g}",
                "batch size": f"{fault}, {learners} learner{'s' * (learners > 1)}" if fault == OURS else fault,
                "wrong by": f"x {factor}" if factor > 1 else "",
                "rollouts per step": config.rollouts_per_step,
                "rollouts per update": config.rollouts_per_step // config.learner.minibatches_per_epoch,
                "updates": config.training.total_updates,
                "seeds": len(chosen),
                "held-out, half way": outcomes.spread([np.interp(0.5, *by_share(r, base)) for r in chosen]),
                "held-out, at the end": outcomes.spread([by_share(r, base)[1][-1] for r in chosen]),
                "less than ours, by seed": outcomes.spread(
                    [by_share(o, base)[1][-1] - by_share(r, base)[1][-1] for r, o in pairs]
                ),
            }
        )
    return rows


def kind_of(record: dict[str, Any]) -> tuple[float, str, int, int]:
    return record["peak"], record["fault"], record["factor"], record["learners"]


def by_share(record: dict[str, Any], base: GRPOConfig) -> tuple[list[float], list[float]]:
    """The share of all rollouts that were seen before each evaluation, and its accuracy."""
    evaluated = [row for row in record["steps"] if "held-out" in row]
    share = record["prompts"] / (base.run.steps * base.rollout.prompts_per_step)
    return [row["step"] * share for row in evaluated], [row["held-out"] for row in evaluated]


def scan(base: GRPOConfig, folder: Path, *, seeds: Sequence[int], quick: bool, workers: int) -> list[dict[str, Any]]:
    """The records of all runs that are there once the missing ones have been made."""
    planned = all_runs(seeds, FACTORS[-1:] if quick else FACTORS)
    planned = [run for run in planned if run.peak == PEAKS[0] or not quick]
    outcomes.scan(base, planned, folder, workers=workers, kind=outcomes.Trainer)
    return list(in_process.read(base, planned, folder))
