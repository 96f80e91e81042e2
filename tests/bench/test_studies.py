"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import make_groups, run_world

from benchmarks.studies import (
    adam,
    adam_update,
    algorithms,
    batch_sizes,
    kl,
    kl_gradients,
    kl_report,
    ppo_adam,
    report,
    runs,
    schedule,
)  # fmt: skip
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.step.batch import make_batch
from rlhf.types import World

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
LR = 0.01  # far enough that ratios of the tiny policy are clipped


# --- tables ---


def test_a_table_is_written_rounded_for_people_and_whole_for_programs(tmp_path: Path) -> None:
    report.write_table(tmp_path / "table", [{"name": "a", "x": 1 / 3}, {"name": "b", "x": 1e-7}])
    assert (tmp_path / "table.md").read_text() == "| name | x |\n| --- | --- |\n| a | 0.333 |\n| b | 1.00e-07 |\n"
    assert (tmp_path / "table.csv").read_text().splitlines()[1] == f"a,{1 / 3!r}"


DOCS = ROOT / "docs"


@pytest.mark.parametrize("picture", sorted((DOCS / "studies").glob("*.json")), ids=lambda path: path.stem)
def test_a_picture_of_the_docs_and_their_tables_are_those_of_its_results(picture: Path) -> None:
    """A table below `<!-- studies/NAME.json: TABLE -->` is that table of the file, as the study writes it."""
    from PIL import Image

    text = picture.read_text()
    with Image.open(picture.with_suffix(".png")) as image:
        assert image.info[report.DIGEST] == hashlib.sha256(text.encode()).hexdigest()
    tables = json.loads(text)["tables"]
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert f"(studies/{picture.stem}.png)" in pages
    shown = re.findall(rf"<!-- studies/{picture.stem}\.json: (\S+) -->\n((?:\|.*\n)+)", pages)
    assert shown
    for name, table in shown:
        assert table == report.markdown(tables[name])


def test_every_study_draws_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    kl_runs = kl.all_runs([0.1, 1.0], [0, 1])
    kl_report.write([kl_record(run, [0.1, 0.2]) for run in kl_runs], tmp_path, planned=len(kl_runs), seeds=[0, 1])
    logged = {"step": 1, "reward/mean": 0.5, "policy/kl_k3": 0.0}
    algorithms.draw({"grpo": [[logged]], "dapo": [[logged], [logged]]}, tmp_path / "algorithms.png")
    ppo_adam.draw({variant: {0: [logged], 1: [logged]} for variant in ppo_adam.VARIANTS}, tmp_path / "ppo_adam.png")
    names = ("kl", "algorithms", "ppo_adam")
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
def tiny_case() -> adam_update.Case:
    """In float64, so that what is compared differs by its definition alone."""
    case = adam_update.gpt2_case(0, lr=LR, sizes=TINY)
    case.model.double()
    return replace(case, old=adam_update.logprobs_of(case.model, case.batch, case.minibatch))


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


def test_the_table_of_whole_responses_in_the_docs_is_what_the_study_computes() -> None:
    rows = kl_report.response_table(kl_gradients.response_rows(kl_gradients.RESPONSE_SEEDS))
    assert report.markdown(rows) in (ROOT / "docs/algorithms.md").read_text()


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
        for position, sampled in enumerate(row.rollout.sequences[0].response_mask, start=at):
            if sampled and row.reward is not None:
                d.append(float(old[position]) - float(ref[position]))
        at += len(row.rollout.sequences[0].token_ids)
    differences = np.array(d)
    logged = kl.statistics(batch, old, ref)
    assert logged["k1"] == pytest.approx(differences.mean(), rel=1e-6)
    assert logged["k2"] == pytest.approx((differences**2).mean() / 2, rel=1e-6)
    assert logged["k3"] == pytest.approx((np.exp(-differences) - 1 + differences).mean(), rel=1e-6)
    assert logged["reward"] == pytest.approx(np.mean([row.reward for row in rows if row.reward is not None]), rel=1e-6)
    assert logged["length"] == pytest.approx(np.mean([row.rollout.response_length for row in rows]), rel=1e-6)


def test_tokens_that_another_policy_sampled_are_refused() -> None:
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=5, seed=0), mask_truncated=False)
    kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(1e-5))
    with pytest.raises(RuntimeError, match=r"\b0\.1 nats per token"):
        kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(0.1))


def test_a_sampled_row_ends_with_its_first_end_token_or_was_cut_off() -> None:
    prompt = make_groups(groups=1, samples=1, vocabulary=9, longest=3, seed=0)[0].prompt
    before, logprobs = len(prompt.token_ids), np.array([-1.0, -2.0, -3.0], np.float32)
    stopped = kl.make_rollout(prompt, 0, np.array([5, 7, 0]), logprobs, [7])
    assert (stopped.response_ids.tolist(), stopped.finish_reason) == ([5, 7], "stop")
    (sequence,) = stopped.sequences
    assert sequence.rollout_logprobs.tolist() == [0.0] * before + [-1.0, -2.0]
    assert sequence.response_mask.tolist() == [False] * before + [True] * 2
    cut = kl.make_rollout(prompt, 0, np.array([5, 6, 5]), logprobs, [7])
    assert (cut.response_ids.tolist(), cut.finish_reason) == ([5, 6, 5], "length")


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
    with pytest.raises(ValueError, match=r"\b2 steps of 4 prompts\b.*\b40 and 4\b"):
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


def train_kl_runs(world: World, data: Path, runs: list[kl.Run]) -> list[list[report.Row]]:
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
    assert run.config(2).training.total_updates == run.updates == 20
    (ours,) = schedule.rates_in_world(schedule.our_rank, 2, [run])
    assert ours == [pytest.approx(run.intended(update)) for update in range(1, run.updates + 1)]
    (theirs,) = schedule.rates_in_world(schedule.accelerate_rank, 2, [run])
    assert theirs[len(theirs) // 2 + 1 :] == [0.0] * (len(theirs) // 2 - 1)
    assert max(theirs) == pytest.approx(schedule.PEAK)
    simulated = schedule.their_rates(run.schedule, schedule.PEAK, run.updates, total=run.updates, steps_per_update=2)
    assert theirs == simulated  # so runs with more processes can be simulated on one


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
    corrections = {"icepop": "masked", "geometric": "truncated", "off_policy": "truncated"}
    assert config.algo.importance_correction == corrections.get(name, "none")
    assert config.rollout.max_policy_lag == (2 if name in ("engine", *corrections) else 0)
    own_advantage = ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl")
    assert config.algo.advantage == (name if name in own_advantage else "grpo")
    losses = {"dppo": "dppo_tv", "own": "benchmarks/studies/own_loss.py:reinforce"}
    own_loss = ("gspo", "cispo", "sapo", *losses)
    assert config.algo.policy_loss == (losses.get(name, name) if name in own_loss else "ppo")


def test_what_did_not_reach_the_log_counts_as_not_finite() -> None:
    row: dict[str, Any] = {
        "step": 1, "reward/mean": 0.5, "policy/loss": 0.0, "policy/kl_k3": 0.1, "policy/entropy": 1.0,
        "policy/clip_fraction": 0.0, "learner/grad_norm": 1.0, "learner/updates_skipped": 0,
    }  # fmt: skip
    lost = {name: value for name, value in row.items() if name != "learner/grad_norm"}
    assert algorithms.summarize("A", [[row] * 10])["not finite"] == 0
    never_clips = {name: value for name, value in row.items() if name != "policy/clip_fraction"}
    assert algorithms.summarize("SAPO", [[never_clips] * 10])["largest clip fraction"] == 0
    summary = algorithms.summarize("A", [[row] * 10, [row] * 8 + [lost, {**row, "learner/updates_skipped": 1}]])
    assert summary["not finite"] == 2
    assert summary["largest KL (k3, nats a token)"] == 0.1
