"""Study: every named algorithm trains the quickstart's task through the whole stack.

    python -m benchmarks.studies.algorithms --output runs/studies/algorithms [--only grpo,dapo]

Each algorithm is a run of `rlhf.grpo`, started as a user starts it: configs/quickstart.yaml with the overrides below,
which are the algorithm's own choices. What is not part of an algorithm (batch, learning rate, model) is the same for
all, so this is a test that each learns, not a contest: nothing was tuned for any of them.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies import report

STEPS = 30
CONFIG = "configs/quickstart.yaml"
ENDS = 5  # the first and the last steps, over which means are taken

# name -> (label, overrides of configs/quickstart.yaml); the sources are those of docs/algorithms.md
ALGORITHMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "grpo": (
        "GRPO",
        ("algo.advantage=grpo", "algo.loss_aggregation=sequence_mean", "algo.kl_estimator=k3", "algo.kl_coef=0.04"),
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


def command(name: str, *, data: Path, folder: Path, steps: int, seed: int) -> list[str]:
    """The command line, as a user would type it."""
    return [
        sys.executable, "-m", "rlhf.grpo", "--config", CONFIG,
        f"run.dir={folder}", f"run.steps={steps}", f"run.seed={seed}", "run.export=false",
        f"model.path={data}/model", f"data.train={data}/train.jsonl", "data.eval=null", "evaluation.every=null",
        "checkpoint.every=null", "logging.wandb.mode=disabled", "logging.rollouts=false", "algo.log_kl=true",
        "algo.importance_correction=none",  # none of these papers corrects
        *ALGORITHMS[name][1],
    ]  # fmt: skip


def read_steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summarize(label: str, steps: Sequence[dict[str, Any]]) -> report.Row:
    """One line of the table.

    A metric that is not finite does not reach the log, so a missing one counts as well as a skipped update.
    """
    numbers = [value for row in steps for value in row.values() if isinstance(value, int | float)]
    lost = sum(name not in row for row in steps for name in EVERY_STEP)
    skipped = int(steps[-1]["learner/updates_skipped"])
    # The math reward alone, so that a penalty or a weight beside it does not hide what was learned.
    right = [row.get("reward/part/math", row["reward/mean"]) for row in steps]
    return {
        "algorithm": label,
        f"right, steps 1-{ENDS}": round(report.mean(right[:ENDS]), 3),
        f"right, last {ENDS}": round(report.mean(right[-ENDS:]), 3),
        f"reward, steps 1-{ENDS}": round(report.mean(row["reward/mean"] for row in steps[:ENDS]), 3),
        f"reward, last {ENDS}": round(report.mean(row["reward/mean"] for row in steps[-ENDS:]), 3),
        "largest KL (k3, nats a token)": max(row["policy/kl_k3"] for row in steps),
        "largest clip fraction": max(row["policy/clip_fraction"] for row in steps),
        "not finite": sum(not math.isfinite(x) for x in numbers) + lost + skipped,
    }


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    drawn, axes = report.figure(1, 2, width=9.5, height=3.4)
    right, kl = axes[0]
    for name, steps in runs.items():
        at = [row["step"] for row in steps]
        right.plot(at, [row.get("reward/part/math", row["reward/mean"]) for row in steps], label=ALGORITHMS[name][0])
        kl.plot(at, [row["policy/kl_k3"] for row in steps])
    right.set(title="share of right answers", xlabel="training step")
    kl.set(title="KL to the start, k3, nats a token", xlabel="training step")
    right.legend(ncols=2, fontsize=7)
    report.save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser("algorithms", "Train the quickstart's task with every named algorithm.", trains=True)
    parser.add_argument("--only", default=",".join(ALGORITHMS), help=f"of {', '.join(ALGORITHMS)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = report.parse(parser, arguments)
    data = report.ensure_data(options.data)
    runs = {}
    for name in options.only.split(","):
        folder = options.output / name
        if not (folder / "summary.json").is_file():
            print(f"{ALGORITHMS[name][0]}: {options.steps} steps", flush=True)
            line = command(name, data=data, folder=folder, steps=options.steps, seed=options.seed)
            subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
        runs[name] = read_steps(folder)
    rows = [summarize(ALGORITHMS[name][0], steps) for name, steps in runs.items()]
    report.write_table(options.output / "algorithms", rows)
    print(report.markdown(rows))
    draw(runs, options.output / "algorithms.png")


if __name__ == "__main__":
    main()
