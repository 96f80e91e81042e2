"""The studies of objectives and of the curriculum compare what differs in one thing, and compute what they say."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_world

from benchmarks.studies import (
    curriculum,
    in_process,
    mixed_task,
    objectives,
    objectives_real,
    objectives_report,
    outcomes,
    own_loss,
)
from benchmarks.studies.objectives_report import interval
from benchmarks.studies.objectives_runs import SETTINGS, SITUATIONS, Run, runs_of, with_controls
from rlhf.algo.advantages import group_advantages
from rlhf.algo.losses import aggregate
from rlhf.config.load import flat_keys
from rlhf.types import World

pytestmark = pytest.mark.slow

DATA = Path("data")


# --- the runs ---


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_differs_from_its_control_in_its_own_keys_alone(name: str) -> None:
    base = outcomes.study_config(DATA, objectives.OVERRIDES)
    setting = SETTINGS[name]
    mine, other = (
        flat_keys(Run(each, "mixed", 2e-4, 3).config(base).model_dump(mode="json")) for each in (name, setting.control)
    )
    own = setting.algo.items() - SETTINGS[setting.control].algo.items()
    assert {key for key in mine if mine[key] != other[key]} == {f"algo.{key}" for key, _ in own}
    assert (mine["rollout.max_policy_lag"], mine["learner.minibatches_per_epoch"], mine["run.steps"]) == (2, 4, 40)
    assert mine["rollout.prompts_per_step"] * mine["rollout.samples_per_prompt"] == 128
    assert (mine["learner.optimizer.lr"], mine["run.seed"], mine["learner.schedule.name"]) == (2e-4, 3, "constant")


def test_the_control_has_the_defaults_and_no_two_runs_share_a_file() -> None:
    assert SETTINGS["control"].algo == {}
    runs = [run for situation in SITUATIONS for run in runs_of(situation, list(SETTINGS), range(5))]
    assert len({run.name for run in runs}) == len(runs)
    order = list(SETTINGS)
    assert all(order.index(setting.control) <= order.index(name) for name, setting in SETTINGS.items())
    left = [Run("sapo", "mixed", 2e-4, 0), Run("control", "mixed", 2e-4, 1)]
    assert with_controls(left) == [Run("sequence_mean", "mixed", 2e-4, 0), left[1], left[0]]


class Weights:
    """Stands for a learner whose only weight counts its updates, and for the model that samples."""

    def __init__(self) -> None:
        self.updates = 0.0
        self.loaded = -1.0

    def __iter__(self) -> Any:
        yield "weight", torch.tensor(self.updates)

    def load_state_dict(self, tensors: dict[str, torch.Tensor], strict: bool) -> None:
        self.loaded = tensors["weight"].item()


def test_with_a_lag_of_two_the_policy_of_two_steps_before_samples_also_after_an_evaluation() -> None:
    trainer: Any = object.__new__(in_process.Trainer)
    trainer.learner = trainer.engine = weights = Weights()
    trainer._versions = in_process.deque()
    trainer.config = outcomes.study_config(DATA, objectives.OVERRIDES)
    sampled = []
    for step in range(5):
        trainer.publish(None)
        sampled.append(weights.loaded)
        weights.updates += 1
        if step == 2:
            trainer.publish_newest(None)
            assert weights.loaded == 3.0
    assert sampled == [0, 0, 0, 1, 2]


def test_advantages_by_prompt_make_a_mean_over_tokens_the_mean_over_prompts_of_the_means_over_their_tokens() -> None:
    rewards, groups = torch.tensor([1.0, 0, 0, 1, 1, 0], dtype=torch.float64), torch.tensor([0, 0, 2, 2, 2, 2])
    lengths = torch.tensor([3, 2, 5, 1, 4, 2])
    weighted = own_loss.by_prompt(rewards, groups, lengths=lengths)
    plain = torch.cat([group_advantages(part, normalize_std=True) for part in (rewards[:2], rewards[2:])])
    values = torch.rand(17, dtype=torch.float64)  # of each token, such as its log-prob
    of_token = torch.arange(6).repeat_interleave(lengths)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    loss = aggregate(
        values * weighted[of_token], torch.ones(17, dtype=torch.bool), bounds, lengths,
        aggregation="token_mean", tokens=17, rollouts=6,
    )  # fmt: skip
    by_token = values * plain[of_token]
    assert float(loss) == pytest.approx(float((by_token[:5].mean() + by_token[5:].mean()) / 2))


class HalfClosed:
    """Stands for a trainer whose event loop runs, so that it cannot be closed."""

    def __init__(self, config: Any) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("Cannot close a running event loop")


def work_until_killed() -> None:
    in_process.start_worker(None, HalfClosed)  # type: ignore[arg-type]
    try:
        signal.raise_signal(signal.SIGTERM)
    except RuntimeError:  # a pool would send it as the result of a run, and wait for the next one
        os._exit(0)


def test_a_worker_ends_with_its_scan_in_the_middle_of_grading_too() -> None:
    worker = multiprocessing.get_context("spawn").Process(target=work_until_killed)
    worker.start()
    worker.join()
    assert worker.exitcode == 1


# --- what is said of them ---


def test_the_interval_is_students_by_hand() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert interval([0.5])[0] == 0.5
    assert math.isnan(interval([0.5])[1])


def record(setting: str, seed: int, held_out: float, four: float) -> dict[str, Any]:
    metric = SETTINGS[setting].touches
    steps: list[dict[str, Any]] = [{"policy/engine_kl": 0.1, "policy/entropy": 0.2, metric: 0.1 * k} for k in (1, 2, 3)]
    steps[1].pop(metric)  # no group of this step had a gradient
    steps[2] |= {"held-out": held_out, "by digits": {"1": 0.9, "4": four}}
    about = {"seconds": 1.0, "date": "2026-11-30", "commit": "abc"}
    return {"setting": setting, "task": "mixed", "rate": 2e-4, "seed": seed, "prompts": 16, **about, "steps": steps}


def test_pairs_share_seed_and_commit_and_the_runs_of_a_json_make_the_same_table_again(tmp_path: Path) -> None:
    records = [record("control", seed, 0.2 + 0.1 * seed, 0.0) for seed in (0, 1)]
    records += [record("geometric_mask", seed, 0.1 * seed, 0.1) for seed in (1, 0, 7)]
    records.append(record("control", 7, 0.3, 0.0) | {"date": "2026-12-01", "commit": "def"})
    records.append(records[0] | {"date": "2026-12-01", "commit": "def"})  # bit for bit as before
    lines = [objectives_report.line_of(each) for each in records]
    first, second = objectives_report.table(lines)
    assert (first["minus its control"], first["tokens touched"]) == ("", "20.0%")
    assert first["held-out, by seed"] == "0.20, 0.30, 0.30"
    assert second["held-out, by seed"] == "0.00, 0.10, 0.70"
    assert second["minus its control"] == "-0.200 ± 0.000"  # seed 7 has no control of its commit
    assert second["the same, 4 digits"] == "+0.100 ± 0.000"
    assert (second["tokens touched"], second["in the worst step"]) == ("20.0%", "30%")
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    objectives_report.write([*lines, lines[0] | {"rate": 5e-4}], tmp_path, steps=3)
    *again, other = objectives_report.known_lines(tmp_path / "objectives.json")
    assert objectives_report.run_of(other) not in runs_of(SITUATIONS[-1], list(SETTINGS), range(5))
    assert objectives_report.table(again) == [first, second]
    assert objectives_report.run_of(again[0]) == Run("control", "mixed", 2e-4, 0)


def test_tokens_to_the_goal_are_interpolated_between_means_of_three_evaluations() -> None:
    accuracies = [0.0, 0.3, 0.6, 0.9]  # smoothed: 0.3, 0.6
    steps = [{"tokens": 100 * number, "held-out": value} for number, value in enumerate(accuracies, start=1)]
    assert curriculum.curve({"steps": steps})[0] == pytest.approx([200, 300])
    assert curriculum.tokens_to_goal({"steps": steps}) == pytest.approx(200 + 100 * (0.55 - 0.3) / 0.3)
    assert math.isnan(curriculum.tokens_to_goal({"steps": steps[:3]}))


# --- the mixed task ---


def test_the_mixed_task_has_as_many_problems_of_each_count_of_digits_and_trains_none_that_is_held_out() -> None:
    files = mixed_task.make_rows(0)
    pairs = {name: {frozenset((p.left, p.right)) for p in problems} for name, problems in files.items()}
    assert not pairs["train"] & pairs["test"]
    for name, problems in files.items():
        assert len(problems) == mixed_task.ROWS[name]
        for count in mixed_task.DIGITS:
            own = [p for p in problems if len(str(p.left)) == len(str(p.right)) == p.columns == count]
            assert len(own) == len(problems) // 4
    assert files == mixed_task.make_rows(0) != mixed_task.make_rows(1)


def test_the_pupil_works_right_in_every_column_and_is_careless_more_often_with_more_of_them() -> None:
    rng = random.Random(0)
    right = dict.fromkeys(mixed_task.DIGITS, 0)
    for problem in mixed_task.make_rows(0)["train"]:
        assert problem.worked().endswith(f"{{{problem.answer}}}")
        right[problem.columns] += problem.worked(rng).endswith(f"{{{problem.answer}}}")
    assert right[1] > right[2] > right[3] > right[4] > 0


# --- runs ---


def train_runs(world: World, data: Path) -> list[Any]:
    sizes = ["run.steps=4", "rollout.prompts_per_step=2"]
    trainer = objectives.Trainer(outcomes.study_config(data, [*objectives.OVERRIDES, *sizes]))
    trainer.prompts = {"train": next(iter(trainer.prompts.values()))[:4]}
    try:
        rows = [trainer.run(Run(setting, "quickstart", 5e-4, 0)) for setting in ("own", "by_prompt", "own")]
        by_pass_rate = trainer.run(curriculum.Run(True, 0))
    finally:
        trainer.close()
    return [*rows, by_pass_rate]


@pytest.mark.faults
@pytest.mark.stack
def test_a_run_does_not_depend_on_those_before_it_and_answers_held_out_problems_by_digits(tiny_model_dir: Path) -> None:
    first, by_prompt, again, by_pass_rate = run_world(train_runs, 1, tiny_model_dir)[0]
    assert first == again
    assert len(by_prompt) == len(by_pass_rate) == 4
    assert set(first[-1]["by digits"]) == {3}
    assert json.loads(json.dumps(first[-1]))["held-out"] == first[-1]["held-out"]


def test_a_run_of_the_real_model_is_one_of_the_study_and_differs_in_its_settings_keys_alone() -> None:
    base = objectives_real.study_config(DATA / "model", DATA, steps=12, prompts=8, held_out=128)
    runs = runs_of(objectives_real.SITUATION, objectives_real.SETTINGS, [3])
    assert len({run.name for run in runs}) == len(runs) == 3
    mine = [flat_keys(run.config(base).model_dump(mode="json")) for run in runs]
    for run, keys in zip(runs, mine, strict=True):
        differing = {key for key in keys if keys[key] != mine[0][key]}
        assert differing == {f"algo.{key}" for key in SETTINGS[run.setting].algo}
        assert (keys["rollout.max_policy_lag"], keys["learner.minibatches_per_epoch"]) == (2, 4)
        assert (keys["learner.optimizer.lr"], keys["model.dtype"], keys["run.seed"]) == (2e-5, "float32", 3)
        assert (keys["learner.schedule.name"], keys["algo.importance_correction"]) == ("constant", "truncated")
