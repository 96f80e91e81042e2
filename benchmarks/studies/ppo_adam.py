"""Study: what Adam's epsilon does to whole PPO runs.

    python -m benchmarks.studies.ppo_adam

`rlhf.ppo` on the whole stack with the quickstart's task, three seeds with each variant of Adam. A run has the optimizer
of the original RLHF work, for policy and critic alike: eps 1e-5, both frameworks' betas, no clipping of the gradient's
norm and no warm-up of the learning rate. The policy takes 4 epochs, the critic one. Everything else is
configs/ppo_quickstart.yaml, with half of its rollouts and a critic that learns alone in one step instead of four.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.studies import report, runs

CONFIG = "configs/ppo_quickstart.yaml"
STEPS = 12
VARIANTS = {"torch": "tab:red", "tensorflow": "tab:blue"}
OPTIMIZER = ("optimizer.eps=1.0e-5", "optimizer.betas=[0.9,0.999]", "max_grad_norm=null", "schedule.warmup_steps=0")
OVERRIDES = (
    "rollout.prompts_per_step=128", "learner.epochs_per_step=4", "critic.epochs_per_step=1", "algo.log_kl=true",
    "critic.warmup_steps=1",  # in step 1 the critic learns alone
)  # fmt: skip
QUICK = ("rollout.prompts_per_step=32",)

# metric -> (title, the steps of its line in the table)
METRICS = {
    "reward/mean": ("reward", (-3, None)),
    "policy/kl_response": ("KL to the start, nats per response", (4, 8)),
    "policy/clip_fraction": ("clip fraction", (1, 4)),
    "policy/kl_old": ("KL of a step's updates, nats per token", (1, 4)),
}

Runs = dict[str, dict[int, runs.Steps]]  # by variant and seed


def overrides(variant: str, seed: int, *, quick: bool = False) -> list[str]:
    optimizer = [
        f"{role}.{key}" for role in ("learner", "critic") for key in (f"optimizer.variant={variant}", *OPTIMIZER)
    ]
    return [*OVERRIDES, *(QUICK if quick else ()), *optimizer, f"run.seed={seed}"]


def values(steps: runs.Steps, name: str) -> list[float]:
    """NaN where a step does not have the metric: the policy has none while the critic learns alone."""
    return [step.get(name, float("nan")) for step in steps]


def summarize(of_variants: Runs) -> list[report.Row]:
    """A line for each metric: the mean over some steps, then mean, lowest and highest over the seeds."""
    rows = []
    for name, (label, (first, last)) in METRICS.items():
        by_variant = {
            variant: [float(np.nanmean(values(steps, name)[first:last])) for steps in seeds.values()]
            for variant, seeds in of_variants.items()
        }
        row: report.Row = {"metric": label, "steps": text_of_steps(first, last)}
        for variant, means in by_variant.items():
            low, middle, high = (report.number(float(x)) for x in (min(means), np.mean(means), max(means)))
            row[variant] = f"{middle} ({low} to {high})"
        torch, tensorflow = (by_variant[variant] for variant in VARIANTS)
        row["torch / tensorflow, by seed"] = ", ".join(f"{a / b:.2f}" for a, b in zip(torch, tensorflow, strict=True))
        rows.append(row)
    return rows


def text_of_steps(first: int, last: int | None) -> str:
    return f"last {-first}" if last is None else f"{first + 1} to {last}"


def draw(of_variants: Runs, path: Path) -> None:
    """A panel for each metric: the mean over the seeds, in a band from the lowest to the highest."""
    drawn, axes = report.figure(1, len(METRICS), width=11, height=2.8)
    for panel, (name, (title, _)) in zip(axes[0], METRICS.items(), strict=True):
        for variant, seeds in of_variants.items():
            at = [step["step"] for step in next(iter(seeds.values()))]
            curves = [values(steps, name) for steps in seeds.values()]
            runs.band(panel, curves, at, color=VARIANTS[variant], label=variant, lw=1.5)
        panel.set(title=title, xlabel="training step")
    axes[0, 0].legend()
    report.save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> None:
    options = report.parse(report.parser("ppo_adam", "PPO with both forms of Adam.", trains=True), arguments)
    began = time.monotonic()
    data = report.ensure_data(options.data)
    seeds, steps = (options.seeds[:1], 6) if options.quick else (options.seeds, STEPS)
    of_variants: Runs = {variant: {} for variant in VARIANTS}
    for seed in seeds:
        for variant, of_seeds in of_variants.items():
            folder = options.output / f"{variant}-{seed}"
            line = overrides(variant, seed, quick=options.quick)
            of_seeds[seed] = runs.train("ppo", CONFIG, folder, data=data, steps=steps, overrides=line)
            print(f"{folder.name}: {time.monotonic() - began:.0f} s so far", flush=True)
    rows = summarize(of_variants)
    report.write_table(options.output / "ppo_adam", rows)
    print(report.markdown(rows))
    draw(of_variants, options.output / "ppo_adam.png")


if __name__ == "__main__":
    main()
