"""The studies of benchmarks/studies compute what their tables say, on cases small enough to do by hand."""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worlds import run_world

from benchmarks.studies import (
    adam,
    adam_report,
    adam_update,
    algorithms,
    batch_sizes,
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
def test_a_picture_of_the_docs_is_that_of_the_numbers_beside_it(picture: Path) -> None:
    from PIL import Image

    text = picture.read_text()
    with Image.open(picture.with_suffix(".png")) as image:
        assert image.info[report.DIGEST] == hashlib.sha256(text.encode()).hexdigest()
    pages = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert f"(studies/{picture.stem}.png)" in pages
    assert f"<!-- studies/{picture.stem}.json: " in pages


def test_the_tables_of_the_docs_that_are_marked_as_those_of_a_study_are() -> None:
    for page, text in report.tables_of_docs(DOCS).items():
        assert page.read_text() == text


@pytest.mark.faults
@pytest.mark.slow
def test_every_study_draws_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    logged = {"step": 1, "reward/mean": 0.5, "policy/kl_k3": 0.0}
    algorithms.draw({"grpo": [[logged]], "dapo": [[logged], [logged]]}, tmp_path / "algorithms.png", {})
    groups = ppo_adam.grouped([ppo_record(run, [0.0, 0.1]) for run in ppo_adam.all_runs([0, 1])])
    ppo_adam.draw(groups, tmp_path / "ppo_adam.png", {})
    names = ("algorithms", "ppo_adam")
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


@pytest.mark.faults
@pytest.mark.slow
def test_the_tables_give_the_median_and_the_range_of_the_seeds_next_to_the_published_numbers(
    tiny_record: dict[str, list[report.Row]], tmp_path: Path
) -> None:
    doubled = {"first": [{**row, "approximate KL": 2 * row["approximate KL"]} for row in tiny_record["first"]]}
    seeds = [record | {"seed": seed} for seed, record in enumerate((tiny_record, tiny_record | doubled, tiny_record))]
    by_policy = {"quickstart": seeds, "quickstart, 10 M": seeds[:1], "GPT-2's shape": seeds[:1]}
    results = adam_report.study_results(by_policy, "the command")
    tables = results["tables"]
    first = next(r for r in tables["first"] if r["after one update"] == "approximate KL")
    kl_torch = tiny_record["first"][0]["approximate KL"]
    low, high = report.number(kl_torch), report.number(2 * kl_torch)
    assert (first["GPT-2, published: torch"], first["quickstart: torch"]) == (0.002367, f"{low} ({low} to {high})")
    assert "quickstart, 10 M: torch" not in first
    ratios = next(r for r in tables["ratios"] if r["torch / tensorflow"] == "approximate KL")
    assert ratios["GPT-2, published"] == pytest.approx(6.312)
    assert len(tables["kinds"]) == 2 * len(adam_update.KINDS)
    assert [row["eps"] for row in tables["eps"]] == ["1e-14", "1e-05", "1000"] * 3
    raised = report.number(tiny_record["controls"][0]["approximate KL: tensorflow"])
    assert tables["controls"][2]["KL: tensorflow, raised"] == raised
    assert [row["policy"] for row in tables["sizes"]] == list(by_policy)
    assert len(results["runs"]) == 5
    pytest.importorskip("matplotlib", reason="comes with the extra bench")
    adam_report.draw(by_policy, tmp_path / "adam.png", results)
    assert (tmp_path / "adam.png").stat().st_size > 5000


def test_a_policy_and_seed_that_has_its_file_is_not_computed_again(tmp_path: Path) -> None:
    calls: list[int] = []
    for _ in range(2):
        record = adam.computed_once(tmp_path / "runs" / "a-0.json", lambda: {"first": [calls.append(1)]})
    assert (record, calls) == ({"first": [None]}, [1])


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


def ppo_record(run: ppo_adam.Run, kls: list[float]) -> dict[str, Any]:
    """Each step has 1.0 of everything but the KL to the start; the policy does not learn in the first."""
    steps = [{"step": n, "reward": 1.0, "kl_response": x, "k3": 2 * x} for n, x in enumerate(kls, start=1)]
    learned: dict[str, float] = dict.fromkeys(("clip_fraction", "kl_old", "change"), 1.0)
    return {**asdict(run), "seconds": 1.0, "steps": [steps[0], *(step | learned for step in steps[1:])]}


def test_the_tables_of_ppo_have_the_median_of_the_named_steps_and_the_ratios_of_the_seeds() -> None:
    """Both runs of a seed at the steps 1 to 8; torch's KL is a seed's number times that of tensorflow."""
    records = [
        ppo_record(run, [0.0, 0.0, *([0.1 * (run.seed if run.optimizer == ppo_adam.TORCH else 1)] * 6)])
        for run in ppo_adam.all_runs([2, 3, 5])
    ]
    groups = ppo_adam.grouped(records)
    rows = ppo_adam.runs_table(groups)
    assert [row["warm-up"] for row in rows] == ["none"] * 6 + ["10 updates"] * 6
    title, last = ppo_adam.METRICS["kl_response"][0], ppo_adam.METRICS["kl_last"][0]
    assert (rows[0][title], rows[1][title], rows[0][last]) == (
        "0.3 (0.2 to 0.5)",
        "0.1 (0.1 to 0.1)",
        "nan (nan to nan)",
    )
    pair = ppo_adam.pairs_table(groups)[0]
    assert (pair["warm-up"], pair[title], pair[last]) == ("none", "2.00, 3.00, 5.00", "nan, nan, nan")
    assert {row[title] for row in ppo_adam.warmup_table(groups)} == {"1.00, 1.00, 1.00"}
    steps = ppo_adam.steps_table(groups)
    assert [row["step"] for row in steps] == [3, 4, 5, 6, 7, 8] * 2
    assert {row["ratio by seed"] for row in steps} == {"2.00, 3.00, 5.00"}
    assert {row["ratio of k3, nats per token"] for row in steps} == {"2.00, 3.00, 5.00"}


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
    assert summary["largest KL (k3, nats per token)"] == 0.1
