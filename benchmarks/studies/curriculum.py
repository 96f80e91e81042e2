"""Study: the tokens that a run needs to an accuracy of 0.55, with a curriculum and without.

    python -m benchmarks.studies.curriculum [--workers 2] [--seeds 0,1,2,3,4] [--quick]

Sums of one to four digits (`mixed_task.py`): problems that differ in difficulty, where the last pass rate of a prompt
says something of the next one. A run passes 512 rows ten times, 32 at a step, and the curriculum acts from the second
pass on. Both runs of a seed are those of the trainer at a lag of 0, and differ in `data.curriculum` alone. Tokens are
those of all sampled responses. The accuracy is that of 512 held-out problems, a mean over three evaluations, between
which it is interpolated.

A run trains in one process (`in_process.py`) and ends as one file below `--output`; what is there is not run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import in_process, mixed_task, outcomes, report, runs
from benchmarks.studies.objectives_report import interval
from rlhf.config.grpo import GRPOConfig
from rlhf.types import RolloutGroup, World

SEEDS = range(5)
GOAL = 0.55  # the start model solves 0.32
ROWS = 512
STEPS, PROMPTS, EVERY = 160, 32, 8
SMOOTHED = 3  # evaluations
OVERRIDES = ("learner.schedule.name=constant", "learner.optimizer.lr=5e-4", "learner.minibatches_per_epoch=2")


@dataclass(frozen=True)
class Run:
    curriculum: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{'with' if self.curriculum else 'without'}-seed{self.seed}"

    def config(self, base: GRPOConfig) -> GRPOConfig:
        values = base.model_dump()
        values["run"]["seed"] = self.seed
        values["data"]["curriculum"] = {} if self.curriculum else None
        return GRPOConfig.model_validate(values)


class Trainer(outcomes.Trainer):
    """Logs the sampled tokens so far, and the groups without a signal."""

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        super().__init__(config, world)
        self.prompts = {name: prompts[:ROWS] for name, prompts in self.prompts.items()}

    def begin(self, run: Any) -> GRPOConfig:
        self._tokens = 0
        return super().begin(run)

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        self._tokens += sum(sample.rollout.response_length for group in groups for sample in group.samples)
        equal = report.mean(len({sample.reward for sample in group.samples}) == 1 for group in groups)
        return super().train_step(groups, step) | {"tokens": self._tokens, "equal groups": equal}

    def after_step(self, run: Any, step: int) -> report.Row:
        if (step + 1) % EVERY:
            return {}
        self.publish_newest(run)
        return {"held-out": self.accuracy(self.held_out)}


def curve(record: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Tokens and smoothed accuracy at each evaluation but the first ones."""
    evaluated = [step for step in record["steps"] if "held-out" in step]
    windows = [evaluated[i : i + SMOOTHED] for i in range(len(evaluated) - SMOOTHED + 1)]
    return tuple([report.mean(step[key] for step in window) for window in windows] for key in ("tokens", "held-out"))


def tokens_to_goal(record: dict[str, Any]) -> float:
    """Sampled tokens at which the accuracy first reaches the goal; NaN if it never does."""
    tokens, accuracies = curve(record)
    reached = next((i for i, accuracy in enumerate(accuracies) if accuracy >= GOAL), None)
    if not reached:
        return math.nan if reached is None else tokens[0]
    return float(np.interp(GOAL, accuracies[reached - 1 : reached + 1], tokens[reached - 1 : reached + 1]))


def table(records: Sequence[dict[str, Any]]) -> list[report.Row]:
    """A row for each seed that has both runs, and the mean quotient with its 95% interval by Student's t."""
    of = {(record["curriculum"], record["seed"]): record for record in records}
    rows, quotients = [], []
    for seed in sorted(seed for curriculum, seed in of if curriculum and (False, seed) in of):
        pair = [of[curriculum, seed] for curriculum in (False, True)]
        without, with_it = map(tokens_to_goal, pair)
        quotients.append(quotient := with_it / without)
        equal = [report.mean(step["equal groups"] for step in r["steps"][len(r["steps"]) // 4 :]) for r in pair]
        rows.append(
            {
                "seed": str(seed),
                "thousand tokens, without": thousands(without),
                "with": thousands(with_it),
                "with / without": "" if math.isnan(quotient) else f"{quotient:.2f}",
                "equal groups, without and with": " and ".join(f"{share:.0%}" for share in equal),
                "accuracy at the end": " and ".join(f"{curve(r)[1][-1]:.2f}" for r in pair),
            }
        )
    if len(reached := [quotient for quotient in quotients if not math.isnan(quotient)]) > 1:
        mean, half = interval(reached)
        rows.append(dict.fromkeys(rows[0], "") | {"seed": "mean", "with / without": f"{mean:.2f} ± {half:.2f}"})
    return rows


def thousands(tokens: float) -> str:
    return "not reached" if math.isnan(tokens) else f"{tokens / 1000:.0f}"


def draw(records: Sequence[dict[str, Any]], path: Path, results: report.Row) -> None:
    """Held-out accuracy by tokens, a line for each seed, and the share of groups with equal rewards by step."""
    drawn, axes = report.figure(1, 2, width=8, height=3.2)
    for curriculum, colour in ((False, "0.5"), (True, "C0")):
        own = [record for record in records if record["curriculum"] == curriculum]
        for number, record in enumerate(own):
            tokens, accuracies = curve(record)
            label = ("with" if curriculum else "without") if number == 0 else None
            axes[0][0].plot([count / 1000 for count in tokens], accuracies, color=colour, lw=1, label=label)
        equal = [[step["equal groups"] for step in record["steps"]] for record in own]
        smooth = [np.convolve(shares, np.ones(EVERY) / EVERY, "valid") for shares in equal]
        runs.band(axes[0][1], smooth, range(EVERY, len(equal[0]) + 1), color=colour)
    axes[0][0].axhline(GOAL, color="0.6", lw=1, ls=":")
    axes[0][0].set(xlabel="thousand sampled tokens", ylabel="held-out accuracy")
    axes[0][1].set(xlabel="training step", ylabel="groups with equal rewards")
    axes[0][0].legend()
    report.save(drawn, path, results)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("curriculum", "A curriculum, and none.", trains=True, scans=True, seeds=SEEDS)
    mixed_task.add_argument(parser)
    options = report.parse(parser, arguments)
    steps, prompts = STEPS, PROMPTS
    if options.quick:
        options.seeds, steps, prompts = options.seeds[:1], EVERY * SMOOTHED, 2
    data = report.ensure_data(options.mixed_data, mixed_task.MODULE)
    base = outcomes.study_config(data, [*OVERRIDES, f"run.steps={steps}", f"rollout.prompts_per_step={prompts}"])
    planned = [Run(curriculum, seed) for seed in options.seeds for curriculum in (False, True)]
    in_process.scan(base, planned, options.output / "runs", workers=options.workers, kind=Trainer)
    records = list(in_process.read(base, planned, options.output / "runs"))
    if len(records) < 2:
        raise ValueError(f"{options.output}: there is no pair of runs yet. Take --workers 1 or more.")
    rows = table(records)
    report.write_table(options.output / "curriculum", rows)
    print(report.markdown(rows))
    lines = [
        {key: record[key] for key in ("curriculum", "seed", "seconds", "commit")}
        | dict(zip(("tokens", "held-out"), curve(record), strict=True))
        for record in records
    ]
    command = "python -m benchmarks.studies.curriculum"
    results = report.results(command, records, tables={"tokens": rows}, runs=lines)
    draw(records, options.output / "curriculum.png", results)


if __name__ == "__main__":
    main()
