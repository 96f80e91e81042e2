"""The second half of the study of the schedule: what a rate that is wrong does to what a run learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies import in_process, outcomes, report
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Training

SCHEDULES = ("cosine", "linear")
PEAKS = (2e-4, 5e-4)  # one at which no run falls back, and the quickstart's
PROCESSES = (2, 4, 8)  # whose scheduler is simulated
LEARNERS = (1, 2)  # of the trainer
UPDATES_PER_STEP = 4


@dataclass(frozen=True)
class Outcome:
    """A run whose scheduler makes `steps_per_update` steps at each update; 1 is this trainer's own schedule."""

    schedule: str
    peak: float
    steps_per_update: int
    learners: int
    seed: int

    @property
    def name(self) -> str:
        learners = f"{self.learners}learners" if self.learners > 1 else f"x{self.steps_per_update}"
        return f"{self.schedule}-{self.peak:g}-{learners}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["learner"]["schedule"]["name"] = self.schedule
        values["learner"]["optimizer"]["lr"] = self.peak
        values["cluster"]["learners"] = self.learners
        return GRPOConfig.model_validate(values)


def all_runs(seeds: Sequence[int]) -> list[Outcome]:
    """Seed after seed, so that a scan that was stopped is a whole one of fewer seeds."""
    return [
        Outcome(schedule, peak, times, learners, seed)
        for seed in seeds
        for schedule in SCHEDULES
        for peak in PEAKS
        for times, learners in (*((1, n) for n in LEARNERS), *((p, 1) for p in PROCESSES))
    ]


class Trainer(outcomes.Trainer):
    def begin(self, run: Any) -> GRPOConfig:
        config = super().begin(run)
        self.rates = None if run.steps_per_update == 1 else simulated_rates(config.training, run.steps_per_update)
        return config


def simulated_rates(training: Training, steps_per_update: int) -> list[float]:
    """Rates of all updates of a run, from transformers' scheduler stepped so often at each of them."""
    from benchmarks.studies.schedule import their_rates

    updates, peak = training.total_updates, training.section.optimizer.lr
    return their_rates(
        training.section.schedule.name, peak, updates, total=updates, steps_per_update=steps_per_update
    )  # fmt: skip


def label(steps_per_update: int, learners: int) -> str:
    """Where such rates come from."""
    if steps_per_update == 1:
        return f"this trainer, {learners} learner{'s' * (learners > 1)}"
    counted = f", or N without the {UPDATES_PER_STEP} minibatches" if steps_per_update == UPDATES_PER_STEP else ""
    return f"stepped once per process, {steps_per_update} processes{counted}"


def summarize(records: Sequence[dict[str, Any]]) -> list[report.Row]:
    """A line for each schedule, peak and way to step: median and range of the seeds.

    Differences are those of a seed, whose runs begin with the same weights and see the same prompts; they compare runs
    on one learner.
    """
    ours = {(r["schedule"], r["peak"], r["seed"]): r for r in records if kind_of(r)[2:] == (1, 1)}
    rows = []
    for kind in dict.fromkeys(map(kind_of, records)):
        schedule, peak, times, learners = kind
        chosen = [r for r in records if kind_of(r) == kind]
        pairs = [(r, ours[schedule, peak, r["seed"]]) for r in chosen if (schedule, peak, r["seed"]) in ours]
        rows.append(
            {
                "schedule": schedule,
                "peak": f"{peak:g}",
                "rates of": label(times, learners),
                "seeds": len(chosen),
                "held-out, half way": outcomes.spread([held_out(r)[len(held_out(r)) // 2 - 1] for r in chosen]),
                "held-out, at the end": outcomes.spread([held_out(r)[-1] for r in chosen]),
                "less than ours, by seed": outcomes.spread([held_out(o)[-1] - held_out(r)[-1] for r, o in pairs]),
            }
        )
    return rows


def kind_of(record: dict[str, Any]) -> tuple[str, float, int, int]:
    return record["schedule"], record["peak"], record["steps_per_update"], record["learners"]


def held_out(record: dict[str, Any]) -> list[float]:
    """The accuracy at each evaluation."""
    return [row["held-out"] for row in record["steps"] if "held-out" in row]


def scan(data: Path, folder: Path, *, seeds: Sequence[int], quick: bool, workers: int) -> list[dict[str, Any]]:
    """The records of all runs that are there once the missing ones have been made."""
    base = outcomes.quick_config(data) if quick else outcomes.study_config(data)
    planned = all_runs(seeds)
    if quick:
        planned = [Outcome(SCHEDULES[0], PEAKS[0], times, 1, seeds[0]) for times in (1, PROCESSES[-1])]
    outcomes.scan(base, planned, folder, workers=workers, kind=Trainer)
    return list(in_process.read(base, planned, folder))
