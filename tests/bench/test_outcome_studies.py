"""The studies of what a fault costs compute what their tables say: the schedule, batch sizes, slow groups."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.studies import (
    batch_outcomes,
    batch_sizes,
    kl,
    outcomes,
    report,
    schedule,
    schedule_outcomes,
    waiting,
    waiting_report,
)
from benchmarks.studies.batch_outcomes import ACCUMULATED, OURS, PER_DEVICE
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.types import Prompt

DATA = Path("data")


def record(run: Any, accuracies: list[float], *, prompts: int = 16, **steps: list[float]) -> dict[str, Any]:
    """That of a run whose every second step was evaluated."""
    rows: list[dict[str, Any]] = [{"step": step + 1, "reward": 0.5} for step in range(2 * len(accuracies))]
    for row, accuracy in zip(rows[1::2], accuracies, strict=True):
        row |= {"held-out": accuracy, "easy": accuracy, "hard": accuracy / 2}
    for key, values in steps.items():
        for row, value in zip(rows, values, strict=True):
            row[key] = value
    return {**asdict(run), "prompts": prompts, "date": "2026-11-28", "seconds": 1.0, "steps": rows}


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


def test_the_table_of_the_schedule_compares_with_ours_seed_by_seed() -> None:
    finals = {(1, 1): (0.8, 0.9), (1, 2): (0.8, 0.9), (4, 1): (0.5, 0.8)}
    records = [
        record(schedule_outcomes.Outcome("linear", 5e-4, times, learners, seed), [0.3, final])
        for (times, learners), of_seeds in finals.items() for seed, final in enumerate(of_seeds)
    ]  # fmt: skip
    ours, two, wrong = schedule_outcomes.summarize(records)
    assert (ours["rates of"], two["rates of"]) == ("this trainer, 1 learner", "this trainer, 2 learners")
    assert wrong["rates of"] == "stepped once per process, 4 processes, or N without the 4 minibatches"
    assert (wrong["peak"], wrong["seeds"], wrong["held-out, half way"]) == ("0.0005", 2, "0.3 (0.3 to 0.3)")
    assert wrong["held-out, at the end"] == "0.65 (0.5 to 0.8)"
    assert wrong["less than ours, by seed"] == "0.2 (0.1 to 0.3)"


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


def test_the_table_of_batch_sizes_puts_evaluations_at_their_share_of_the_rollouts() -> None:
    """Eight times the prompts: two steps are 16 of 40, so half way lies a quarter between the two evaluations."""
    base = outcomes.study_config(DATA)
    large = record(batch_outcomes.Outcome(PER_DEVICE, 8, 2e-4, 1, 0), [0.4, 0.8], prompts=128)
    assert batch_outcomes.by_share(large, base) == ([0.4, 0.8], [0.4, 0.8])
    ours = record(batch_outcomes.Outcome(OURS, 1, 2e-4, 1, 0), [0.7, 0.9])
    first, second = batch_outcomes.summarize([ours, large], base)
    assert (first["peak"], first["batch size"]) == ("0.0002", "sizes are global, 1 learner")
    assert list(second.values())[1:7] == [PER_DEVICE, "x 8", 1024, 256, 20, 1]
    assert second["held-out, half way"] == "0.5 (0.5 to 0.5)"
    assert second["less than ours, by seed"] == "0.1 (0.1 to 0.1)"


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


def slow_records() -> list[dict[str, Any]]:
    """Eight steps in 8 units of time, of which the last takes what is hard; and in 16, where it is waited for."""
    records = []
    for seed in (0, 1):
        for rule, time in (("wait", 2.0), ("drop", 1.0)):
            run = waiting.Run(0.25, 6, rule, 2, seed)  # type: ignore[arg-type]
            shares = [0.25] * 8 if rule == "wait" else [0.0] * 2 + [0.1] * 5 + [0.9]
            facts = {
                "trained hard": shares, "age": [1.0] * 8, "ended": [time * step for step in range(1, 9)],
                "discarded": [0.0] + [0.1] * 5 + [0.2, 0.3],
            }  # fmt: skip
            records.append(record(run, [0.2, 0.4, 0.6, 0.8 + 0.1 * seed], **facts))
    return records


def test_the_tables_of_slow_groups_have_shares_times_and_what_is_learned_in_equal_time() -> None:
    """The middle are steps 3 to 7, which dropping ends at 7 units."""
    data, accuracy = waiting_report.data_table(slow_records()), waiting_report.accuracy_table(slow_records())
    assert [row["`on_stale`"] for row in data] == [row["`on_stale`"] for row in accuracy] == ["wait", "drop"]
    assert data[1]["hard, of what is trained"] == "0.1 (0.1 to 0.1)"
    assert data[1]["groups discarded"] == "0.2 (0.2 to 0.2)"
    assert [row["time per step"] for row in data] == ["2 (2 to 2)", "1 (1 to 1)"]
    assert [row["easy"] for row in accuracy] == ["0.85 (0.8 to 0.9)"] * 2
    assert [row["hard"] for row in accuracy] == ["0.425 (0.4 to 0.45)"] * 2
    equal_time = ["0.175 (0.175 to 0.175)", "0.362 (0.35 to 0.375)"]
    assert [row["hard, after equal time"] for row in accuracy] == equal_time


@pytest.mark.faults
@pytest.mark.slow
def test_the_pictures_are_drawn_with_their_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed: make setup-bench")
    waiting_report.write(slow_records(), slow_records(), tmp_path)
    of_runs = [schedule.Run(name, e, e, 3) for name in schedule.SCHEDULES for e in (1, 4)]
    rates = {(run, p): [1e-5] * run.updates for run in of_runs for p in (1, 2)}
    learned = [record(run, [0.3, 0.5]) for run in schedule_outcomes.all_runs([0])]
    results: report.Row = {"tables": {"outcomes": schedule_outcomes.summarize(learned)}}
    schedule.draw(rates, rates, learned, tmp_path / "schedule.png", results)
    curve = [{"step": 1, "microbatches": 2, **dict.fromkeys(batch_sizes.METRICS, 0.5)}]
    base, sized = outcomes.study_config(DATA), [record(run, [0.3, 0.5]) for run in batch_outcomes.all_runs([0])]
    curves = {(0, 1, 512): curve, (0, 2, 512): curve}
    batch_sizes.draw(curves, {0: curve}, sized, base, tmp_path / "batch_sizes.png", results)
    for name in ("waiting", "schedule", "batch_sizes"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert json.loads((tmp_path / f"{name}.json").read_text())["tables"]


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
    records = list(kl.read(base, planned, tmp_path))
    assert [(r["steps_per_update"], r["learners"], len(r["steps"])) for r in records] == [
        (1, 1, 2),
        (4, 1, 2),
        (1, 2, 2),
    ]
    slow = [waiting.Run(0.5, 3, "drop", 1, 0)]
    outcomes.scan(base, slow, tmp_path, workers=1, kind=waiting.Trainer)
    (made,) = kl.read(base, slow, tmp_path)
    assert {"trained hard", "age", "ended", "discarded", "easy", "hard"} <= set(made["steps"][-1])
