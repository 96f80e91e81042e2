"""Study: two masks against their control, on a pretrained model: SmolLM2-135M on the task of `make real-model`.

    python -m benchmarks.studies.objectives_real [--workers 1] [--seeds 0,1,2] [--quick]

The runs of `objectives.py`, with its lag, its four updates and its settings, shortened to what a core does in 40
minutes: 12 steps of 64 rollouts. In float32, so that what samples is exactly the learner of two steps before. Held-out
accuracy is measured at the end alone.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import adam, in_process, objectives, objectives_report, report
from benchmarks.studies.objectives_runs import Situation, runs_of
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.types import World

SITUATION = Situation("largest of four", 2e-5)  # the rate of configs/real_model_cpu.yaml
SETTINGS = ("control", "off_policy_mask_0.02", "geometric_mask")
STEPS, PROMPTS, HELD_OUT = 12, 8, 128
QUICK_STEPS, QUICK_PROMPTS, QUICK_HELD_OUT = 2, 2, 4
DIGITS = 2  # of all numbers
MAKE_DATA = "recipes/08-lora-smollm2/make_data.py"


class Trainer(objectives.Trainer):
    """Has problems of one kind, and answers the held-out ones at the end of a run."""

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        super().__init__(config, world)
        self.by_digits = {DIGITS: self.held_out}

    def after_step(self, run: Any, step: int) -> report.Row:
        return super().after_step(run, step) if step + 1 == self.config.run.steps else {}


def study_config(model: Path, task: Path, *, steps: int, prompts: int, held_out: int) -> GRPOConfig:
    overrides = [
        *objectives.OVERRIDES, "learner.schedule.min_lr=0.0", "learner.schedule.warmup_steps=0",
        f"run.steps={steps}", f"rollout.prompts_per_step={prompts}", f"data.eval_rows={held_out}",
        f"model.path={model}", "model.dtype=float32", f"data.train={task}/train.jsonl", f"data.eval={task}/test.jsonl",
        "evaluation.every=null", "reward={parts: [{name: exact}], workers: 1}",
    ]  # fmt: skip
    return load_config(GRPOConfig, ["configs/real_model_cpu.yaml"], overrides)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("objectives_real", "Two masks on a pretrained model.", trains=False, scans=True)
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0, 1, 2], help="0,1,2")
    parser.add_argument("--real-model", type=Path, default=adam.REAL_MODEL, help="SmolLM2-135M; made if not there")
    options = report.parse(parser, arguments)
    settings, size = SETTINGS, {"steps": STEPS, "prompts": PROMPTS, "held_out": HELD_OUT}
    if options.quick:
        settings, options.seeds = settings[:2], options.seeds[:1]
        size = {"steps": QUICK_STEPS, "prompts": QUICK_PROMPTS, "held_out": QUICK_HELD_OUT}
    task = options.output / "task"
    if options.workers:
        adam.real_model(options.real_model)
        if not (task / "test.jsonl").is_file():
            runpy.run_path(MAKE_DATA)["write_task"](task, 0)
    base = study_config(options.real_model, task, **size)
    runs, folder = runs_of(SITUATION, settings, options.seeds), options.output / "runs"
    in_process.scan(base, runs, folder, workers=options.workers, kind=Trainer)
    lines = [objectives_report.line_of(record) for record in in_process.read(base, runs, folder)]
    if not lines:
        raise ValueError(f"{options.output}: there are no runs yet. Take --workers 1 or more.")
    tables = {"largest": objectives_report.table(lines)}
    print(report.markdown(tables["largest"]))
    columns = objectives_report.COLUMNS
    of_runs = {"columns": columns, "rows": [[line[key] for key in columns] for line in lines]}
    command = "python -m benchmarks.studies.objectives_real"
    seeds = sorted({line["seed"] for line in lines})
    results = report.results(command, lines, steps=size["steps"], seeds=seeds, tables=tables, runs=of_runs)
    report.save_results(results, options.output / "objectives_real.json")


if __name__ == "__main__":
    main()
