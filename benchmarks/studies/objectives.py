"""Study: what each objective and mask does to what a run learns, against the same run without it.

    python -m benchmarks.studies.objectives [--workers 2] [--seeds 0,1,2,3,4] [--only control,maxrl] [--quick]

The situation: what samples is two training steps older than the learner, and a step takes four updates. 40 steps of 128
rollouts at a constant rate: on the quickstart's sums one at which the control falls back and one at which it learns,
and the latter on sums of one to four digits too (`mixed_task.py`). The control has the defaults: PPO's clip, and
importance weights that are cut at 2. Each setting differs from its control in nothing but its keys
(`objectives_runs.py`). Both of a pair begin from the same weights and see the same prompts in the same order; the seed
sets this order and what is sampled.

A run trains in one process (`in_process.py`), in float32: what samples is exactly the learner of two steps before, so
there is nothing here of another engine's rounding. It ends as one file below `--output`; what is there is not run
again, nor what `--known FILE`, the JSON of a picture, has, but for the controls of what is left: another machine rounds
differently, so pairs share the commit too. `--workers 0` only makes tables and picture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import in_process, mixed_task, objectives_report, outcomes, report
from benchmarks.studies.objectives_runs import METRICS, SEEDS, SETTINGS, SITUATIONS, runs_of, with_controls
from rlhf.config.grpo import GRPOConfig
from rlhf.log.reductions import mean_over_updates, to_values
from rlhf.types import Prompt, RolloutGroup, World

MAKERS = {"quickstart": "rlhf.quickstart", "mixed": mixed_task.MODULE}  # of model and data
OVERRIDES = (
    "rollout.max_policy_lag=2", "learner.minibatches_per_epoch=4", "algo.importance_correction=truncated",
    "learner.schedule.name=constant",
)  # fmt: skip


class Trainer(outcomes.Trainer):
    """Logs the tokens that the setting touches, and the accuracy by the number of digits."""

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        super().__init__(config, world)
        self.by_digits: dict[int, list[Prompt]] = defaultdict(list)
        for prompt in self.held_out:
            self.by_digits[mixed_task.digits(prompt)].append(prompt)

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        updates, _ = outcomes.train_step(self.learner, self.config, groups, step)
        logged = to_values(mean_over_updates(updates))
        return {"reward": in_process.mean_reward(groups)} | {name: logged[name] for name in METRICS if name in logged}

    def after_step(self, run: Any, step: int) -> report.Row:
        if (step + 1) % max(1, self.config.run.steps // outcomes.EVALUATIONS):
            return {}
        self.publish_newest(run)
        right = {count: self.accuracy(prompts) for count, prompts in sorted(self.by_digits.items())}
        of_all = sum(right[count] * len(self.by_digits[count]) for count in right) / len(self.held_out)
        return {"held-out": of_all, "by digits": right}


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Objectives and masks, each against the same run without it."
    parser = report.parser("objectives", description, trains=True, scans=True, seeds=SEEDS)
    mixed_task.add_argument(parser)
    parser.add_argument("--only", default=",".join(SETTINGS), help="settings, after their controls")
    parser.add_argument("--rates", default="5e-4,2e-4", help="learning rates")
    parser.add_argument("--known", type=Path, help="JSON of a picture whose runs are not made again")
    options = report.parse(parser, arguments)
    settings, rates = options.only.split(","), list(map(float, options.rates.split(",")))
    situations = [situation for situation in SITUATIONS if situation.rate in rates]
    if unknown := sorted({*settings} - {*SETTINGS}):
        parser.error(f"--only: there is no setting {', '.join(unknown)}")
    study_config, steps = outcomes.study_config, outcomes.STEPS
    if options.quick:
        settings, situations, options.seeds = settings[:2], situations[-2:], options.seeds[:2]
        study_config, steps = outcomes.quick_config, outcomes.QUICK_STEPS
    lines = objectives_report.known_lines(options.known) if options.known else []
    known = {objectives_report.run_of(line) for line in lines}
    folder, data = options.output / "runs", {"quickstart": options.data, "mixed": options.mixed_data}
    for situation in situations:
        if options.workers:
            report.ensure_data(data[situation.task], MAKERS[situation.task])
        base = study_config(data[situation.task], OVERRIDES)
        runs = with_controls([run for run in runs_of(situation, settings, options.seeds) if run not in known])
        in_process.scan(base, runs, folder, workers=options.workers, kind=Trainer)
        lines += [objectives_report.line_of(record) for record in in_process.read(base, runs, folder)]
    objectives_report.write(lines, options.output, steps=steps)


if __name__ == "__main__":
    main()
