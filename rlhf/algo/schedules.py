"""The learning rate as a function of the optimizer update alone.

Update u = 1..N counts optimizer steps of the whole run; the number of learners, microbatches or training steps never
enters. Skipped updates (a non-finite gradient) consume u, so that planned and actual rates stay in step.
"""

from __future__ import annotations

import math


def learning_rate(
    update: int,
    *,
    total_updates: int,
    lr: float,
    name: str = "constant",
    warmup_steps: int = 0,
    num_cycles: float = 0.5,
    min_lr: float = 0.0,
    power: float = 1.0,
) -> float:
    """The learning rate of one optimizer update.

    With w = `warmup_steps` and N = `total_updates`: lr u / w for u <= w. Then, with p = (u - w) / (N - w):

        constant    lr
        linear      min_lr + (lr - min_lr) (1 - p)
        cosine      min_lr + (lr - min_lr) (1 + cos(2 pi num_cycles p)) / 2
        polynomial  min_lr + (lr - min_lr) (1 - p)^power

    so that linear, polynomial and cosine with half a cycle fall monotonically and reach `min_lr` exactly at u = N.
    A warm-up longer than the run is a ramp that never ends. `update`: u, from 1 to `total_updates`, N, the optimizer
    updates of the whole run.
    """
    assert 1 <= update <= total_updates, f"update {update} is outside of the run's updates 1 to {total_updates}"
    if update <= warmup_steps:
        return lr * update / warmup_steps
    progress = (update - warmup_steps) / (total_updates - warmup_steps)
    match name:
        case "linear":
            share = 1 - progress
        case "cosine":
            share = (1 + math.cos(2 * math.pi * num_cycles * progress)) / 2
        case "polynomial":
            share = (1 - progress) ** power
        case "constant":
            return lr
        case _:
            raise AssertionError(name)
    return min_lr + (lr - min_lr) * share
