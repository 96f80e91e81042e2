"""Study: the learning rate that an optimizer holds, right and wrong in two ways, and what it does to accuracy.

    python -m benchmarks.studies.schedule [--workers 2] [--seeds 0,1,2,3,4] [--quick]

Rates: constant, linear and cosine, each with a warm-up, for 1 and 4 PPO epochs and 1 and 4 minibatches. Ours: ranks of
a DeepSpeed world of 1, 2 or 4 processes get the config of such a run, take every optimizer step of it (of a toy
module), and the rate is read from the optimizer. Next to it:

    stepped once per process   the usual loop of `accelerate` in worlds of the same sizes: model, optimizer and
                               transformers' scheduler through `prepare`, then step and step. The prepared scheduler
                               steps once for each process, because it assumes that more processes mean fewer steps
                               over a data set; PPO takes the same number of updates.
    N counted as rollouts      transformers' scheduler on one process, told that the run has as many updates as training
                               steps: without epochs and minibatches.

Outcomes: whole runs (`outcomes.py`), ours with 1 and 2 learners, and with the rates that a scheduler gives which steps
2, 4 or 8 times per update. With 4 minibatches the second fault gives the same rates as 4 processes do. Each run ends as
one file below `--output`; what is there is not run again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies import outcomes, report, runs, schedule_outcomes
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config

PEAK = 1e-5
STEPS = 20
WARMUP_FRACTION = 0.1
SCHEDULES = ("constant", "linear", "cosine")
EPOCHS = (1, 4)
MINIBATCHES = (1, 4)
PROCESSES = (1, 2, 4)


def warmup_of(updates: int) -> int:
    return math.ceil(WARMUP_FRACTION * updates)


@dataclass(frozen=True)
class Run:
    """Everything that determines the intended curve; the number of processes does not."""

    schedule: str
    epochs: int
    minibatches: int
    steps: int

    @property
    def updates(self) -> int:
        return self.steps * self.epochs * self.minibatches

    @property
    def warmup(self) -> int:
        return warmup_of(self.updates)

    def config(self, learners: int) -> GRPOConfig:
        """The config of such a run, loaded as any other; nowhere does it say N."""
        overrides = [
            f"run.steps={self.steps}", f"learner.epochs_per_step={self.epochs}",
            f"learner.minibatches_per_epoch={self.minibatches}", f"learner.optimizer.lr={PEAK}",
            f"learner.schedule.name={self.schedule}", "learner.schedule.min_lr=0.0", "learner.schedule.warmup_steps=0",
            f"learner.schedule.warmup_fraction={WARMUP_FRACTION}", f"cluster.learners={learners}",
        ]  # fmt: skip
        return load_config(GRPOConfig, ["configs/quickstart.yaml"], overrides)

    def intended(self, update: int) -> float:
        """The rate of update 1..N, by hand: a ramp, then one fall to 0 at N (or none)."""
        if update <= self.warmup:
            return PEAK * update / self.warmup
        p = (update - self.warmup) / (self.updates - self.warmup)
        return PEAK * {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}[self.schedule]


def all_runs(steps: int) -> list[Run]:
    return [Run(name, e, m, steps) for name in SCHEDULES for e in EPOCHS for m in MINIBATCHES]


# --- rates ---


def rates_in_world(rank_main: Callable[..., Any], processes: int, of_runs: Sequence[Run]) -> list[list[float]]:
    """Rates by run and update from a new world, in which all ranks must agree."""
    by_rank: list[list[list[float]]] = runs.run_world(rank_main, processes, list(of_runs))
    assert all(rates == by_rank[0] for rates in by_rank), "the ranks of a world hold different learning rates"
    return by_rank[0]


def our_rank(rank: int, processes: int, port: int, of_runs: Sequence[Run]) -> list[list[float]]:
    """One rank of our learner, without its model: DeepSpeed ZeRO-2, every optimizer step of each run."""
    import torch

    from rlhf.learner.rank import TrainedRank
    from rlhf.types import World

    world = World(rank, processes, rank, "127.0.0.1", port, threads=1)
    rates_of_runs = []
    for run in of_runs:
        config = run.config(processes)
        trained = TrainedRank(world, name="learner", training=config.training, model=config.model, device="cpu")
        trained.wrap(torch.nn.Sequential(OrderedDict(transformer=torch.nn.Linear(4, 1))))
        rates = []
        for _ in range(run.updates):
            trained.take_step([torch.ones(1, 4)], lambda x: (trained.deepspeed(x).sum(), {}))  # noqa: B023 - at once
            rates.append(float(trained.deepspeed.optimizer.param_groups[0]["lr"]))
        rates_of_runs.append(rates)
    trained.close()
    return rates_of_runs


def accelerate_rank(rank: int, processes: int, port: int, of_runs: Sequence[Run]) -> list[list[float]]:
    """One rank of the usual loop around `accelerate`, with its default settings."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes
    rates_of_runs = []
    for run in of_runs:
        module = torch.nn.Linear(4, 1)
        plain = torch.optim.AdamW(module.parameters(), lr=PEAK)
        model, optimizer, scheduler = accelerator.prepare(
            module, plain, their_schedule(run.schedule, plain, run.updates)
        )
        rates = []
        for _ in range(run.updates):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            rates.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rates_of_runs.append(rates)
    accelerator.end_training()
    return rates_of_runs


def their_schedule(schedule: str, optimizer: Any, total: int) -> Any:
    """transformers' scheduler of a run that is said to have `total` updates."""
    from transformers import get_scheduler

    name = "constant_with_warmup" if schedule == "constant" else schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup_of(total), num_training_steps=total)


def their_rates(schedule: str, peak: float, updates: int, *, total: int, steps_per_update: int = 1) -> list[float]:
    """Rates of all updates of a run on one process, if transformers' scheduler is told that there are `total`."""
    import torch

    optimizer = torch.optim.AdamW(torch.nn.Linear(4, 1).parameters(), lr=peak)
    scheduler = their_schedule(schedule, optimizer, total)
    rates = []
    for _ in range(updates):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        for _ in range(steps_per_update):
            scheduler.step()
    return rates


def rates_if_counted(run: Run, total: int) -> list[float]:
    return their_rates(run.schedule, PEAK, run.updates, total=total)


# --- tables ---

Curves = dict[tuple[Run, int], list[float]]  # by run and number of processes


def deviation(rates: Sequence[float], intended: Sequence[float]) -> float:
    """Largest distance, in parts of the peak."""
    return max(abs(a - b) for a, b in zip(rates, intended, strict=True)) / PEAK


def summarize(ours: Curves, theirs: Curves) -> list[report.Row]:
    """A line for each run and world.

    transformers' warm-up begins at 0, one update later than ours, so its rates are held against its own curve of one
    process: what is left is what the processes do.
    """
    rows = []
    for (run, processes), rates in ours.items():
        intended = [run.intended(update) for update in range(1, run.updates + 1)]
        other = theirs[run, processes]
        simulated = their_rates(run.schedule, PEAK, run.updates, total=run.updates, steps_per_update=processes)
        rows.append(
            {
                "schedule": run.schedule,
                "epochs": run.epochs,
                "minibatches": run.minibatches,
                "processes": processes,
                "updates": run.updates,
                "ours, off by": round(deviation(rates, intended), 6),
                "accelerate, off by": round(deviation(other, theirs[run, 1]), 3),
                "ours, mean rate": round(report.mean(rates) / PEAK, 3),
                "accelerate, mean rate": round(report.mean(other) / PEAK, 3),
                "accelerate, updates below 1% of the peak": sum(rate < 0.01 * PEAK for rate in other),
                "accelerate, rate of the last update": round(other[-1] / PEAK, 3),
                "accelerate as simulated, off by": round(deviation(other, simulated), 6),
            }
        )
    return rows


def summarize_count(of_runs: Sequence[Run]) -> list[report.Row]:
    """A line for each run on one process: N counted without epochs and minibatches, against the right N."""
    rows = []
    for run in of_runs:
        right, wrong = (rates_if_counted(run, total) for total in (run.updates, run.steps))
        rows.append(
            {
                "schedule": run.schedule,
                "epochs": run.epochs,
                "minibatches": run.minibatches,
                "updates": run.updates,
                "N as counted": run.steps,
                "off by": round(deviation(wrong, right), 3),
                "mean rate": round(report.mean(wrong) / PEAK, 3),
                "mean rate of the right N": round(report.mean(right) / PEAK, 3),
                "updates below 1% of the peak": sum(rate < 0.01 * PEAK for rate in wrong),
                "rate of the last update": round(wrong[-1] / PEAK, 3),
            }
        )
    return rows


def curves_of_world(file: Path, processes: int, of_runs: Sequence[Run]) -> tuple[list[list[float]], list[list[float]]]:
    """Our rates and accelerate's, by run and update; kept in `file`."""
    if not file.is_file():
        rates = [rates_in_world(rank_main, processes, of_runs) for rank_main in (our_rank, accelerate_rank)]
        report.write_json(file, rates)
    ours, theirs = json.loads(file.read_text())
    return ours, theirs


def of_the_docs(rows: Sequence[report.Row]) -> list[report.Row]:
    """Of all lines those with most updates per step: epochs and minibatches change nothing else."""
    most = max(row["updates"] for row in rows)
    return [row for row in rows if row["updates"] == most]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "schedule", "The learning rate, right and wrong, and outcomes.", trains=True, scans=True, seeds=range(5)
    )
    options = report.parse(parser, arguments)
    began, quick = time.monotonic(), options.quick
    of_runs = all_runs(5 if quick else STEPS)
    ours: Curves = {}
    theirs: Curves = {}
    for processes in PROCESSES[:2] if quick else PROCESSES:
        file = options.output / f"rates-{processes}.json"
        if not options.workers and not file.is_file():
            continue
        of_world = curves_of_world(file, processes, of_runs)
        for curves, rates in zip((ours, theirs), of_world, strict=True):
            curves.update({(run, processes): rates_of_run for run, rates_of_run in zip(of_runs, rates, strict=True)})
        print(f"worlds of {processes}: {time.monotonic() - began:.0f} s so far", flush=True)
    records = schedule_outcomes.scan(
        report.ensure_data(options.data), options.output / "runs", seeds=options.seeds[:1] if quick else options.seeds,
        quick=quick, workers=options.workers,
    )  # fmt: skip
    rates, counts = summarize(ours, theirs), summarize_count(of_runs)
    tables = {"schedule": rates, "schedule-count": counts, "schedule-outcomes": schedule_outcomes.summarize(records)}
    for name, rows in tables.items():
        report.write_table(options.output / name, rows)
        print(report.markdown(rows))
    of_docs = {
        "rates": of_the_docs(rates),
        "count": list({(row["schedule"], row["updates"]): row for row in counts}.values()),
        "outcomes": tables["schedule-outcomes"],
    }
    command = "python -m benchmarks.studies.schedule"
    results = report.results(command, records, tables=of_docs, runs=outcomes.by_run(records))
    report.save_results(results, options.output / "schedule.json")


if __name__ == "__main__":
    main()
