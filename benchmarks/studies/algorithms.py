"""Study: every named algorithm trains the quickstart's task through the whole stack.

    python -m benchmarks.studies.algorithms [--only grpo,dapo] [--seeds 0,1,2]

Each algorithm is a run of `rlhf.grpo`, started as a user starts it: configs/quickstart.yaml with the overrides below,
which are the algorithm's own choices. What is not part of an algorithm (batch, learning rate, model) is the same for
all, so this is a test that each learns, not a contest: nothing was tuned for any of them. What single losses and masks
do is the study of objectives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks.studies import report, runs

STEPS = 30
CONFIG = "configs/quickstart.yaml"
QUICK = ("grpo", "dapo")
ENDS = 5  # the first and the last steps, over which means are taken

# name -> (label, overrides of configs/quickstart.yaml); the sources are those of docs/algorithms.md
ALGORITHMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": (
        "GRPO",
        (
            "algo.advantage=grpo", "algo.loss_aggregation=sequence_mean", "algo.kl_estimator=k3", "algo.kl_coef=0.04",
            "algo.kl_ratio_weighted=false",
        ),
    ),
    "dr_grpo": ("Dr. GRPO", ("algo.advantage=dr_grpo", "algo.loss_aggregation=constant")),
    "rloo": (
        "RLOO",
        (
            "algo.advantage=rloo", "algo.loss_aggregation=constant", "algo.constant_length=1",
            "algo.kl_estimator=k1", "algo.kl_place=reward", "algo.kl_coef=0.03",
        ),
    ),
    "reinforce_pp": (
        "REINFORCE++",
        ("algo.advantage=reinforce_pp", "algo.kl_estimator=k1", "algo.kl_place=reward", "algo.kl_coef=0.01"),
    ),
    "reinforce_pp_baseline": (
        "REINFORCE++ with baseline",
        ("algo.advantage=reinforce_pp_baseline", "algo.kl_estimator=k2", "algo.kl_place=loss", "algo.kl_coef=0.01"),
    ),
    "dapo": (
        "DAPO",
        (
            "algo.advantage=grpo", "algo.loss_aggregation=token_mean", "algo.clip_high=0.28",
            "rollout.dynamic_sampling=true",
            "reward=[{name: math, mode: strict, weight: 2.0}, {name: length, max_tokens: 24, buffer_tokens: 4}]",
        ),
    ),
    "gspo": (
        "GSPO",
        (
            "algo.advantage=grpo", "algo.policy_loss=gspo", "algo.loss_aggregation=sequence_mean",
            "algo.clip_low=3e-4", "algo.clip_high=4e-4",
        ),
    ),
    "cispo": ("CISPO", ("algo.advantage=grpo", "algo.policy_loss=cispo", "algo.clip_low=1.0", "algo.clip_high=4.0")),
}  # fmt: skip

EVERY_STEP = ("reward/mean", "policy/loss", "policy/kl_k3", "policy/entropy", "learner/grad_norm")


def overrides(name: str, seed: int) -> list[str]:
    none = "algo.importance_correction=none"  # none of these papers corrects
    common = (*report.RECORDED_WITH, "logging.rollouts=false", "algo.log_kl=true", none)
    return [f"run.seed={seed}", *common, *ALGORITHMS[name][1]]


def summarize(label: str, of_seeds: Sequence[runs.Steps]) -> report.Row:
    """One line of the table: means and extremes over all seeds.

    A metric that is not finite does not reach the log, so a missing one counts as well as a skipped update.
    """
    every = [row for steps in of_seeds for row in steps]
    numbers = [value for row in every for value in row.values() if isinstance(value, int | float)]
    lost = sum(name not in row for row in every for name in EVERY_STEP)
    skipped = sum(int(steps[-1]["learner/updates_skipped"]) for steps in of_seeds)
    first, last = ([row for steps in of_seeds for row in steps[part]] for part in (slice(ENDS), slice(-ENDS, None)))
    return {
        "algorithm": label,
        f"right, steps 1-{ENDS}": round(report.mean(map(right, first)), 3),
        f"right, last {ENDS}": round(report.mean(map(right, last)), 3),
        "by seed": ", ".join(f"{report.mean(map(right, steps[-ENDS:])):.2f}" for steps in of_seeds),
        f"reward, steps 1-{ENDS}": round(report.mean(row["reward/mean"] for row in first), 3),
        f"reward, last {ENDS}": round(report.mean(row["reward/mean"] for row in last), 3),
        "largest KL (k3, nats per token)": max(row["policy/kl_k3"] for row in every),
        "largest clip fraction": max(row.get("policy/clip_fraction", 0.0) for row in every),
        "not finite": sum(not math.isfinite(x) for x in numbers) + lost + skipped,
    }


def right(row: report.Row) -> float:
    """The math reward alone, so that a penalty or a weight does not hide what was learned."""
    return float(row.get("reward/part/math", row["reward/mean"]))


def draw(of_algorithms: dict[str, list[runs.Steps]], path: Path, results: report.Row) -> None:
    drawn, axes = report.figure(1, 2, width=9.5, height=3.4)
    accuracy, kl = axes[0]
    for name, of_seeds in of_algorithms.items():
        at = [row["step"] for row in of_seeds[0]]
        runs.band(accuracy, [list(map(right, steps)) for steps in of_seeds], at, label=ALGORITHMS[name][0])
        runs.band(kl, [[row["policy/kl_k3"] for row in steps] for steps in of_seeds], at)
    accuracy.set(title="share of right answers", xlabel="training step")
    kl.set(title="KL to the start, k3, nats per token", xlabel="training step")
    drawn.legend(loc="outside lower center", ncols=3, fontsize=7)
    report.save(drawn, path, results)


def study_results(
    of_algorithms: dict[str, list[runs.Steps]], seeds: Sequence[int], stamps: Sequence[report.Row]
) -> report.Row:
    """Everything that the JSON of a picture has."""
    curves = {
        name: [{"right": list(map(right, steps)), "kl": [row["policy/kl_k3"] for row in steps]} for steps in of_seeds]
        for name, of_seeds in of_algorithms.items()
    }
    rows = [summarize(ALGORITHMS[name][0], of_seeds) for name, of_seeds in of_algorithms.items()]
    options = f"--seeds {','.join(map(str, seeds))} --only {','.join(of_algorithms)}"
    command = f"python -m benchmarks.studies.algorithms {options}"
    return report.results(command, stamps, seeds=list(seeds), tables={"runs": rows}, runs=curves)


def main(arguments: Sequence[str] | None = None) -> None:
    description = "Train the quickstart's task with every named algorithm."
    parser = report.parser("algorithms", description, trains=True)
    parser.add_argument("--only", help=f"of {','.join(ALGORITHMS)}")
    options = report.parse(parser, arguments)
    data = report.ensure_data(options.data)
    names = options.only.split(",") if options.only else QUICK if options.quick else ALGORITHMS
    if unknown := sorted({*names} - {*ALGORITHMS}):
        parser.error(f"--only: there is no algorithm {', '.join(unknown)}")
    if options.quick:
        options.seeds = options.seeds[:1]
    steps = 6 if options.quick else STEPS  # more updates than the warm-up
    folders = {
        name: [options.output / f"{name}-{seed}" for seed in options.seeds] for name in ALGORITHMS if name in names
    }
    of_algorithms = {
        name: [
            runs.train("grpo", CONFIG, folder, data=data, steps=steps, overrides=overrides(name, seed))
            for seed, folder in zip(options.seeds, of_seeds, strict=True)
        ]
        for name, of_seeds in folders.items()
    }
    stamps = [json.loads((folder / runs.STAMP).read_text()) for of_seeds in folders.values() for folder in of_seeds]
    results = study_results(of_algorithms, options.seeds, stamps)
    report.write_table(options.output / "algorithms", results["tables"]["runs"])
    print(report.markdown(results["tables"]["runs"]))
    draw(of_algorithms, options.output / "algorithms.png", results)


if __name__ == "__main__":
    main()
