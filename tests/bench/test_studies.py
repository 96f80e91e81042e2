"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_groups

from benchmarks.studies import adam, algorithms, batch_sizes, kl, ppo_adam, report, runs, schedule
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.step.batch import make_batch

ROOT = Path(__file__).parents[2]
TINY = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


# --- tables ---


def test_a_table_is_written_rounded_for_people_and_whole_for_programs(tmp_path: Path) -> None:
    report.write_table(tmp_path / "table", [{"name": "a", "x": 1 / 3}, {"name": "b", "x": 1e-7}])
    assert (tmp_path / "table.md").read_text() == "| name | x |\n| --- | --- |\n| a | 0.333 |\n| b | 1.00e-07 |\n"
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == f"a,{1 / 3!r}"


def test_every_study_draws_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    step = {"kl": 0.1, "reward": 0.5, "length": 9.0, "entropy": 1.0, "skipped": 0, "beta": 1.0}
    rows = [{**step, "estimator": name, "step": s} for name in ("k1", "none") for s in (1, 2)]
    kl.draw(rows, tmp_path / "kl.png")
    of_runs = [schedule.Run(name, e, e, 3) for name in schedule.SCHEDULES for e in (1, 4)]
    rates = {(run, p): [1e-5] * run.updates for run in of_runs for p in (1, 2)}
    schedule.draw(rates, rates, tmp_path / "schedule.png")
    logged = {"step": 1, "reward/mean": 0.5, "policy/kl_k3": 0.0}
    algorithms.draw({"grpo": [[logged]], "dapo": [[logged], [logged]]}, tmp_path / "algorithms.png")
    ppo_adam.draw({variant: {0: [logged], 1: [logged]} for variant in ppo_adam.VARIANTS}, tmp_path / "ppo_adam.png")
    curve = [{"step": 1, "microbatches": 2, **dict.fromkeys(batch_sizes.METRICS, 0.5)}]
    batch_sizes.draw({(0, 1, 512): curve, (0, 2, 512): curve}, {0: curve}, tmp_path / "batch_sizes.png")
    names = ("kl", "schedule", "algorithms", "ppo_adam", "batch_sizes")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in names)


def test_a_quick_study_writes_to_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: True)
    parser = report.parser("kl", "", trains=True)
    assert report.parse(parser, ["--seeds", "4,5"]).seeds == [4, 5]
    assert report.parse(parser, ["--quick"]).output == Path("runs/studies/kl/quick")


def test_a_run_that_has_all_steps_is_not_made_again_and_one_that_was_cut_short_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program is a stand-in that writes two steps, and fails where its folder exists, as the real ones do."""
    write = (
        "import os, sys; os.mkdir(sys.argv[1]); open(sys.argv[1] + '/metrics.jsonl', 'w').write('{\"step\": 1}\\n' * 2)"
    )
    monkeypatch.setattr(runs, "command", lambda _, __, folder, **___: [sys.executable, "-c", write, str(folder)])
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    def made(steps: int) -> runs.Steps:
        return runs.train("grpo", "", folder, data=tmp_path, steps=steps, overrides=())

    assert made(2) == [{"step": 1}] * 2
    (folder / "metrics.jsonl").write_text('{"step": 7}\n' * 2)
    assert made(2) == [{"step": 7}] * 2


# --- Adam ---


@pytest.fixture(scope="module")
def tiny_case() -> adam.Case:
    return adam.large_case(Path("nowhere"), rollouts=8, seed=0, lr=1e-3, shape=TINY)


def last_kl(case: adam.Case, variant: str, *, eps: float) -> float:
    start = adam.snapshot(case)
    (row,) = adam.updates(case, variant, eps=eps, count=1)
    adam.put_back(case, start)
    return float(row["approximate KL"])


def test_gradients_that_are_large_against_epsilon_move_both_variants_alike(tiny_case: adam.Case) -> None:
    ours = last_kl(tiny_case, "torch", eps=1e-14)
    assert ours > 1e-6
    assert last_kl(tiny_case, "tensorflow", eps=1e-14) == pytest.approx(ours, rel=1e-3)


def test_gradients_that_are_small_against_epsilon_move_tensorflows_a_thousand_times_less_in_kl() -> None:
    """The first step is 1 / sqrt(1 - beta2) = 31.6 times shorter, and the KL goes with its square."""
    case = adam.large_case(Path("nowhere"), rollouts=8, seed=0, lr=0.1, shape=TINY)
    ratio = last_kl(case, "torch", eps=1.0) / last_kl(case, "tensorflow", eps=1.0)
    assert ratio == pytest.approx(1 / (1 - adam.BETAS[1]), rel=0.1)  # the square is the leading order


def test_the_old_policy_is_put_back_whole_and_the_kinds_of_layers_are_all_of_it(tiny_case: adam.Case) -> None:
    assert {adam.kind_of(name) for name, _ in tiny_case.parameters} == set(adam.KINDS)
    start = adam.snapshot(tiny_case)
    steps, kinds = adam.compare(tiny_case)
    assert all(torch.equal(start[name], parameter) for name, parameter in tiny_case.parameters)
    assert [(s["variant"], s["update"]) for s in steps] == [(v, u) for v in adam.ADAM_VARIANTS for u in (1, 2, 3, 4)]
    assert sum(k["elements"] for k in kinds) == 2 * sum(p.numel() for _, p in tiny_case.parameters)


def test_the_distance_is_half_the_squared_log_ratio_the_clipped_share_and_the_ratios_variance() -> None:
    old = torch.zeros(3, dtype=torch.float64)
    distance = adam.distance(torch.log(torch.tensor([1.0, 1.1, 1.3], dtype=torch.float64)), old)
    assert distance["approximate KL"] == pytest.approx((math.log(1.1) ** 2 + math.log(1.3) ** 2) / 6)
    assert distance["clip fraction"] == pytest.approx(1 / 3)
    assert distance["ratio variance"] == pytest.approx(np.var([1.0, 1.1, 1.3]))


def test_the_comparison_with_the_published_means_counts_the_first_epoch_which_finds_the_old_policy() -> None:
    steps = [
        {"policy": "warm", "variant": variant, **dict.fromkeys(adam.PUBLISHED["torch"], value)}
        for variant, values in (("torch", (1.0, 2.0, 3.0, 99.0)), ("tensorflow", (0.5, 1.0, 1.5, 99.0)))
        for value in values
    ]
    first = adam.beside_published(steps)[0]
    assert (first["warm: torch"], first["warm: tensorflow"], first["warm: ratio"]) == (6 / 4, 3 / 4, 2.0)
    assert first["GPT-2, published: ratio"] == pytest.approx(0.002367 / 0.000375)


# --- KL ---


def test_the_enumerated_gradients_are_those_that_the_estimators_are_known_by() -> None:
    rows = {row["estimator"]: row for row in kl.enumerated_gradients()}
    reverse, forward = "distance to that of KL(pi, ref)", "distance to that of KL(ref, pi)"
    assert rows["k1"]["length of the expected gradient"] < 1e-12 < 0.1 < rows["k1"]["noise"]
    assert all(rows[name][reverse] < 1e-12 for name in ("k2", "k4", "k3 weighted"))
    assert rows["k3"][forward] < 1e-12 < 0.1 < rows["k3"][reverse]
    assert all(rows[name][f"{reverse}, off-policy"] < 1e-12 for name in ("k4", "k3 weighted"))
    assert all(rows[name][f"{reverse}, off-policy"] > 0.1 for name in ("k1", "k2", "k3"))


def test_the_reported_kl_is_k3_over_response_tokens() -> None:
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=5, seed=0), mask_truncated=False)
    d = 0.3
    old = np.where(batch.tokens.response_mask, -1.0, np.nan)
    assert kl.measured_kl(batch, old, old - d) == pytest.approx(math.exp(-d) - 1 + d)


def test_the_scan_is_every_estimator_with_every_coefficient_and_once_none() -> None:
    base = kl.study_config(Path("data"), steps=40, prompts=32, seed=0)
    configs = [settings.config(base) for settings in kl.all_settings(kl.BETAS)]
    assert [c.algo.kl_coef for c in configs] == [0.0, *kl.BETAS * 4]
    assert [c.algo.kl_estimator for c in configs[1:]] == [name for name in ("k1", "k2", "k3", "k4") for _ in kl.BETAS]
    assert {(c.algo.kl_place, c.needs_reference, c.learner.minibatches_per_epoch) for c in configs} == {
        ("loss", True, 2)
    }


# --- schedules ---


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_the_intended_curve_by_hand_is_the_schedule(name: str) -> None:
    run = schedule.Run(name, epochs=2, minibatches=3, steps=7)
    for update in range(1, run.updates + 1):
        ours = learning_rate(update, total_updates=run.updates, lr=schedule.PEAK, name=name, warmup_steps=run.warmup)
        assert run.intended(update) == pytest.approx(ours, rel=1e-12, abs=1e-20)


@pytest.mark.parametrize(
    ("name", "minibatches", "off_by"), [("linear", 1, 60 / 72), ("linear", 4, 1.0), ("cosine", 1, 0.983)]
)
def test_a_count_without_epochs_and_minibatches_ends_a_linear_schedule_early_and_lets_a_cosine_rise_again(
    name: str, minibatches: int, off_by: float
) -> None:
    """Linear, 4 updates per step: the rate is 0 at update 21, where 60 of the 72 updates after the warm-up remain."""
    run = schedule.Run(name, epochs=4, minibatches=minibatches, steps=20)
    right, wrong = (schedule.rates_if_counted(run, total) for total in (run.updates, run.steps))
    for update, rate in enumerate(right[1:], start=1):  # transformers begins at 0, an update later than ours
        assert rate == pytest.approx(run.intended(update))
    assert schedule.deviation(wrong, right) == pytest.approx(off_by, abs=5e-4)
    assert wrong[-1] == (0.0 if name == "linear" else pytest.approx(0.82 * schedule.PEAK, rel=0.01))


@pytest.mark.stack
def test_two_processes_leave_our_rate_as_intended_and_take_accelerates_through_its_schedule_twice_as_fast() -> None:
    run = schedule.Run("linear", epochs=2, minibatches=2, steps=5)
    (ours,) = schedule.rates_in_world(schedule.our_rank, 2, [run])
    assert ours == [pytest.approx(run.intended(update)) for update in range(1, run.updates + 1)]
    (theirs,) = schedule.rates_in_world(schedule.accelerate_rank, 2, [run])
    assert theirs[len(theirs) // 2 + 1 :] == [0.0] * (len(theirs) // 2 - 1)
    assert max(theirs) == pytest.approx(schedule.PEAK)


# --- whole runs ---


def config_of_run(kind: type[Any], program: str, path: str, overrides: list[str]) -> Any:
    line = runs.command(program, path, Path("out"), data=Path("data"), steps=30, overrides=overrides)
    return load_config(kind, [ROOT / path], line[line.index(path) + 1 :])


def test_the_runs_with_both_forms_of_adam_differ_in_nothing_else() -> None:
    configs = [
        config_of_run(PPOConfig, "ppo", ppo_adam.CONFIG, ppo_adam.overrides(variant, 2)).model_dump()
        for variant in ppo_adam.VARIANTS
    ]
    for config, variant in zip(configs, ppo_adam.VARIANTS, strict=True):
        assert (config["run"]["seed"], config["learner"]["epochs_per_step"]) == (2, 4)
        for role in ("learner", "critic"):
            optimizer = config[role]["optimizer"]
            assert (optimizer.pop("variant"), optimizer["eps"], optimizer["betas"]) == (variant, 1e-5, (0.9, 0.999))
    assert configs[0] == configs[1]


def test_the_table_of_ppo_has_the_mean_of_the_named_steps_and_the_spread_of_the_seeds() -> None:
    """The clip fraction of steps 2 to 4; step 1, in which the critic learns alone, has none."""

    def run(clipped: float) -> runs.Steps:
        rest = dict.fromkeys(ppo_adam.METRICS, 1.0)
        later = [{**rest, "step": step, "policy/clip_fraction": clipped * step} for step in range(2, 9)]
        return [{"step": 1, "reward/mean": 1.0}, *later]

    table = ppo_adam.summarize({"torch": {0: run(0.1), 1: run(0.3)}, "tensorflow": {0: run(0.05), 1: run(0.1)}})
    (row,) = (row for row in table if row["metric"] == "clip fraction")
    assert (row["steps"], row["torch"], row["tensorflow"]) == ("2 to 4", "0.6 (0.3 to 0.9)", "0.225 (0.15 to 0.3)")
    assert row["torch / tensorflow, by seed"] == "2.00, 3.00"


def test_a_seed_whose_curves_are_kept_is_not_trained_again(tmp_path: Path) -> None:
    (tmp_path / "seed-3.json").write_text('{"recorded": [{"step": 1}], "worlds": [[2, 512, [{"step": 2}]]]}')
    curves = batch_sizes.train_seed(tmp_path / "seed-3.json", Path("nowhere"), steps=1, seed=3)
    assert curves == ([{"step": 1}], {(3, 2, 512): [{"step": 2}]})


def test_the_table_of_batch_sizes_has_the_largest_distance_over_steps_and_seeds() -> None:
    def curve(loss: float) -> runs.Steps:
        metrics = dict.fromkeys(batch_sizes.METRICS, 0.0)
        return [{**metrics, "microbatches": 4, "policy/loss": value} for value in (0.0, loss)]

    recorded = {0: curve(0.5), 1: curve(0.5)}
    first, last = batch_sizes.summarize({(0, 2, 512): curve(0.7), (1, 2, 512): curve(0.1)}, recorded)
    assert (first["learners"], first["microbatches per update"]) == (2, 4)
    assert first["loss: largest difference"] == pytest.approx(0.4)
    assert last["loss: largest difference"] == "0 to 0.5"


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_command_of_an_algorithm_is_a_run_of_the_quickstart_with_its_choices(name: str) -> None:
    config = config_of_run(GRPOConfig, "grpo", algorithms.CONFIG, algorithms.overrides(name, seed=3))
    assert (config.run.steps, config.run.seed, config.algo.log_kl, config.model.path) == (30, 3, True, "data/model")
    assert config.algo.importance_correction == "none"  # of all these papers
    kind = {"dapo": "grpo", "gspo": "grpo", "cispo": "grpo"}.get(name, name)
    assert config.algo.advantage == kind
    assert config.algo.policy_loss == (name if name in ("gspo", "cispo") else "ppo")


def test_what_did_not_reach_the_log_counts_as_not_finite() -> None:
    row: dict[str, Any] = {
        "step": 1, "reward/mean": 0.5, "policy/loss": 0.0, "policy/kl_k3": 0.1, "policy/entropy": 1.0,
        "policy/clip_fraction": 0.0, "learner/grad_norm": 1.0, "learner/updates_skipped": 0,
    }  # fmt: skip
    lost = {name: value for name, value in row.items() if name != "learner/grad_norm"}
    assert algorithms.summarize("A", [[row] * 10])["not finite"] == 0
    summary = algorithms.summarize("A", [[row] * 10, [row] * 8 + [lost, {**row, "learner/updates_skipped": 1}]])
    assert summary["not finite"] == 2
    assert summary["largest KL (k3, nats a token)"] == 0.1
