"""The studies of what a fault costs compute what their tables say: the schedule, batch sizes, slow groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.studies import (
    batch_outcomes,
    in_process,
    outcomes,
    report,
    schedule,
    schedule_outcomes,
    waiting,
)
from benchmarks.studies.batch_outcomes import ACCUMULATED, OURS, PER_DEVICE
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.types import Prompt

pytestmark = pytest.mark.slow

DATA = Path("data")


# --- the schedule ---


@pytest.mark.parametrize("name", schedule_outcomes.SCHEDULES)
def test_a_count_without_the_four_minibatches_gives_the_rates_of_four_processes(name: str) -> None:
    four = schedule.their_rates(name, 1.0, 160, total=160, steps_per_update=4)
    assert schedule.their_rates(name, 1.0, 160, total=40) == pytest.approx(four, abs=1e-12)
    assert min(four[40:]) == pytest.approx(0, abs=1e-3)
    assert max(four[60:]) == (0 if name == "linear" else pytest.approx(1, abs=1e-3))  # the cosine rises again


def test_the_runs_of_the_schedule_differ_in_nothing_but_their_rates_which_the_config_gives_if_they_are_ours() -> None:
    base = outcomes.study_config(DATA)
    runs = schedule_outcomes.all_runs([3])
    assert len({run.name for run in runs}) == len(runs) == 2 * 2 * 5
    for run in runs:
        config = run.config(base)
        training = config.training
        assert (config.run.seed, config.cluster.learners, training.total_updates) == (3, run.learners, 160)
        arguments = training.schedule_arguments
        assert (arguments["name"], arguments["lr"], arguments["warmup_steps"]) == (run.schedule, run.peak, 16)
        simulated = schedule_outcomes.simulated_rates(training, 1)  # begins one update later, at 0
        assert simulated[1:] == pytest.approx([learning_rate(u, **arguments) for u in range(1, 160)])
        assert schedule_outcomes.simulated_rates(training, 2)[:80] == pytest.approx(simulated[::2])


# --- batch sizes ---


def test_the_batch_sizes_of_the_faults_by_hand() -> None:
    """Ours: 40 steps of 128 rollouts in 4 minibatches of 32."""
    base = outcomes.study_config(DATA)

    def sizes(fault: str, factor: int) -> tuple[int, int, int, int]:
        config = batch_outcomes.Outcome(fault, factor, 2e-4, 1, 0).config(base)
        rollouts = config.rollouts_per_step
        return (
            config.run.steps,
            rollouts,
            rollouts // config.learner.minibatches_per_epoch,
            config.training.total_updates,
        )

    assert sizes(OURS, 1) == (40, 128, 32, 160)
    assert sizes(PER_DEVICE, 8) == (5, 1024, 256, 20)
    assert sizes(ACCUMULATED, 8) == (40, 128, 4, 1280)
    assert {batch_outcomes.Outcome(OURS, 1, 2e-4, n, 0).config(base).training.total_updates for n in (1, 2)} == {160}
    for learners in (1, 2):  # ours is also a run of the study of the schedule
        ours = batch_outcomes.Outcome(OURS, 1, 5e-4, learners, 5).config(base)
        assert ours == schedule_outcomes.Outcome("cosine", 5e-4, 1, learners, 5).config(base)
    runs = batch_outcomes.all_runs([0, 1])
    assert len({run.name for run in runs}) == len(runs) == 32
    assert [run.seed for run in runs] == [0] * 16 + [1] * 16


# --- slow groups ---


@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is 347 + 251?", 0), ("What is 347 + 285?", 2), ("What is 347 + 253?", 2), ("What is 900 + 900?", 0)],
)
def test_a_carry_is_what_a_column_passes_to_another_one(question: str, expected: int) -> None:
    """347 + 253: the ones pass a carry to the tens, which is why those pass one. The last column has no other."""
    assert waiting.carries(question) == expected


def config_of(on_stale: Any, lag: int, *, steps: int = 40, prompts: int = 16) -> GRPOConfig:
    base = outcomes.study_config(
        DATA, [*waiting.OVERRIDES, f"run.steps={steps}", f"rollout.prompts_per_step={prompts}"]
    )
    return waiting.Run(0.5, 3, on_stale, lag, 0).config(base)


def draws(share: float) -> Any:
    rng = np.random.default_rng(0)

    def draw() -> Prompt:
        text = "What is 119 + 119?" if rng.random() < share else "What is 111 + 111?"
        return Prompt("p", 0, np.zeros(1, np.int32), ({"role": "user", "content": text},), "", "")

    return draw


def test_without_a_lag_each_step_takes_its_own_groups_and_the_slowest_of_them_and_the_training() -> None:
    easy = waiting.plan(config_of("wait", 0, steps=5), draws(0), slowness=3)
    assert [{version for _, version in step.groups} for step in easy] == [{0}, {1}, {2}, {3}, {4}]
    assert 5 * 1.8 < easy[-1].ended < 5 * (1 + 1 + waiting.JITTER)
    hard = waiting.plan(config_of("wait", 0, steps=5), draws(1), slowness=3)
    assert 5 * 3.4 < hard[-1].ended < 5 * (1 + 3 * (1 + waiting.JITTER))


@pytest.mark.parametrize("lag", waiting.LAGS)
def test_waiting_trains_what_is_drawn_within_the_lag_and_discarding_trains_fewer_hard_prompts(lag: int) -> None:
    plans = {rule: waiting.plan(config_of(rule, lag), draws(0.25), slowness=6) for rule in ("wait", "drop")}
    hard = {}
    for rule, steps in plans.items():
        assert all(0 <= step - version <= lag for step, planned in enumerate(steps) for _, version in planned.groups)
        assert all(len(planned.groups) == 16 for planned in steps)
        hard[rule] = report.mean(waiting.facts(planned, step)["trained hard"] for step, planned in enumerate(steps))
    assert plans["wait"][-1].discarded == 0.0 < plans["drop"][-1].discarded
    assert hard["wait"] == pytest.approx(0.25, abs=0.05)
    assert hard["drop"] < 0.1
    assert plans["drop"][-1].ended < plans["wait"][-1].ended


# --- runs ---


@pytest.mark.faults
@pytest.mark.stack
def test_runs_of_one_and_of_two_learners_and_of_slow_groups_are_made_once_and_read_again(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    base = outcomes.study_config(tiny_model_dir, ["run.steps=2", "rollout.prompts_per_step=2", *waiting.OVERRIDES])
    planned = [schedule_outcomes.Outcome("cosine", 1e-3, times, n, 0) for times, n in ((1, 1), (4, 1), (1, 2))]
    for _ in range(2):
        outcomes.scan(base, planned, tmp_path, workers=1, kind=schedule_outcomes.Trainer)
    records = list(in_process.read(base, planned, tmp_path))
    assert [(r["steps_per_update"], r["learners"], len(r["steps"])) for r in records] == [
        (1, 1, 2),
        (4, 1, 2),
        (1, 2, 2),
    ]
    slow = [waiting.Run(0.5, 3, "drop", 1, 0)]
    outcomes.scan(base, slow, tmp_path, workers=1, kind=waiting.Trainer)
    (made,) = in_process.read(base, slow, tmp_path)
    assert {"trained hard", "age", "ended", "discarded", "easy", "hard"} <= set(made["steps"][-1])
