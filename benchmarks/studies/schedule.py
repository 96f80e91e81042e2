"""Study: the learning rate that an optimizer holds, against training steps, for 1, 2 and 4 processes.

    python -m benchmarks.studies.schedule --output runs/studies/schedule

Constant, linear and cosine, each with a warm-up, for 1 and 4 PPO epochs and 1 and 4 minibatches. Ours: ranks of a
DeepSpeed world of that many processes take every optimizer step of a run (of a toy module), and the rate is read from
the optimizer. Beside it, in worlds of the same sizes, the usual loop of `accelerate`: model, optimizer and
transformers' scheduler through `prepare`, then step and step. Its prepared scheduler steps once for each process,
because it assumes that more processes mean fewer steps over a data set; PPO takes the same number of updates.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.studies import report

PEAK = 1e-5
STEPS = 20
WARMUP_FRACTION = 0.1
SCHEDULES = ("constant", "linear", "cosine")
EPOCHS = (1, 4)
MINIBATCHES = (1, 4)
PROCESSES = (1, 2, 4)
LINES = {1: ("-", 3.2), 2: ("--", 1.9), 4: (":", 1.5)}  # of a world's curve, so that equal ones show all


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
        return math.ceil(WARMUP_FRACTION * self.updates)

    def intended(self, update: int) -> float:
        """The rate of update 1..N, by hand: a ramp, then one fall to 0 at N (or none)."""
        if update <= self.warmup:
            return PEAK * update / self.warmup
        p = (update - self.warmup) / (self.updates - self.warmup)
        return PEAK * {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}[self.schedule]


def all_runs(steps: int) -> list[Run]:
    return [Run(name, e, m, steps) for name in SCHEDULES for e in EPOCHS for m in MINIBATCHES]


# --- worlds ---


def run_world(rank_main: Callable[..., Any], processes: int, runs: Sequence[Run]) -> list[list[float]]:
    """Rates by run and update from a new world, in which all ranks must agree."""
    from rlhf.learner.rank_place import free_port

    port = free_port()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(rank_main, rank, processes, port, list(runs)) for rank in range(processes)]
        by_rank = [future.result() for future in waiting]
    assert all(rates == by_rank[0] for rates in by_rank), "the ranks of a world hold different learning rates"
    rates: list[list[float]] = by_rank[0]
    return rates


def our_rank(rank: int, processes: int, port: int, runs: Sequence[Run]) -> list[list[float]]:
    """One rank of our learner, without its model: DeepSpeed ZeRO-2, every optimizer step of each run."""
    import torch

    from rlhf.config.roles import Training
    from rlhf.config.sections import ModelConfig, OptimizerConfig, ScheduleConfig, TrainedConfig
    from rlhf.learner.rank import TrainedRank
    from rlhf.learner.rank_place import Place

    place = Place(rank, processes, rank, "127.0.0.1", port, threads=1)
    rates_of_runs = []
    for run in runs:
        section = TrainedConfig(
            optimizer=OptimizerConfig(lr=PEAK),
            schedule=ScheduleConfig(name=run.schedule, warmup_fraction=WARMUP_FRACTION),  # type: ignore[arg-type]
        )
        training = Training(section, epochs_per_step=1, minibatches_per_epoch=run.updates, steps=1)
        model = ModelConfig(path="", dtype="float32")
        trained = TrainedRank(place, name="learner", training=training, model=model, device="cpu")
        trained.wrap(torch.nn.Linear(4, 1))
        rates = []
        for _ in range(run.updates):
            trained.take_step(1, lambda _: (trained.engine(torch.ones(1, 4)).sum(), {}))  # noqa: B023 - called at once
            rates.append(float(trained.engine.optimizer.param_groups[0]["lr"]))
        rates_of_runs.append(rates)
    trained.close()
    return rates_of_runs


def accelerate_rank(rank: int, processes: int, port: int, runs: Sequence[Run]) -> list[list[float]]:
    """One rank of the usual loop around `accelerate`, with its default settings."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch
    from accelerate import Accelerator
    from transformers import get_scheduler

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes
    rates_of_runs = []
    for run in runs:
        module = torch.nn.Linear(4, 1)
        plain = torch.optim.AdamW(module.parameters(), lr=PEAK)
        name = "constant_with_warmup" if run.schedule == "constant" else run.schedule
        schedule = get_scheduler(name, plain, num_warmup_steps=run.warmup, num_training_steps=run.updates)
        model, optimizer, scheduler = accelerator.prepare(module, plain, schedule)
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


# --- table and picture ---

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
            }
        )
    return rows


def draw(ours: Curves, theirs: Curves, path: Path) -> None:
    """Two settings, each ours and accelerate's side by side; a row for each schedule."""
    runs = {run for run, _ in ours}
    settings = sorted({(run.epochs, run.minibatches) for run in runs})
    shown = [settings[0], settings[-1]]
    drawn, axes = report.figure(len(SCHEDULES), 4, width=10, height=6.2, sharex=True, sharey=True)
    for row, name in enumerate(SCHEDULES):
        for pair, (epochs, minibatches) in enumerate(shown):
            run = next(r for r in runs if (r.schedule, r.epochs, r.minibatches) == (name, epochs, minibatches))
            at = [update / (epochs * minibatches) for update in range(1, run.updates + 1)]
            for column, (label, curves) in enumerate((("this trainer", ours), ("accelerate, prepared", theirs))):
                panel = axes[row, 2 * pair + column]
                panel.plot(at, [run.intended(u) / PEAK for u in range(1, run.updates + 1)], color="0.8", lw=7)
                for processes, (line, width) in LINES.items():
                    if (run, processes) in curves:
                        rates = [rate / PEAK for rate in curves[run, processes]]
                        text = f"{processes} process{'es' * (processes > 1)}"
                        panel.plot(at, rates, line, lw=width, color=f"C{processes // 2}", label=text)
                if row == 0:
                    panel.set_title(f"{label}\nepochs {epochs}, minibatches {minibatches}")
        axes[row, 0].set_ylabel(f"{name}\nlearning rate / peak")
    for panel in axes[-1]:
        panel.set_xlabel("training step")
    axes[0, 1].legend(loc="lower right")
    axes[0, 0].plot([], [], color="0.8", lw=7, label="intended")
    axes[0, 0].legend(loc="lower right")
    report.save(drawn, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = report.parser(
        "schedule", "The learning rate against the training step in worlds of 1, 2, 4.", trains=False
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of a run")
    parser.add_argument("--processes", default=",".join(map(str, PROCESSES)), help="sizes of the worlds, 1 among them")
    options = report.parse(parser, arguments)
    began = time.monotonic()
    runs = all_runs(options.steps)
    ours: Curves = {}
    theirs: Curves = {}
    for processes in map(int, options.processes.split(",")):
        for curves, rank_main in ((ours, our_rank), (theirs, accelerate_rank)):
            rates = run_world(rank_main, processes, runs)
            curves.update({(run, processes): rates_of_run for run, rates_of_run in zip(runs, rates, strict=True)})
        print(f"worlds of {processes}: {time.monotonic() - began:.0f} s so far", flush=True)
    rows = summarize(ours, theirs)
    report.write_table(options.output / "schedule", rows)
    print(report.markdown(rows))
    draw(ours, theirs, options.output / "schedule.png")


if __name__ == "__main__":
    main()
