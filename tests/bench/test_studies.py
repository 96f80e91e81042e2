"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_groups

from benchmarks.studies import adam, adam_update, algorithms, kl, report, schedule
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.step.batch import make_batch

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
LR = 0.01  # far enough that ratios of the tiny policy are clipped


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
    runs = [schedule.Run(name, e, e, 3) for name in schedule.SCHEDULES for e in (1, 4)]
    curves = {(run, p): [1e-5] * run.updates for run in runs for p in (1, 2)}
    schedule.draw(curves, curves, tmp_path / "schedule.png")
    logged = {"step": 1, "reward/mean": 0.5, "policy/kl_k3": 0.0}
    algorithms.draw({"grpo": [logged], "dapo": [logged]}, tmp_path / "algorithms.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("kl", "schedule", "algorithms"))


# --- Adam ---


@pytest.fixture(scope="module")
def tiny_case() -> adam_update.Case:
    """In float64, so that what is compared differs by its definition alone."""
    case = adam_update.gpt2_case(0, lr=LR, sizes=TINY)
    case.model.double()
    return dataclasses.replace(case, old=adam_update.logprobs_of(case.model, case.batch, case.minibatch))


@pytest.fixture(scope="module")
def tiny_record(tiny_case: adam_update.Case) -> dict[str, list[report.Row]]:
    return adam_update.measure(tiny_case, eps=1e-5, scan=[1e-14, 1e3])


def plain_logprobs(case: adam_update.Case) -> torch.Tensor:
    """[rows, response] by transformers' own attention, loss of labels and padding: all rows are equally long here."""
    ids = torch.from_numpy(case.batch.tokens.token_ids.astype(np.int64)).reshape(adam_update.QUERIES, -1)
    case.model.transformer.set_attn_implementation("eager")
    logits = case.model.transformer(ids).logits[:, -adam_update.RESPONSE_TOKENS - 1 : -1] / adam_update.TEMPERATURE
    case.model.transformer.set_attn_implementation(adam_update.PACKED)
    return logits.log_softmax(-1).gather(-1, ids[:, -adam_update.RESPONSE_TOKENS :, None])[..., 0]


def published_adam(gradient: np.ndarray, variant: str, *, lr: float, eps: float) -> np.ndarray:
    """The first change of the weights as the two frameworks' documentation writes it; betas 0.9 and 0.999."""
    m, v = 0.1 * gradient, 0.001 * gradient**2
    if variant == "torch":
        return -lr * (m / (1 - 0.9)) / (np.sqrt(v / (1 - 0.999)) + eps)
    return -lr * np.sqrt(1 - 0.999) / (1 - 0.9) * m / (np.sqrt(v) + eps)


def published_statistics(new: np.ndarray, old: np.ndarray, advantages: np.ndarray) -> dict[str, float]:
    d, r = new - old, np.exp(new - old)
    free, bounded = -advantages * r, -advantages * np.clip(r, 0.8, 1.2)
    of_d = {"mean": np.mean(d), "variance": np.mean((d - d.mean()) ** 2), "max": d.max(), "min": d.min()}
    of_r = {"mean": np.mean(r), "variance": np.mean((r - r.mean()) ** 2), "max": r.max(), "min": r.min()}
    return {
        **{f"log-prob difference: {name}": float(value) for name, value in of_d.items()},
        **{f"ratio: {name}": float(value) for name, value in of_r.items()},
        "approximate KL": float(np.mean(d**2) / 2),
        "policy loss": float(np.mean(np.maximum(free, bounded))),
        "clip fraction": float(np.mean(bounded > free)),
        "ratios outside 1 ± 0.2": float(np.mean((r < 0.8) | (r > 1.2))),
    }


def test_the_first_update_is_what_plain_transformers_and_numpy_compute_from_the_definitions(
    tiny_case: adam_update.Case, tiny_record: dict[str, list[report.Row]]
) -> None:
    rewards = tiny_case.batch.rewards
    advantages = ((rewards - rewards.mean()) / rewards.std())[:, None].repeat(adam_update.RESPONSE_TOKENS, 1)
    logprobs, parameters = plain_logprobs(tiny_case), dict(tiny_case.model.named_parameters())
    old, start = logprobs.detach().numpy(), adam_update.snapshot(tiny_case)
    (-torch.from_numpy(advantages) * (logprobs - logprobs.detach()).exp()).mean().backward()
    gradients = {name: parameter.grad.numpy().copy() for name, parameter in parameters.items()}  # type: ignore[union-attr]
    tiny_case.model.zero_grad()
    for variant, row in zip(adam_update.VARIANTS, tiny_record["first"], strict=True):
        changes = {name: published_adam(g, variant, lr=LR, eps=1e-5) for name, g in gradients.items()}
        end = {name: start[name] + torch.from_numpy(change) for name, change in changes.items()}
        adam_update.put(tiny_case, end)
        with torch.no_grad():
            expected = published_statistics(plain_logprobs(tiny_case).numpy(), old, advantages)
        assert row == {"variant": variant} | {name: pytest.approx(x, abs=1e-6) for name, x in expected.items()}
        assert 0 < row["clip fraction"] < row["ratios outside 1 ± 0.2"]
        adam_update.put(tiny_case, start)
        for by_kind in tiny_record["kinds"]:
            of_kind = [name for name in parameters if adam_update.kind_of(name) == by_kind["kind"]]
            moved = np.concatenate([np.abs(changes[name]).ravel() for name in of_kind]) / LR
            assert by_kind[f"change / lr: {variant}"] == pytest.approx(float(moved.mean()), abs=1e-6)
            for label, names in (("alone", set(of_kind)), ("all but", set(parameters) - set(of_kind))):
                adam_update.put(tiny_case, {name: (end if name in names else start)[name] for name in parameters})
                with torch.no_grad():
                    d = plain_logprobs(tiny_case).numpy() - old
                assert by_kind[f"KL, {label}: {variant}"] == pytest.approx(float(np.mean(d**2) / 2), abs=1e-6)
                adam_update.put(tiny_case, start)


def test_large_gradients_move_both_variants_alike_and_small_ones_tensorflows_a_thousand_times_less_in_kl(
    tiny_record: dict[str, list[report.Row]],
) -> None:
    """Its first step is 1 / sqrt(1 - beta2) = 31.6 times shorter, and the KL goes with its square."""
    large, small = tiny_record["scan"]
    assert large["torch"] > 1e-3
    assert large["tensorflow"] == pytest.approx(large["torch"], rel=1e-6)
    assert small["torch"] / small["tensorflow"] == pytest.approx(1000, rel=0.01)


def test_the_kinds_of_layers_are_the_whole_policy_which_is_put_back(
    tiny_case: adam_update.Case, tiny_record: dict[str, list[report.Row]]
) -> None:
    assert sum(row["elements"] for row in tiny_record["kinds"]) == sum(p.numel() for p in tiny_case.model.parameters())
    assert {row["layer"] for row in tiny_record["layers"]} == {-1, 0}
    assert np.array_equal(adam_update.logprobs_of(tiny_case.model, tiny_case.batch, tiny_case.minibatch), tiny_case.old)
    names = {
        "h.0.ln_1.bias": "norm", "layers.3.input_layernorm.weight": "norm", "wpe.weight": "embedding",
        "embed_tokens.weight": "embedding", "h.0.attn.c_proj.weight": "attention", "h.0.mlp.c_fc.bias": "MLP",
        "layers.3.self_attn.q_proj.weight": "attention",
    }  # fmt: skip
    assert {name: adam_update.kind_of(f"transformer.model.{name}") for name in names} == names


def test_the_tables_give_the_median_and_the_range_of_the_seeds_next_to_the_published_numbers(
    tiny_record: dict[str, list[report.Row]], tmp_path: Path
) -> None:
    doubled = {"first": [{**row, "approximate KL": 2 * row["approximate KL"]} for row in tiny_record["first"]]}
    by_policy = {"quickstart": [tiny_record, tiny_record | doubled, tiny_record]}
    first = next(r for r in adam.first_update_table(by_policy) if r["after one update"] == "approximate KL")
    kl_torch = tiny_record["first"][0]["approximate KL"]
    low, high = report.number(kl_torch), report.number(2 * kl_torch)
    assert (first["GPT-2, published: torch"], first["quickstart: torch"]) == (0.002367, f"{low} ({low} to {high})")
    ratios = next(r for r in adam.ratio_table(by_policy) if r["torch / tensorflow"] == "approximate KL")
    assert ratios["GPT-2, published"] == pytest.approx(6.312)
    assert len(adam.kinds_table(by_policy)) == len(adam_update.KINDS)
    assert [row["eps"] for row in adam.eps_table(by_policy)] == ["1e-14", "1e-05", "1000"]
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    adam.draw(by_policy | {"GPT-2's shape": [tiny_record]}, tmp_path / "adam.png", "seeds 0, 1")
    assert (tmp_path / "adam.png").stat().st_size > 5000


def test_a_policy_and_seed_that_has_its_file_is_not_computed_again(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        record = adam.computed_once(tmp_path / "runs" / "a-0.json", lambda: {"first": [calls.append(1)]})
    assert (record, calls) == ({"first": [None]}, [1])


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
