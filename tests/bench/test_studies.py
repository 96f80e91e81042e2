"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import run_world

from benchmarks.studies import (
    adam_update,
    adam_widths,
    algorithms,
    ppo_adam,
    report,
    runs,
    schedule,
)  # fmt: skip
from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.ppo import PPOConfig
from rlhf.types import World

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
LR = 0.01  # far enough that ratios of the tiny policy are clipped


# --- tables ---


DOCS = ROOT / "docs"


def test_the_tables_of_the_docs_that_are_marked_as_those_of_a_study_are() -> None:
    for page, text in report.tables_of_docs(DOCS).items():
        assert page.read_text() == text


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
                if label == "all but" and by_kind["kind"] not in ("norm", "embedding"):
                    continue
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


def test_torch_with_32_eps_is_tensorflows_first_update_and_at_equal_size_the_sums_of_the_changes_agree(
    tiny_case: adam_update.Case, tiny_record: dict[str, list[report.Row]]
) -> None:
    def kl_and_change(variant: str, eps: float, lr: float) -> tuple[float, torch.Tensor]:
        adam_update.first_step(replace(tiny_case, lr=lr), variant, eps=eps)
        kl_moved = adam_update.moved(tiny_case)["approximate KL"]
        change = [after - start[name] for name, after in adam_update.snapshot(tiny_case).items()]
        adam_update.put(tiny_case, start)
        return kl_moved, torch.cat([part.flatten() for part in change])

    start = adam_update.snapshot(tiny_case)
    adam_update.backward(tiny_case)
    of_torch, of_tensorflow = (kl_and_change(variant, 1e-5, LR) for variant in adam_update.VARIANTS)
    for same, other in zip(kl_and_change("torch", 1e-5 / math.sqrt(0.001), LR), of_tensorflow, strict=True):
        assert same == pytest.approx(other, rel=1e-9, abs=1e-15)
    for row, power in zip(tiny_record["controls"], (1, 2), strict=True):
        raised, lowered = (
            kl_and_change("tensorflow", 1e-5, LR * row["factor"]),
            kl_and_change("torch", 1e-5, LR / row["factor"]),
        )
        for (kl_moved, change), (_, like), variant in (
            (raised, of_torch, "tensorflow"),
            (lowered, of_tensorflow, "torch"),
        ):
            assert row[f"approximate KL: {variant}"] == pytest.approx(kl_moved, rel=1e-6)
            assert float(change.norm(power)) == pytest.approx(float(like.norm(power)), rel=1e-6)
        cosine = torch.nn.functional.cosine_similarity(of_torch[1], of_tensorflow[1], dim=0)
        assert row["cosine"] == pytest.approx(float(cosine), rel=1e-6)
    sizes = torch.cat(
        [
            p.grad.abs().flatten()
            for n, p in tiny_case.model.named_parameters()
            if adam_update.kind_of(n) in ("attention", "MLP")
        ]
    )  # type: ignore[union-attr]
    (policy,) = tiny_record["policy"]
    assert policy["below eps"] == pytest.approx(float((sizes < 1e-5).double().mean()))
    assert policy["eps to 32 eps"] == pytest.approx(
        float(((sizes >= 1e-5) & (sizes < 3.1623e-4)).double().mean()), abs=1e-4
    )
    tiny_case.model.zero_grad()


def test_the_first_update_by_width_is_that_of_the_study_at_one_width(
    tiny_case: adam_update.Case, tiny_record: dict[str, list[report.Row]]
) -> None:
    row = adam_widths.measured(tiny_case)
    tiny_case.model.zero_grad()
    elements = sum(by_kind["elements"] for by_kind in tiny_record["kinds"])
    for first in tiny_record["first"]:
        variant = first["variant"]
        assert row[f"KL: {variant}"] == pytest.approx(first["approximate KL"], rel=1e-9)
        assert row[f"clip fraction: {variant}"] == first["clip fraction"]
        moved = sum(by_kind["elements"] * by_kind[f"change / lr: {variant}"] for by_kind in tiny_record["kinds"])
        assert row[f"change: {variant}"] == pytest.approx(moved / elements, rel=1e-9)
    assert row["below eps"] == tiny_record["policy"][0]["below eps"]


def test_the_trend_is_the_factor_of_each_doubling_of_the_width_and_no_other_ladder_counts() -> None:
    def row(ladder: str, width: int, seed: int, ratio: float) -> report.Row:
        kl = {"KL: torch": ratio, "KL: tensorflow": 1.0, "change: torch": 1.0, "change: tensorflow": 1.0}
        return {"ladder": ladder, "width": width, "seed": seed} | kl

    own = [row(adam_widths.RANDOM, 64 * 2**n, seed, (2 + 2 * seed) ** n) for seed in (0, 1) for n in range(4)]
    (line,) = adam_widths.trend_table([*own, row(adam_widths.PRETRAINED, 576, 0, 9.0)])
    assert (line["ladder"], line["seeds"]) == (adam_widths.RANDOM, 2)
    half = 12.706 * 0.5  # Student's t with one degree of freedom, times the standard error of the slopes 1 and 2
    assert line["KL, torch / tensorflow"] == f"{2**1.5:.2f} ({2 ** (1.5 - half):.2f} to {2 ** (1.5 + half):.2f})"
    assert line["KL: tensorflow"] == "1.00 (1.00 to 1.00)"


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


@pytest.mark.faults
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


def test_the_runs_of_the_study_of_adam_differ_in_the_optimizer_and_the_warm_up_of_the_policy_alone() -> None:
    base = ppo_adam.study_config(Path("data"), steps=12, prompts=128)
    planned = ppo_adam.all_runs([0, 3])
    assert len({run.name for run in planned}) == len(planned) == 2 * 2 * len(ppo_adam.OPTIMIZERS)
    seen = []
    for run in planned:
        config = run.config(base).model_dump()
        assert PPOConfig.model_validate(config).training.schedule_arguments["total_updates"] == 88
        optimizer, schedule = config["learner"]["optimizer"], config["learner"]["schedule"]
        seen.append((optimizer.pop("variant"), optimizer.pop("eps"), lr := optimizer.pop("lr")))
        assert (schedule.pop("warmup_steps"), schedule.pop("min_lr"), config["run"].pop("seed")) == (
            run.warmup, pytest.approx(lr / 10), run.seed
        )  # fmt: skip
        assert (optimizer["betas"], config["learner"]["max_grad_norm"]) == ((0.9, 0.999), None)
        assert planned[0].config(base).critic.model_dump() == config["critic"]
        rest = config
    assert seen[: len(ppo_adam.OPTIMIZERS)] == list(ppo_adam.OPTIMIZERS.values())
    eps_t = [1e-5 / math.sqrt(1 - 0.999**t) for t in range(1, 89)]
    assert pytest.approx(sum(eps_t) / 88, rel=0.01) == ppo_adam.MEAN_EPS
    assert rest["learner"]["optimizer"]["betas"] == (0.9, 0.999)


def train_ppo_runs(world: World, data: Path, runs: list[ppo_adam.Run]) -> list[list[report.Row]]:
    trainer = ppo_adam.Trainer(ppo_adam.study_config(data, steps=2, prompts=2))
    try:
        return [trainer.run(run) for run in runs]
    finally:
        trainer.close()


@pytest.mark.faults
@pytest.mark.stack
def test_a_ppo_run_of_the_study_begins_from_the_same_policy_and_critic_whatever_ran_before(
    tiny_model_dir: Path,
) -> None:
    near, far = (ppo_adam.Run(name, 0, 0) for name in (ppo_adam.TENSORFLOW, ppo_adam.TORCH))
    first, other, again = run_world(train_ppo_runs, 1, tiny_model_dir, [near, far, near])[0]
    assert first == again
    assert "change" not in first[0]
    assert first[0] == other[0]  # the critic learns alone, with the same optimizer
    assert 0 <= first[1]["change"] <= other[1]["change"]


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_the_command_of_an_algorithm_is_a_run_of_the_quickstart_with_its_choices(name: str) -> None:
    config = config_of_run(GRPOConfig, "grpo", algorithms.CONFIG, algorithms.overrides(name, seed=3))
    assert (config.run.steps, config.run.seed, config.algo.log_kl, config.model.path) == (30, 3, True, "data/model")
    assert (config.algo.importance_correction, config.rollout.max_policy_lag) == ("none", 0)
    own_advantage = ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")
    assert config.algo.advantage == (name if name in own_advantage else "grpo")
    assert config.algo.policy_loss == (name if name in ("gspo", "cispo") else "ppo")
