"""Study: what Adam's epsilon does to whole PPO runs, with controls of equal step size.

    python -m benchmarks.studies.ppo_adam --output runs/studies/ppo_adam [--workers 2] [--seeds 0,1,2,3,4] [--quick]

Six optimizers of the policy, each with and without a warm-up of its rate, five seeds: 60 runs of 12 steps of the
quickstart's task, as files below `--output`, in the manner of the study of the KL (kl.py): the trainer's own learner,
critic, batches, GAE and graders in one process with one thread, and transformers samples from the learner's weights.

A run is configs/ppo_quickstart.yaml with a quarter of its rollouts (128 per step), a critic that learns alone in one
step instead of four, 4 epochs of 2 minibatches of the policy and one of 4 of the critic, and what the original RLHF
work had for the policy: both frameworks' betas and no clipping of the gradient's norm. The critic's optimizer is the
config's in every run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.studies import in_process, kl, report, runs
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.learner.port import free_port
from rlhf.log.reductions import mean_over_updates
from rlhf.step.advantages import assign_credit, response_kl
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import PolicyTargets, RolloutGroup, ValueTargets, World

CONFIG = "configs/ppo_quickstart.yaml"
STEPS, PROMPTS, SEEDS = 12, 64, range(5)
QUICK_STEPS, QUICK_PROMPTS = 3, 4
LR, EPS, WARMUP = 3e-4, 1e-5, 10  # of 88 updates of the policy
RATE = 1.65  # torch's step over tensorflow's, mean |change| of a weight per training step over a run
MEAN_EPS = 6.3e-5  # of tensorflow's eps_t over the 88 updates, of which the first has 3.2e-4 and the last 3.4e-5
OPTIMIZERS: dict[str, tuple[str, float, float]] = {  # label: variant, eps, rate
    "torch, 1e-5": ("torch", EPS, LR),
    "tensorflow, 1e-5": ("tensorflow", EPS, LR),
    f"tensorflow, 1e-5, rate x {RATE:g}": ("tensorflow", EPS, LR * RATE),
    f"torch, 1e-5, rate / {RATE:g}": ("torch", EPS, LR / RATE),
    f"torch, {MEAN_EPS:g}": ("torch", MEAN_EPS, LR),
    "torch, 1e-8": ("torch", 1e-8, LR),
}
TORCH, TENSORFLOW = list(OPTIMIZERS)[:2]
PAIRS = [(TORCH, TENSORFLOW), *((control, TENSORFLOW) for control in list(OPTIMIZERS)[3:5])]
PAIRS += [(list(OPTIMIZERS)[2], TORCH), (list(OPTIMIZERS)[5], TORCH)]
COLOURS = dict(zip(OPTIMIZERS, ("tab:red", "tab:blue", "tab:cyan", "tab:orange", "tab:green", "0.4"), strict=True))

# column -> (title, first and last step of its mean; a step before which the policy has not learned yet has a KL of 0)
METRICS = {
    "change": ("mean abs. change of a weight in a step, 2 to 12, / 1e-4", 2, 12),
    "clip_fraction": ("clip fraction, 2 to 4", 2, 4),
    "kl_old": ("KL of a step's updates, nats per token, 2 to 4", 2, 4),
    "kl_response": ("KL to the start, nats per response, 5 to 8", 5, 8),
    "kl_all": ("the same, 3 to 12", 3, 12),
    "kl_last": ("the same, 12", 12, 12),
    "reward": ("reward, 10 to 12", 10, 12),
}


@dataclass(frozen=True)
class Run:
    """One run: an optimizer of the policy by its label, the updates of its warm-up, a seed."""

    optimizer: str
    warmup: int
    seed: int

    @property
    def name(self) -> str:
        variant, eps, lr = OPTIMIZERS[self.optimizer]
        return f"{variant}-eps{eps:g}-lr{lr:g}-warmup{self.warmup}-seed{self.seed}"

    def config(self, base: PPOConfig) -> PPOConfig:
        variant, eps, lr = OPTIMIZERS[self.optimizer]
        learner = base.learner
        optimizer = learner.optimizer.model_copy(update={"variant": variant, "eps": eps, "lr": lr})
        # the rate ends at a tenth of its peak, as the config has it
        schedule = learner.schedule.model_copy(update={"warmup_steps": self.warmup, "min_lr": lr / 10})
        learner = learner.model_copy(update={"optimizer": optimizer, "schedule": schedule})
        run = base.run.model_copy(update={"seed": self.seed})
        return base.model_copy(update={"learner": learner, "run": run})


def all_runs(seeds: Sequence[int]) -> list[Run]:
    """Seed after seed, so that a scan that was stopped is a whole one of fewer seeds."""
    return [Run(optimizer, warmup, seed) for seed in seeds for warmup in (0, WARMUP) for optimizer in OPTIMIZERS]


def study_config(data: Path, *, steps: int, prompts: int) -> PPOConfig:
    overrides = [
        f"run.steps={steps}", f"model.path={data}/model", f"data.train={data}/train.jsonl", "data.eval=null",
        "evaluation.every=null", f"rollout.prompts_per_step={prompts}", "algo.log_kl=true",
        "algo.importance_correction=none", "learner.epochs_per_step=4", "critic.epochs_per_step=1",
        "critic.minibatches_per_epoch=4", "critic.warmup_steps=1", "learner.optimizer.betas=[0.9,0.999]",
        "learner.max_grad_norm=null", "learner.schedule.warmup_steps=0",
        "learner.zero_stage=0", "critic.zero_stage=0",  # one rank has nothing to split
        "reward={parts: [{name: math, mode: strict}], workers: 1}",
    ]  # fmt: skip
    return load_config(PPOConfig, [CONFIG], overrides)


class Trainer(kl.Trainer):
    """With a critic; a step is that of `rlhf.ppo`."""

    config: PPOConfig

    def __init__(self, config: PPOConfig) -> None:
        from rlhf.learner.critic import Critic

        super().__init__(config)
        self.critic = Critic(config, World(0, 1, 0, "127.0.0.1", free_port(), threads=1))
        self._critic_start = self._exit_stack.enter_context(TemporaryDirectory(prefix="rlhf-study-"))
        self.critic.save(self._critic_start)
        while (saved := self.critic.save_report()) is None:
            time.sleep(0.01)
        assert saved.error is None, saved.error

    def run(self, run: Run) -> list[report.Row]:
        config = run.config(self.config)
        self.learner.training, self.critic.training = config.training, config.critic_training
        self.critic.load(self._critic_start)
        return super().run(run)

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        config, learner, critic = self.config, self.learner, self.critic
        batch = make_batch(groups, mask_truncated=False)
        epochs = plan_epochs(batch, config, step=step)
        critic_epochs = plan_epochs(batch, config, step=step, training=config.critic_training)
        learner.start_step(batch.tokens, epochs)
        critic.start_step(batch.tokens, critic_epochs)
        old, ref = (in_process.column_of(batch, computed_tokens(batch, epochs), part) for part in learner.logprobs())
        (computed,) = critic.values()
        values = in_process.column_of(batch, computed_tokens(batch, critic_epochs), computed)
        self.compare(batch, old)
        credit = assign_credit(batch, values, old, ref, kl_coef=0.0, algo=config.algo)
        row = kl.statistics(batch, old, ref) | {"kl_response": response_kl(batch, old, ref)}
        critic.update(ValueTargets(values, credit.returns))
        if step < config.critic.warmup_steps:
            return row
        before = [parameter.detach().clone() for parameter in learner.trained.values()]
        learned = mean_over_updates(learner.update(PolicyTargets(credit.advantages, old, ref)))
        changes = [(now.detach() - was).abs() for now, was in zip(learner.trained.values(), before, strict=True)]
        return row | {
            "change": float(torch.cat([change.flatten() for change in changes]).mean()) / 1e-4,
            "clip_fraction": learned["policy/clip_fraction"].value(),
            "kl_old": learned["policy/kl_old"].value(),
            "entropy": learned["policy/entropy"].value(),
            "gradient_norm": learned["learner/grad_norm"].value(),
            "skipped": int(learned["learner/updates_skipped"].value()),
        }


def computed_tokens(batch: Any, epochs: Sequence[Sequence[Any]]) -> np.ndarray:
    """The tokens [T'] of the first epoch, in the order in which a rank computes them."""
    return np.concatenate([batch.tokens.token_indices(rows) for m in epochs[0] for rows in m.microbatches[0]])


# --- tables and picture ---

Records = dict[tuple[int, str], list[dict[str, Any]]]  # by warm-up and optimizer, one per seed


def grouped(records: Sequence[dict[str, Any]]) -> Records:
    groups: Records = {}
    for record in records:
        groups.setdefault((record["warmup"], record["optimizer"]), []).append(record)
    return groups


def of_seeds(records: Sequence[dict[str, Any]], column: str) -> list[float]:
    """Of each run the mean of the column over its steps in METRICS."""
    _, first, last = METRICS[column]
    key = "kl_response" if column.startswith("kl_") and column != "kl_old" else column
    rows = [[row for row in record["steps"] if first <= row["step"] <= last] for record in records]
    return [report.mean(row[key] for row in own) if own else float("nan") for own in rows]  # a quick run is shorter


def spread(values: Sequence[float]) -> str:
    low, middle, high = (report.number(float(f(values))) for f in (min, statistics.median, max))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def runs_table(groups: Records) -> list[report.Row]:
    """A line for each optimizer, with and without a warm-up: the median over the seeds, lowest and highest."""
    return [
        {"policy's Adam, eps": optimizer, "warm-up": f"{warmup} updates" if warmup else "none"}
        | {title: spread(of_seeds(records, column)) for column, (title, *_) in METRICS.items()}
        for (warmup, optimizer), records in groups.items()
    ]


def pairs_table(groups: Records) -> list[report.Row]:
    """The quotient of two optimizers by seed, of what the runs' table has."""
    return [
        {"first": first, "over": second, "warm-up": f"{warmup} updates" if warmup else "none"}
        | {
            title: ", ".join(f"{a / b:.2f}" for a, b in zip(*pair, strict=True))
            for column, (title, *_) in METRICS.items()
            for pair in [[of_seeds(groups[warmup, optimizer], column) for optimizer in (first, second)]]
        }
        for warmup in sorted({warmup for warmup, _ in groups})
        for first, second in PAIRS
        if len(groups.get((warmup, first), [])) == len(groups.get((warmup, second), [])) > 0
    ]


def warmup_table(groups: Records) -> list[report.Row]:
    """The quotient of an optimizer's runs without and with a warm-up, by seed."""
    return [
        {"without / with a warm-up": optimizer}
        | {
            title: ", ".join(f"{a / b:.2f}" for a, b in zip(*pair, strict=True))
            for column, (title, *_) in METRICS.items()
            for pair in [[of_seeds(groups[warmup, optimizer], column) for warmup in (0, WARMUP)]]
        }
        for optimizer in OPTIMIZERS
        if len(groups.get((0, optimizer), [])) == len(groups.get((WARMUP, optimizer), [])) > 0
    ]


def steps_table(groups: Records) -> list[report.Row]:
    """By training step the KL to the start of torch's and tensorflow's runs, and its ratio by seed, by k1 and by k3."""
    rows: list[report.Row] = []
    for warmup in sorted({warmup for warmup, _ in groups}):
        of_torch, of_tensorflow = (groups.get((warmup, optimizer), []) for optimizer in (TORCH, TENSORFLOW))
        pairs = [(a["steps"], b["steps"]) for a in of_torch for b in of_tensorflow if a["seed"] == b["seed"]]
        for place in range(min((len(steps) for steps, _ in pairs), default=0)):
            at = [(first[place], second[place]) for first, second in pairs]
            if not all(row["k3"] for row, _ in at):
                continue  # the policy has not learned yet
            row: report.Row = {"warm-up": f"{warmup} updates" if warmup else "none", "step": at[0][0]["step"]}
            for number, optimizer in enumerate((TORCH, TENSORFLOW)):
                row[f"KL, nats per response: {optimizer}"] = spread([pair[number]["kl_response"] for pair in at])
            for key, title in (("kl_response", "ratio by seed"), ("k3", "ratio of k3, nats per token")):
                row[title] = ", ".join(f"{a[key] / b[key]:.2f}" for a, b in at)
            rows.append(row)
    return rows


def draw(groups: Records, path: Path, results: report.Row) -> None:
    """A line of panels without a warm-up, one with: the mean over the seeds, from the lowest to the highest."""
    shown = {
        "reward": "reward", "kl_response": "KL to the start, nats per response", "clip_fraction": "clip fraction",
        "change": "mean abs. change of a weight, / 1e-4",
    }  # fmt: skip
    warmups = sorted({warmup for warmup, _ in groups})
    drawn, axes = report.figure(len(warmups), len(shown), width=12, height=2.8 * len(warmups), sharey="col")
    for line, warmup in enumerate(warmups):
        for panel, (key, title) in zip(axes[line], shown.items(), strict=True):
            for (own, optimizer), records in groups.items():
                if own == warmup:
                    at = [row["step"] for row in records[0]["steps"] if key in row]
                    curves = [[row[key] for row in record["steps"] if key in row] for record in records]
                    runs.band(panel, curves, at, color=COLOURS[optimizer], label=optimizer, lw=1.3)
            panel.set(title=title if not line else "", xlabel="training step" if warmup == warmups[-1] else "")
        axes[line, 0].set_ylabel(f"warm-up of {warmup} updates" if warmup else "no warm-up")
    axes[0, 0].legend(fontsize=6)
    report.save(drawn, path, results)


def study_results(records: Sequence[dict[str, Any]], groups: Records, command: str) -> report.Row:
    keys = ("reward", "kl_response", "k3", "length", "clip_fraction", "kl_old", "change")
    tables = {
        "runs": runs_table(groups), "pairs": pairs_table(groups), "warmup": warmup_table(groups),
        "steps": steps_table(groups),
    }  # fmt: skip
    lines = [
        {key: record[key] for key in ("optimizer", "warmup", "seed", "seconds", "commit")}
        | {key: [float(f"{row.get(key, 0.0):.3g}") for row in record["steps"]] for key in keys}
        for record in records
    ]
    return report.results(command, records, tables=tables, runs=lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "ppo_adam", "PPO with both forms of Adam, and controls.", trains=True, scans=True, seeds=SEEDS
    )
    options = report.parse(parser, arguments)
    seeds, size = options.seeds, {"steps": STEPS, "prompts": PROMPTS}
    if options.quick:
        seeds, size = seeds[:1], {"steps": QUICK_STEPS, "prompts": QUICK_PROMPTS}
    folder, planned = options.output / "runs", all_runs(seeds)
    config = study_config(report.ensure_data(options.data), **size)
    in_process.scan(config, planned, folder, workers=options.workers, kind=Trainer)
    records = list(in_process.read(config, planned, folder))
    if not records:
        raise ValueError(f"{folder}: there are no runs yet. Take --workers 1 or more.")
    own = ",".join(str(seed) for seed in sorted({record["seed"] for record in records}))
    results = study_results(records, grouped(records), f"python -m benchmarks.studies.ppo_adam --seeds {own}")
    for name, rows in results["tables"].items():
        report.write_table(options.output / name, rows)
        print(report.markdown(rows))
    draw(grouped(records), options.output / "ppo_adam.png", results)


if __name__ == "__main__":
    main()
