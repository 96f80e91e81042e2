"""A whole run of rlhf.grpo without Ray: its account, its counters, its reference, its lag, and how it goes on."""

from __future__ import annotations

import asyncio
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from documented import check_documented
from fake_run import CUT_OFF_EVERY, FakeCheckpoints, FakeLearners, FakeScorer, Sampling, drive
from worlds import make_config

from rlhf.cluster.actors import ClusterError, record_call
from rlhf.config.grpo import GRPOConfig
from rlhf.run.folder import with_date
from rlhf.run.run import Run
from rlhf.types import ScoredRollout

STEPS, PROMPTS, SAMPLES = 4, 3, 4
SAMPLED = STEPS * PROMPTS * SAMPLES
CUT_OFF = SAMPLED // CUT_OFF_EVERY


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> GRPOConfig:
    return make_config(
        tiny_model_dir / "model",
        run={"dir": str(tmp_path / "run"), "steps": STEPS},
        rollout={"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "max_policy_lag": 1},
        algo={"kl_coef": 0.1, "ref_update": "replace", "ref_every": 2, "mask_truncated": True},
        checkpoint={"every": 1},
    )


def logged(config: GRPOConfig) -> list[dict[str, Any]]:
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "time/step" in row]


def evaluated(config: GRPOConfig) -> dict[str, Any]:
    """The last evaluation."""
    lines = map(json.loads, (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if any(name.startswith("eval/") for name in row)][-1]


def test_every_rollout_of_a_run_is_counted_by_its_use_and_so_are_its_tokens(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, engines = asyncio.run(drive(config, monkeypatch))
    rows = logged(config)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    account = {use: rows[-1][f"account/{use}"] for use in ("sampled", "trained", "filtered", "stale", "failed")}
    assert account == {
        "sampled": SAMPLED, "trained": SAMPLED - CUT_OFF, "filtered": CUT_OFF, "stale": 0, "failed": 0,
    }  # fmt: skip
    for row in rows:
        used = sum(row[f"account/{use}"] for use in ("trained", "filtered", "stale", "failed", "waiting"))
        assert row["account/sampled"] == used
        assert row["account/trained"] == row["step"] * PROMPTS * (SAMPLES - SAMPLES // CUT_OFF_EVERY)
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts_of(run) if prompt.id in engines.prompts)
    assert run.state.tokens == {"prompt": SAMPLES * prompt_tokens, "response": 3 * SAMPLED}
    assert len(set(engines.prompts)) == len(engines.prompts) == STEPS * PROMPTS


def prompts_of(run: Any) -> list[Any]:
    from rlhf.run.prompts import read_data

    return [prompt for rows in read_data(run.config, run.tokenizer).train.prompts.values() for prompt in rows]


def test_an_evaluation_on_rows_that_are_trained_on_is_told_first_and_stands_in_the_titles(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train = Path(config.data.train[0].path)
    rows = train.read_text().splitlines()
    (tmp_path / "half.jsonl").write_text("\n".join([*rows[:2], '{"question": "not trained", "answer": "1"}\n']))
    copy = {"question": json.loads(rows[0])["question"], "answer": "of other columns", "more": 1}
    (tmp_path / "whole.jsonl").write_text(json.dumps(copy))
    data = {"train": str(train), "eval": [str(tmp_path / "half.jsonl"), str(tmp_path / "whole.jsonl")]}
    config = make_config(
        Path(config.model.path),
        **config.model_dump(include={"run", "rollout"}),
        data=data,
        learner={"optimizer": {"lr": 0}},
    )
    asyncio.run(drive(config, monkeypatch))
    printed = " ".join(capsys.readouterr().out.split())
    assert "learner.optimizer.lr=0: no update changes the model." in printed
    half = printed.index("data.eval half: 2 of 3 rows are in data.train too, as the model is given them.")
    assert half < printed.index("data.eval whole: all 1 rows are in data.train too") < printed.index("first prompt")
    evaluated = json.loads((Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()[0])
    assert evaluated["eval/half/in_training_fraction"] == pytest.approx(2 / 3)
    check_documented([evaluated], logged={"shared rows"})
    title = "# run, step 4, evaluated on its training data (whole)\n"
    assert title in (Path(config.run.dir) / "model/README.md").read_text()


def test_on_shared_gpus_the_first_step_says_how_far_sampling_after_a_sleep_was_from_the_learner(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampling, "sleeps", True)
    asyncio.run(drive(config, monkeypatch))
    first, *later = logged(config)
    check_documented([first], logged={"first step on shared GPUs"})
    assert not any("sync/sampled_difference" in row for row in later)


def test_with_a_lag_of_1_later_steps_train_rollouts_of_the_version_before(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(drive(config, monkeypatch))
    assert [row["rollout/lag/max"] for row in logged(config)] == [0, 1, 1, 1]


@pytest.mark.slow
def test_no_engine_is_replaced_while_the_model_is_exported(config: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    exported: list[bool] = []

    async def stop_replacing(_: Sampling) -> None:
        exported.append(any(Path(config.run.dir).glob("model*")))

    monkeypatch.setattr(Sampling, "stop_replacing", stop_replacing)
    asyncio.run(drive(config, monkeypatch))
    assert exported == [False]
    assert (Path(config.run.dir) / "model").is_dir()


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, *, times: int) -> list[int]:
    """Saves of the learners raise this error as often; -> one entry for each save."""
    saves: list[int] = []

    async def save(_: Any, folder: Path) -> None:
        saves.append(len(saves))
        if len(saves) <= times:
            raise error

    monkeypatch.setattr(FakeCheckpoints, "save", save)
    return saves


def test_a_save_that_fails_for_any_reason_is_a_warning_with_its_type_and_another_try(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = failing(monkeypatch, TypeError("Object of type X\nis not JSON"), times=2)
    asyncio.run(drive(config, monkeypatch))
    assert len(saves) == STEPS
    shown = " ".join(capsys.readouterr().out.split())
    assert "the checkpoint of step 2 could not be written: TypeError: Object of type X is not JSON." in shown
    kept = [path.name for path in (Path(config.run.dir) / "checkpoints").glob("step-*")]
    assert sorted(kept) == ["step-000003", "step-000004"]


def test_a_dead_learner_ends_a_save_and_is_no_warning(config: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ClusterError("learner 0 is lost"), times=1)
    with pytest.raises(ClusterError, match="learner 0 is lost"):
        asyncio.run(drive(config, monkeypatch))


def test_an_export_that_fails_names_the_checkpoint_that_has_the_weights_and_the_command(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpoints one is made now; the run does not count as finished, and repeats the export alone."""
    never = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": None})})
    call = FakeLearners.call

    async def refused(self: Any, ask: Any, **options: Any) -> list[Any]:
        is_export = record_call(ask)[0] == "try_export"
        return [("ValueError: no", "")] if is_export else await call(self, ask, **options)

    folder = Path(config.run.dir)
    with monkeypatch.context() as patch:
        patch.setattr(FakeLearners, "call", refused)
        with pytest.raises(RuntimeError) as failed:
            asyncio.run(drive(never, patch))
    newest = folder / "checkpoints" / "step-000004"
    assert newest.is_dir()
    assert f"{folder / 'model'}: the export failed: ValueError: no. `rlhf export {newest} DIR`" in str(failed.value)
    assert [path.name for path in folder.glob("model*")] == []
    _, engines = asyncio.run(drive(config, monkeypatch, resume=True))
    assert engines.prompts == []
    assert (folder / "model" / "README.md").is_file()


def test_a_folder_that_is_renamed_at_the_end_is_not_made_a_second_time(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, export = Path(config.run.dir), Run._export

    async def renamed(self: Any, *arguments: Any) -> None:
        folder.rename(folder.with_name("renamed"))
        await export(self, *arguments)

    monkeypatch.setattr(Run, "_export", renamed)
    with pytest.raises(RuntimeError, match=r"the export failed: .*No such file or directory"):
        asyncio.run(drive(config, monkeypatch))
    assert not folder.exists()


def test_the_reference_is_replaced_every_second_step_and_at_no_other(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = asyncio.run(drive(config, monkeypatch))
    cluster: Any = run.cluster
    calls = [call for call in cluster.learners.calls if call[0] in ("blend_reference", "update_counts")]
    # update_counts is asked in the save after each step, and twice at the end
    count, blend = ("update_counts",), ("blend_reference", 0.0)
    assert calls == [count, blend, count, count, blend, count, count, count]


def test_a_run_that_a_signal_ended_goes_on_with_its_account_and_repeats_what_was_not_trained(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(drive(config, monkeypatch, until=2))
    saved = json.loads((Path(config.run.dir) / "checkpoints" / "step-000002" / "driver.json").read_text())
    assert saved["program"] == "grpo"
    account, used = saved["account"], 2 * PROMPTS * SAMPLES
    assert account["sampled"] == account["trained"] + account["filtered"] == used
    assert saved["reward_status"] == {"math/ok": used}  # not those of groups that wait, and are sampled again
    assert saved["updates_taken"] == 2
    run, engines = asyncio.run(drive(config, monkeypatch, resume=True))
    cluster: Any = run.cluster
    assert [path.name for path in cluster.loaded] == ["step-000002"]
    assert len(engines.prompts) == 2 * PROMPTS
    rows = logged(config)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["account/sampled"] == SAMPLED
    assert rows[-1]["account/trained"] == SAMPLED - CUT_OFF
    assert [row["reward/status/math/ok"] for row in rows] == [step * PROMPTS * SAMPLES for step in (1, 2, 3, 4)]
    trained = [line for step in (1, 2, 3, 4) for line in prompts_trained(config, step)]
    assert len(set(trained)) == len(trained) == STEPS * PROMPTS


def test_a_resumed_run_whose_prompts_have_changed_is_refused_and_its_folder_stays_as_it_was(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(drive(config, monkeypatch, until=2))
    run = Path(config.run.dir)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3}\n')  # a resumed run would repeat it
    (run / "rollouts" / "step-000003.jsonl").write_text("{}\n")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text("".join(Path(config.data.train[0].path).read_text().splitlines(keepends=True)[:-1]))
    source = config.data.train[0].model_copy(update={"path": str(fewer)})
    other = config.model_copy(update={"data": config.data.model_copy(update={"train": (source,)})})
    with pytest.raises(ValueError, match="rows"):
        asyncio.run(drive(other, monkeypatch, resume=True))
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


@pytest.mark.slow
def test_a_run_that_goes_on_on_another_day_gives_the_model_the_same_prompts(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%Y-%m-%d') }} {% for m in messages %}{{ m.content }}{% endfor %}")
    config = config.model_copy(update={"data": config.data.model_copy(update={"template": str(dated)})})
    first, later = datetime.date(2026, 1, 2), datetime.date(2026, 3, 4)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(drive(with_date(config, today=first), monkeypatch, until=2))
    other = config.model_copy(update={"data": config.data.model_copy(update={"date": later})})
    with pytest.raises(ValueError, match=r"data\.date=2026-03-04: the run began with 2026-01-02"):
        asyncio.run(drive(other, monkeypatch, resume=True))
    run, _ = asyncio.run(drive(with_date(config, today=later), monkeypatch, resume=True))
    assert run.tokenizer.decode(prompts_of(run)[0].token_ids.tolist()).startswith("2026-01-02 ")
    assert len({line for step in (1, 2, 3, 4) for line in prompts_trained(config, step)}) == STEPS * PROMPTS


def prompts_trained(config: GRPOConfig, step: int) -> list[str]:
    lines = (Path(config.run.dir) / "rollouts" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["prompt_id"] for line in lines))


@pytest.mark.slow
def test_a_curriculum_draws_solved_prompts_less_and_goes_on_after_a_signal_as_if_there_had_been_none(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = Path(config.data.train[0].path).read_text().splitlines(keepends=True)[:6]  # an epoch has two steps
    (tmp_path / "six.jsonl").write_text("".join(rows))

    async def solve_some(
        _: FakeScorer, prompt: Any, rollouts: Any, texts: Any, marks: Any, *, metric: str | None
    ) -> tuple[ScoredRollout, ...]:
        solved = prompt.id in ("six/1", "six/2", "six/3", "six/4")
        rewards = [1.0 if solved else float(i % 2) for i in range(len(texts))]
        return tuple(
            ScoredRollout(rollout, text, "", reward, {"math": reward}, "ok")
            for rollout, text, reward in zip(rollouts, texts, rewards, strict=True)
        )

    monkeypatch.setattr(FakeScorer, "score_group", solve_some)

    def with_curriculum(name: str) -> GRPOConfig:
        data = {"train": str(tmp_path / "six.jsonl"), "max_prompt_tokens": 64, "curriculum": {}}
        run = {"dir": str(tmp_path / name), "steps": 12}
        rollout = config.rollout.model_copy(update={"max_policy_lag": 0}).model_dump()
        values = {**config.model_dump(mode="json"), "data": data, "run": run, "rollout": rollout}
        return GRPOConfig.model_validate_json(json.dumps(values))

    whole, stopped = with_curriculum("whole"), with_curriculum("stopped")
    asyncio.run(drive(whole, monkeypatch))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(drive(stopped, monkeypatch, until=7))
    asyncio.run(drive(stopped, monkeypatch, resume=True))
    drawn = [[prompts_trained(each, step) for step in range(1, 13)] for each in (whole, stopped)]
    assert drawn[0] == drawn[1]
    later = [prompt for step in drawn[0][2:] for prompt in step]
    assert sum(prompt in ("six/5", "six/6") for prompt in later) > 10  # a third of 30, if all came alike
    check_documented(logged(whole), logged={"curriculum"})
    assert logged(whole)[-1]["data/curriculum/too_easy_fraction"] == pytest.approx(4 / 6)
    assert logged(whole)[-1]["data/curriculum/replaced"] == logged(stopped)[-1]["data/curriculum/replaced"] > 0


def test_a_reward_that_is_always_none_is_told_at_the_first_step_and_ends_the_run_only_as_other_useless_steps_do(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(
        _: Any, prompt: Any, rollouts: Any, texts: Any, *__: Any, **___: Any
    ) -> tuple[ScoredRollout, ...]:
        pairs = zip(rollouts, texts, strict=True)
        of_parts: Any = ("", {"math": "unscorable"})
        return tuple(ScoredRollout(*pair, "", None, {"math": None}, "unscorable", *of_parts) for pair in pairs)

    monkeypatch.setattr(FakeScorer, "score_group", nothing)
    with pytest.raises(RuntimeError, match="no rollout was trained on"):
        asyncio.run(drive(config, monkeypatch))
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("warning: reward: every reward of step 1 was None: math: its calls ended as unscorable (") == 1
    assert shown.count("every reward of step") == 1


@pytest.mark.slow
@pytest.mark.parametrize("reward", [["math"], []])
def test_a_teacher_replaces_the_reward_in_what_is_trained_and_logs_how_far_the_policy_is(
    config: GRPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reward: list[str]
) -> None:
    teacher = {"path": config.model.path, "coef": 2.0}
    values = {**config.model_dump(mode="json"), "algo": {"teacher": teacher, "mask_truncated": True}}
    values["data"] |= {"eval": [{"path": values["data"]["train"][0]["path"].replace("train", "test"), "rows": 2}]}
    taught = GRPOConfig.model_validate_json(json.dumps(values | {"reward": reward}))
    assert list(taught.contradictions()) == []
    run, _ = asyncio.run(drive(taught, monkeypatch))
    cluster: Any = run.cluster
    rows = logged(config)
    check_documented(rows, logged={"teacher"})
    assert rows[-1]["policy/teacher_kl"] == 0.5  # the old log-probs are 0, the teacher's are -0.5
    advantages = cluster.learners.targets.advantages
    assert set(advantages.tolist()) == {0.0, -1.0}  # prompts and truncated responses; the others
    assert rows[-1]["policy/advantage_abs"] == pytest.approx(1 - 1 / CUT_OFF_EVERY)
    assert rows[-1]["account/trained"] == SAMPLED - CUT_OFF
    assert rows[-1]["account/failed"] == 0
    assert ("reward/mean" in rows[-1]) == bool(reward)
    assert ("eval/test/avg@1" in evaluated(config)) == bool(reward)
    assert "reward" not in capsys.readouterr().out.partition("outside the healthy range")[2]


def test_an_evaluation_of_which_too_much_is_ungraded_is_told_once_and_measures_the_rest(
    config: GRPOConfig, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def grade(
        _: FakeScorer, prompt: Any, rollouts: Any, texts: Any, marks: Any, *, metric: str | None
    ) -> tuple[ScoredRollout, ...]:
        parts = [{"math": None, "form": 1.0} if prompt.id.endswith("/1") else {"math": 1.0, "form": 0.0}] * len(texts)
        pairs = zip(rollouts, texts, parts, strict=True)
        return tuple(ScoredRollout(*pair, "", float(i), of, "ok") for i, (*pair, of) in enumerate(pairs))

    monkeypatch.setattr(FakeScorer, "score_group", grade)
    data = {**config.model_dump(mode="json")["data"], "eval": [{"path": str(tiny_model_dir / "test.jsonl"), "rows": 4}]}
    values = {**config.model_dump(mode="json"), "data": data, "evaluation": {"every": 2}}
    values["evaluation"] |= {"samples_per_prompt": 2}
    values["checkpoint"] |= {"best": "eval/test/maj@2"}  # the reward states no answers
    run, _ = asyncio.run(drive(GRPOConfig.model_validate_json(json.dumps(values)), monkeypatch))
    measured = run.state.evaluations[4]
    assert (measured["eval/test/avg@2"], measured["eval/test/ungraded_fraction"]) == (1.0, 0.25)
    assert measured["eval/test/part/form"] == 0.25
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("math gave no value for 2 of 8 responses (2 x no value)") == 1
    assert shown.count("checkpoint.best=eval/test/maj@2: the evaluation of step 0 has no such number") == 1
    assert "test avg@2 1.000 pass@2 1.000 ungraded 0.250 form 0.250" in shown
