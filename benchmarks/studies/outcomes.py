"""Shared by the studies of faults: whole runs of the quickstart's task, and what they have learned at each quarter.

A run trains in one process (`in_process.py`). Its config is loaded as that of any run, and it is all that the learner
is given. With several learners each is a process with a rank of a DeepSpeed world; all of them sample the same
responses, and each computes its own rows.

What a fault does to the size of a batch is a change of the config. What it does to the learning rate replaces the rate
of each update (`Trainer.rates`); everything else about the learner stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies import in_process, report, runs
from rlhf.cluster.rank_group import rows_of_shard
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs, rows_with_gradient
from rlhf.types import PolicyTargets, Prompt, RolloutGroup, World

STEPS, PROMPTS = 40, 16
QUICK_STEPS, QUICK_PROMPTS = 8, 4
EVALUATIONS = 4  # of a run, at equal distances; the last is at its end
SAMPLES = 1  # of each held-out problem


def study_config(data: Path, overrides: Sequence[str] = ()) -> GRPOConfig:
    """The quickstart with a quarter of its rollouts, 4 minibatches, and a cosine that ends at 0."""
    return load_config(
        GRPOConfig,
        ["configs/quickstart.yaml"],
        [
            *report.RECORDED_WITH, f"run.steps={STEPS}", f"model.path={data}/model", f"data.train={data}/train.jsonl",
            f"data.eval={data}/test.jsonl", f"rollout.prompts_per_step={PROMPTS}", "algo.importance_correction=none",
            "learner.minibatches_per_epoch=4", "learner.schedule.min_lr=0.0", "learner.schedule.warmup_steps=0",
            "learner.schedule.warmup_fraction=0.1", "reward={parts: [{name: math, mode: strict}], workers: 1}",
            *overrides,
        ],
    )  # fmt: skip


def quick_config(data: Path, overrides: Sequence[str] = ()) -> GRPOConfig:
    """The same, only to show that it runs."""
    return study_config(data, [f"run.steps={QUICK_STEPS}", f"rollout.prompts_per_step={QUICK_PROMPTS}", *overrides])


class Trainer(in_process.Trainer):
    """Runs of any config with the model and data of the first one, evaluated on held-out problems.

    Attributes:
        rates: the learning rate of every update of the run; None: that of the config's schedule.
    """

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        self.rates: Sequence[float] | None = None
        super().__init__(config, world)
        if config.run.steps == QUICK_STEPS:
            self.held_out = self.held_out[:32]

    def make_learner(self, config: GRPOConfig, world: World) -> Any:
        from rlhf.learner.policy import Learner

        trainer = self

        class WithRates(Learner):
            def next_lr(self) -> float:
                lr = super().next_lr()
                return lr if trainer.rates is None else trainer.rates[self.updates_done - 1]

        return WithRates(config, world)

    def train_step(self, groups: Sequence[RolloutGroup], step: int) -> report.Row:
        train_step(self.learner, self.config, groups, step)
        return {"reward": in_process.mean_reward(groups)}

    def after_step(self, run: Any, step: int) -> report.Row:
        if (step + 1) % max(1, self.config.run.steps // EVALUATIONS):
            return {}
        self.publish_newest(run)
        return {"held-out": self.accuracy(self.held_out)}

    def accuracy(self, prompts: Sequence[Prompt]) -> float:
        """Share of right answers, sampled as in training."""
        return in_process.mean_reward(self.sample(prompts, SAMPLES))


def train_step(learner: Any, config: GRPOConfig, groups: Sequence[RolloutGroup], step: int) -> tuple[Any, int]:
    """The step of `rlhf.grpo`: this rank's metrics of every update, and how many microbatches they had in all."""
    batch = make_batch(groups, mask_truncated=config.algo.mask_truncated)
    advantages = step_advantages(batch, batch.rewards, config.algo.advantage)
    rows = rows_with_gradient(batch, advantages, config)
    epochs = plan_epochs(batch, config, step=step, rows_to_compute=rows)
    learner.start_step(batch.tokens, epochs)
    own = batch.tokens.token_indices(rows_of_shard(epochs[:1], learner.world.shard))
    # the tokens of other shards are not read
    columns = [None if part is None else in_process.column_of(batch, own, part) for part in learner.logprobs()]
    updates = learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), *columns))
    return updates, sum(len(m.microbatches[learner.world.shard]) for epoch in epochs for m in epoch)


# --- the scan ---


def rank_main(rank: int, processes: int, port: int, kind: type[Trainer], base: GRPOConfig, run: Any) -> list[Any]:
    """One run on this rank of a new world."""
    trainer = kind(run.config(base), World(rank, processes, rank, "127.0.0.1", port, threads=1))
    trainer.base = base
    try:
        return trainer.run(run)
    finally:
        trainer.close()
        trainer.learner.close()


def scan(base: GRPOConfig, all_runs: Sequence[Any], folder: Path, *, workers: int, kind: type[Trainer]) -> None:
    """Take every run that has no file yet; those of several learners one after the other, in a world of their own."""
    list(in_process.read(base, all_runs, folder))  # runs of another size are refused before the work
    in_process.scan(base, [run for run in all_runs if run.learners == 1], folder, workers=workers, kind=kind)
    for run in in_process.pending([run for run in all_runs if run.learners > 1], folder) if workers else []:
        began = time.monotonic()
        by_rank = runs.run_world(rank_main, run.learners, kind, base, run)
        assert all(rows == by_rank[0] for rows in by_rank), "the ranks of a world have sampled different responses"
        prompts = run.config(base).rollout.prompts_per_step
        in_process.keep(folder / f"{run.name}.json", run, by_rank[0], prompts=prompts, seconds=time.monotonic() - began)
        print(f"{run.name}: done", flush=True)


def spread(values: Sequence[float]) -> str:
    """Median and range of the seeds; empty where there is none yet."""
    if not values:
        return ""
    low, middle, high = (report.number(float(v)) for v in (min(values), np.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def by_run(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For the JSON of a picture, one line per run: what it was, seconds, and the numbers of its evaluations."""
    lines = []
    for record in records:
        evaluated = [row for row in record["steps"] if "held-out" in row]
        about = {key: value for key, value in record.items() if key not in ("steps", "date")}
        lines.append(about | {key: [row[key] for row in evaluated] for key in evaluated[0]})
    return lines
