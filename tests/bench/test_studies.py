"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_groups, run_world

from benchmarks.studies import adam, algorithms, kl, kl_gradients, kl_report, report, schedule
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.learner.rank_place import Place
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
    kl_runs = kl.all_runs([0.1, 1.0], [0, 1])
    kl_report.write([kl_record(run, [0.1, 0.2]) for run in kl_runs], tmp_path, planned=len(kl_runs), seeds=[0, 1])
    runs = [schedule.Run(name, e, e, 3) for name in schedule.SCHEDULES for e in (1, 4)]
    curves = {(run, p): [1e-5] * run.updates for run in runs for p in (1, 2)}
    schedule.draw(curves, curves, tmp_path / "schedule.png")
    logged = {"step": 1, "reward/mean": 0.5, "policy/kl_k3": 0.0}
    algorithms.draw({"grpo": [logged], "dapo": [logged]}, tmp_path / "algorithms.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("kl", "schedule", "algorithms"))


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
    rows = kl_gradients.all_gradients([0], samples=10)
    on, off = (
        {r["estimator"]: r for r in rows if (r["distance"], r["tokens"]) == ("far", t)} for t in kl_report.TOKENS
    )
    assert on["k1"]["bias"] == pytest.approx(1.0, abs=1e-12)  # its expected gradient is 0
    assert all(on[name]["bias"] < 1e-12 for name in ("k2", "k4", "k3 weighted"))
    assert on["k3"]["distance to the gradient of KL(ref, pi)"] < 1e-12 < 0.1 < on["k3"]["bias"]
    assert all(off[name]["bias"] < 1e-12 for name in ("k4", "k3 weighted"))
    assert all(off[name]["bias"] > 0.1 for name in ("k1", "k2", "k3"))
    assert all(abs(on[name]["relative bias of the value"]) < 1e-12 for name in ("k1", "k3", "k4"))
    assert abs(on["k2"]["relative bias of the value"]) > 0.01


def test_sampled_bias_and_variance_agree_with_the_enumerated_ones_within_their_standard_errors() -> None:
    for row in kl_gradients.all_gradients([0, 1], samples=4000):
        for key in ("bias", "variance"):
            assert abs(row[f"sampled {key}"] - row[key]) < 4 * row[f"error of sampled {key}"], row


def test_bias_and_variance_are_those_of_the_definitions_in_numpy() -> None:
    """With u = e_t - pi, the gradient of log pi(t) by the logits, a token's gradient is a number times u."""
    samples = 50
    for row in kl_gradients.all_gradients([3], samples=samples):
        theta, ref, other = kl_gradients.policies(3, scale=1.0 if row["distance"] == "far" else kl_gradients.NEAR)
        old = theta if row["tokens"] == "on-policy" else other
        pi, p_ref, p_old = (np.exp(x) / np.exp(x).sum() for x in (theta.numpy(), ref.numpy(), old.numpy()))
        d, r = np.log(pi / p_ref), pi / p_old
        factor = {"k1": d**0, "k2": d, "k3": 1 - np.exp(-d), "k4": r * (1 + d), "k3 weighted": r * d}[row["estimator"]]
        by_token = factor[:, None] * (np.eye(5) - pi)
        generator = torch.Generator().manual_seed(3)
        drawn = torch.multinomial(torch.from_numpy(p_old), samples, replacement=True, generator=generator).numpy()
        exact = (pi * d) @ (np.eye(5) - pi)
        for prefix, weights in (("", p_old), ("sampled ", np.bincount(drawn, minlength=5) / samples)):
            mean = weights @ by_token
            squares = ((by_token - mean) ** 2).sum(1)
            variance, length = weights @ squares, np.linalg.norm(exact)
            assert row[f"{prefix}bias"] == pytest.approx(np.linalg.norm(mean - exact) / length, rel=1e-6, abs=1e-9)
            assert row[f"{prefix}variance"] == pytest.approx(variance / length**2, rel=1e-6)
        spread = math.sqrt(weights @ (squares - variance) ** 2 / samples)
        assert row["error of sampled bias"] == pytest.approx(math.sqrt(variance / samples) / length, rel=1e-6)
        assert row["error of sampled variance"] == pytest.approx(spread / length**2, rel=1e-6)


def test_the_logged_kls_reward_and_length_are_those_of_the_definitions_in_numpy() -> None:
    groups = make_groups(groups=3, samples=4, vocabulary=9, longest=7, seed=0)
    groups[1] = replace(groups[1], samples=(replace(groups[1].samples[0], reward=None), *groups[1].samples[1:]))
    batch = make_batch(groups, mask_truncated=False)
    old, ref = np.random.default_rng(0).normal(-2, 1, (2, len(batch.tokens.token_ids))).astype(np.float32)
    rows = [sample for group in groups for sample in group.samples]
    d, at = [], 0
    for row in rows:  # the prompt's tokens and the unscorable response are left out
        for position, sampled in enumerate(row.rollout.response_mask, start=at):
            if sampled and row.reward is not None:
                d.append(float(old[position]) - float(ref[position]))
        at += len(row.rollout.token_ids)
    differences = np.array(d)
    logged = kl.statistics(batch, old, ref)
    assert logged["k1"] == pytest.approx(differences.mean(), rel=1e-6)
    assert logged["k2"] == pytest.approx((differences**2).mean() / 2, rel=1e-6)
    assert logged["k3"] == pytest.approx((np.exp(-differences) - 1 + differences).mean(), rel=1e-6)
    assert logged["reward"] == pytest.approx(np.mean([row.reward for row in rows if row.reward is not None]), rel=1e-6)
    assert logged["length"] == pytest.approx(np.mean([row.rollout.response_mask.sum() for row in rows]), rel=1e-6)


def test_tokens_that_another_policy_sampled_are_refused() -> None:
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=5, seed=0), mask_truncated=False)
    kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(1e-5))
    with pytest.raises(RuntimeError, match=r"differ by 0\.1 nats per token: the KL is not on-policy"):
        kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(0.1))


def test_a_sampled_row_ends_with_its_first_end_token_or_was_cut_off() -> None:
    prompt = make_groups(groups=1, samples=1, vocabulary=9, longest=3, seed=0)[0].prompt
    before, logprobs = len(prompt.token_ids), np.array([-1.0, -2.0, -3.0], np.float32)
    stopped = kl.make_rollout(prompt, 0, np.array([5, 7, 0]), logprobs, [7])
    assert (stopped.token_ids[before:].tolist(), stopped.finish_reason) == ([5, 7], "stop")
    assert stopped.rollout_logprobs.tolist() == [0.0] * before + [-1.0, -2.0]
    assert stopped.response_mask.tolist() == [False] * before + [True] * 2
    cut = kl.make_rollout(prompt, 0, np.array([5, 6, 5]), logprobs, [7])
    assert (cut.token_ids[before:].tolist(), cut.finish_reason) == ([5, 6, 5], "length")


def test_the_scan_is_every_estimator_with_every_coefficient_and_once_none_seed_after_seed() -> None:
    runs = kl.all_runs(kl.BETAS, kl.SEEDS)
    assert len({run.name for run in runs}) == len(runs) == 108
    assert [run.seed for run in runs] == [0] * 36 + [1] * 36 + [2] * 36
    base = kl.study_config(Path("data"), steps=40, prompts=16)
    configs = [run.config(base) for run in runs[:36]]
    assert not configs[0].kl_in_loss
    assert not configs[0].kl_in_reward
    settings = {(c.algo.kl_estimator, c.algo.kl_coef) for c in configs[1:] if c.kl_in_loss}
    assert settings == {(name, beta) for name in ("k1", "k2", "k3", "k4") for beta in (0.01, 0.03, 0.1, 0.3, 1.0)}
    settings = {(c.algo.kl_estimator, c.algo.kl_coef) for c in configs[1:] if c.kl_in_reward}
    assert settings == {(name, beta) for name in ("k1", "k2", "k3") for beta in (0.01, 0.03, 0.1, 0.3, 1.0)}
    assert all(c.needs_reference and c.needs_old_logprobs_pass for c in configs)


def kl_record(run: kl.Run, values: list[float]) -> dict[str, Any]:
    step = {"k1": 0.1, "reward": 0.5, "length": 9.0, "entropy": 1.0, "skipped": 0}
    steps = [{**step, "step": number + 1, "k3": value} for number, value in enumerate(values)]
    return {**asdict(run), "prompts": 4, "date": "2026-11-22", "seconds": 1.0, "steps": steps}


def test_a_run_that_has_a_file_is_not_run_again_and_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    done, left = kl.all_runs([0.1], [0])[:2]
    (tmp_path / f"{done.name}.json").write_text(json.dumps(kl_record(done, [0.0, 0.1])))
    assert kl.pending([done, left], tmp_path) == [left]
    assert [r["estimator"] for r in kl.read_records(tmp_path, [done, left], steps=2, prompts=4)] == ["none"]
    with pytest.raises(ValueError, match="a run of 2 steps of 4 prompts, not of 40 and 4"):
        list(kl.read_records(tmp_path, [done, left], steps=40, prompts=4))


def test_the_table_has_the_median_and_the_range_over_seeds_of_the_median_of_the_second_half(tmp_path: Path) -> None:
    late = {0: [9.0, 9.0, 0.1, 0.9, 0.2], 1: [9.0, 9.0, 0.3, 0.3, 0.3], 2: [9.0, 9.0, 1.0, 2.0, 3.0]}
    runs = kl.all_runs([0.1], [0, 1, 2])
    records = [kl_record(run, late[run.seed]) for run in runs if run.estimator in ("none", "k1")]
    records.pop()  # k1 in the reward with the last seed is missing
    table = kl_report.by_beta([kl_report.summarize(record) for record in records], "KL")
    assert [(line["KL in the"], line["estimator"], line["beta 0.1"]) for line in table] == [
        ("", "none", ""), ("loss", "k1", "0.3 (0.2..2)"), ("reward", "k1", "0.25 (0.2..0.3)")
    ]  # fmt: skip
    note = kl_report.caption(records, planned=9, seeds=[0, 1, 2])
    assert note.startswith("Seeds 0, 1, 2 (8 of 9 runs so far): median (smallest..largest)")
    assert note.endswith("python -m benchmarks.studies.kl, 2026-11-22")


def train_kl_runs(place: Place, data: Path, runs: list[kl.Run]) -> list[list[report.Row]]:
    trainer = kl.Trainer(kl.study_config(data, steps=2, prompts=2))
    try:
        return [trainer.run(run) for run in runs]
    finally:
        trainer.close()


@pytest.mark.stack
def test_a_run_of_the_scan_does_not_depend_on_the_runs_before_it(tiny_model_dir: Path) -> None:
    free, moved = kl.Run("none", "loss", 0.0, 0), kl.Run("k1", "loss", 1.0, 0)
    first, k1, second, again = run_world(train_kl_runs, 1, tiny_model_dir, [free, moved, free, moved])[0]
    assert first[0]["k3"] == first[1]["k3"] == 0.0  # an untrained model is never right, so nothing moves it
    assert k1[0]["k3"] == 0.0 < k1[1]["k3"]  # but k1's noise does
    assert (second, again) == (first, k1)


# --- schedules ---


@pytest.mark.parametrize("name", schedule.SCHEDULES)
def test_the_intended_curve_by_hand_is_the_schedule(name: str) -> None:
    run = schedule.Run(name, epochs=2, minibatches=3, steps=7)
    for update in range(1, run.updates + 1):
        ours = learning_rate(update, total_updates=run.updates, lr=schedule.PEAK, name=name, warmup_steps=run.warmup)
        assert run.intended(update) == pytest.approx(ours, rel=1e-12, abs=1e-20)


@pytest.mark.stack
def test_two_processes_leave_our_rate_as_intended_and_take_accelerates_through_its_schedule_twice_as_fast() -> None:
    run = schedule.Run("linear", epochs=2, minibatches=2, steps=5)
    (ours,) = schedule.run_world(schedule.our_rank, 2, [run])
    assert ours == [pytest.approx(run.intended(update)) for update in range(1, run.updates + 1)]
    (theirs,) = schedule.run_world(schedule.accelerate_rank, 2, [run])
    assert theirs[len(theirs) // 2 + 1 :] == [0.0] * (len(theirs) // 2 - 1)
    assert max(theirs) == pytest.approx(schedule.PEAK)


# --- algorithms ---


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_command_of_an_algorithm_is_a_run_of_the_quickstart_with_its_choices(name: str) -> None:
    line = algorithms.command(name, data=Path("data"), folder=Path("out"), steps=30, seed=3)
    overrides = line[line.index(algorithms.CONFIG) + 1 :]
    config = load_config(GRPOConfig, [ROOT / algorithms.CONFIG], overrides)  # type: ignore[list-item]
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
    assert algorithms.summarize("A", [row] * 10)["not finite"] == 0
    summary = algorithms.summarize("A", [row] * 8 + [lost, {**row, "learner/updates_skipped": 1}])
    assert summary["not finite"] == 2
    assert summary["largest KL (k3, nats a token)"] == 0.1
