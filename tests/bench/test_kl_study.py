"""The study of the KL estimators computes what its tables say, on cases small enough to do by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from worlds import make_groups, run_world

from benchmarks.studies import in_process, kl, kl_gradients, kl_report, kl_responses, report
from benchmarks.studies.kl_runs import BETAS, LOSS, NONE, REWARD, Run, all_runs, runs_of_seed
from rlhf.step.batch import make_batch
from rlhf.types import World

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# --- gradients ---


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


# --- what is measured ---


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
    assert logged["tied"] == 0
    assert logged["length"] == pytest.approx(np.mean([row.rollout.response_length for row in rows]), rel=1e-6)


def test_groups_with_equal_rewards_are_counted_as_tied() -> None:
    groups = make_groups(groups=4, samples=3, vocabulary=9, longest=5, seed=0)
    equal = tuple(replace(sample, reward=1.0) for sample in groups[2].samples)
    batch = make_batch([*groups[:2], replace(groups[2], samples=equal), groups[3]], mask_truncated=False)
    assert kl.statistics(batch, batch.tokens.rollout_logprobs, batch.tokens.rollout_logprobs)["tied"] == 1 / 4


def test_tokens_that_another_policy_sampled_are_refused() -> None:
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=5, seed=0), mask_truncated=False)
    kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(1e-5))
    with pytest.raises(RuntimeError, match=r"\b0\.1 nats per token"):
        kl.check_sampled_from(batch, batch.tokens.rollout_logprobs + np.float32(0.1))


def test_a_sampled_row_ends_with_its_first_end_token_or_was_cut_off() -> None:
    prompt = make_groups(groups=1, samples=1, vocabulary=9, longest=3, seed=0)[0].prompt
    before, logprobs = len(prompt.token_ids), np.array([-1.0, -2.0, -3.0], np.float32)
    stopped = in_process.make_rollout(prompt, 0, np.array([5, 7, 0]), logprobs, [7])
    assert (stopped.response_ids.tolist(), stopped.finish_reason) == ([5, 7], "stop")
    (sequence,) = stopped.sequences
    assert sequence.rollout_logprobs.tolist() == [0.0] * before + [-1.0, -2.0]
    assert sequence.response_mask.tolist() == [False] * before + [True] * 2
    cut = in_process.make_rollout(prompt, 0, np.array([5, 6, 5]), logprobs, [7])
    assert (cut.response_ids.tolist(), cut.finish_reason) == ([5, 6, 5], "length")


@torch.no_grad()
def test_sampled_tokens_have_the_log_probs_of_a_pass_over_the_whole_row_and_none_follow_an_end() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=7, num_key_value_heads=2, **sizes)).eval()
    prompts, ends = [np.array([1, 2, 3, 4]), np.array([5, 6])], torch.tensor([3])
    responses, logprobs = in_process.sample_responses(model, prompts, 4, ends, temperature=0.7, longest=6)
    lengths = []
    for row, (response, given) in enumerate(zip(responses, logprobs, strict=True)):
        at = np.flatnonzero(response == 3)
        length = int(at[0]) + 1 if len(at) else 6
        prompt = prompts[row // 4]
        logits = model(torch.from_numpy(np.concatenate([prompt, response[:length]]))[None]).logits[0]
        whole = (logits / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = whole.gather(1, torch.from_numpy(response[:length, None]))[:, 0]
        assert given[:length] == pytest.approx(expected.numpy(), abs=1e-5)
        assert not response[length:].any()
        assert not given[length:].any()
        lengths.append(length)
    assert len(set(lengths)) > 1
    assert len({tuple(response) for response in responses.tolist()}) > 4


# --- the scan ---


def test_the_scan_is_all_parts_seed_after_seed_and_each_run_once() -> None:
    runs = all_runs([0, 1, 2])
    assert len({run.name for run in runs}) == len(runs) == 3 * 131
    assert [run.seed for run in runs] == [0] * 131 + [1] * 131 + [2] * 131
    parts = runs_of_seed(0)
    assert {name: len(part) for name, part in parts.items()} == {
        "grid": 54, "betas": 26, "reward": 32, "lag": 18, "ties": 4, "slower": 14
    }  # fmt: skip
    of_grid = {(run.estimator, run.aggregation, run.minibatches) for run in parts["grid"]}
    assert len(of_grid) == 54
    assert {(run.estimator, run.beta) for run in parts["betas"]} == {
        (NONE, 0.0), *((name, beta) for name in LOSS for beta in BETAS)
    }  # fmt: skip
    assert {(run.advantage, run.estimator, run.beta) for run in parts["reward"]} == {
        (advantage, name, beta)
        for advantage in ("grpo", "rloo")
        for name, beta in [(NONE, 0.0), *((name, beta) for name in REWARD for beta in BETAS)]
    }


def test_a_run_is_the_trainers_config_with_what_the_run_names(tmp_path: Path) -> None:
    base = kl.study_config(Path("data"), steps=40, prompts=16, held_out=9)
    for run in all_runs([3]):
        config = run.config(base)
        algo = config.algo
        assert (config.run.seed, algo.kl_coef, algo.advantage) == (3, run.beta, run.advantage)
        assert (algo.loss_aggregation, config.training.total_updates) == (run.aggregation, 40 * run.minibatches)
        assert (config.kl_in_loss, config.kl_in_reward) == (
            (False, False) if run.estimator == NONE else (run.place == "loss", run.place == "reward")
        )
        if run.estimator != NONE:
            assert algo.kl_estimator == run.estimator.partition(" ")[0]
            assert algo.weights_kl == (run.estimator == "k3 weighted")
        assert (config.rollout.max_policy_lag, algo.importance_correction) == (
            (1, "truncated") if run.lag else (0, "none")
        )
        assert config.learner.optimizer.lr == run.rate
        assert config.needs_reference
        assert config.rollouts_per_step == 128
        assert config.rollout.samples_per_prompt == run.responses


def test_differences_are_of_pairs_that_share_a_seed_and_the_minibatches() -> None:
    def row(estimator: str, seed: int, kl_: float, accuracy: float, minibatches: int = 2) -> report.Row:
        values = {"estimator": estimator, "beta": 0.03, "seed": seed, "minibatches": minibatches}
        return values | {"KL": kl_, "accuracy": accuracy, "held-out accuracy": accuracy}

    free = [row(NONE, 0, 0.1, 0.5), row(NONE, 1, 0.2, 0.6), row(NONE, 0, 9.0, 0.0, minibatches=4)]
    with_kl = [row("k1", 0, 0.2, 0.4), row("k1", 1, 0.4, 0.4), row("k1", 2, 0.3, 0.9)]  # seed 2 has no other
    (line,) = kl_report.differences_table([*free, *with_kl])
    assert (line["minibatches"], line["estimator"], line["beta"]) == (2, "k1", 0.03)
    assert line["KL, times that without"] == "2 (2 to 2)"
    half = 12.706 * 0.05  # Student's t with one degree of freedom, times the standard error of -0.1 and -0.2
    assert line["accuracy, minus that without"] == f"-0.150 ± {half:.3f}"


def test_the_table_of_responses_shows_that_summed_on_policy_k1_is_nothing_and_k2_the_gradient_of_the_kl() -> None:
    table = kl_report.responses_table(kl_responses.gradient_rows(policies=2))
    assert len(table) == 30  # two policies that sample, five estimators, three aggregations
    by_setting = {(row["tokens"], row["estimator"], row["aggregation"]): row for row in table}
    k1, k2 = (by_setting["on-policy", name, "constant"] for name in ("k1", "k2"))
    assert (k1["size"], k1["cosine: KL"], k1["longer responses"]) == ("0", "", "")
    assert (k2["size"], k2["cosine: KL"], k2["away from the sampler"]) == ("1 (1..1)", "1 (1..1)", "")


def test_the_runs_of_a_picture_are_known_by_their_settings(tmp_path: Path) -> None:
    run = Run("k3 weighted", "loss", 0.03, 1, rate=2e-4)
    row = {name: getattr(run, name, 0) for name in kl_report.COLUMNS}
    report.write_json(tmp_path / "kl.json", {"runs": {"columns": list(row), "rows": [list(row.values())]}})
    assert [kl_report.run_of(known) for known in kl_report.known_rows(tmp_path / "kl.json")] == [run]


# --- runs ---


def train_kl_runs(world: World, data: Path, runs: list[Run]) -> list[list[report.Row]]:
    trainer = kl.Trainer(kl.study_config(data, steps=3, prompts=2, held_out=4))
    try:
        return [trainer.run(run) for run in runs]
    finally:
        trainer.close()


@pytest.mark.faults
@pytest.mark.stack
def test_a_run_of_the_scan_does_not_depend_on_the_runs_before_it_and_with_a_lag_older_weights_sample(
    tiny_model_dir: Path,
) -> None:
    free, moved = Run(NONE, "loss", 0.0, 0), Run("k1", "loss", 1.0, 0, minibatches=4)
    once, lagging = Run(NONE, "loss", 0.0, 0, minibatches=1), Run("k1", "loss", 1.0, 0, minibatches=4, lag=1)
    runs = [free, moved, free, moved, once, lagging]
    first, k1, second, again, one, late = run_world(train_kl_runs, 1, tiny_model_dir, runs)[0]
    assert first[0]["k3"] == first[1]["k3"] == 0.0  # an untrained model is never right, so nothing moves it
    assert k1[0]["k3"] == 0.0 < k1[1]["k3"]  # but k1's noise does
    assert (second, again) == (first, k1)
    assert one[-1]["k3"] == pytest.approx(0.0, abs=1e-9)  # without old log-probs of the learner: those of the engine
    assert late[0]["k3"] == pytest.approx(0.0, abs=1e-9)
    assert late[1]["k3"] == pytest.approx(0.0, abs=1e-9)
    assert late[2]["k3"] > 1e-6
    assert late[2]["held-out k3"] > 1e-6
