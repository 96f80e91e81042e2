"""What a resumed run may change: each key is free or refused by name, and so is another model or other data."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config, make_ppo_config

from rlhf import grpo
from rlhf.config.cli import NothingToDoError, run_program
from rlhf.config.grpo import GRPOConfig
from rlhf.config.ppo import PPOConfig
from rlhf.log.patient_files import PatientFiles
from rlhf.log.sinks import JsonlSink
from rlhf.rewards.scorer import Scorer
from rlhf.run.folder import RunFolder
from rlhf.run.restarts import train_with_restarts
from rlhf.run.resume import (
    changed_keys,
    check_resumed_state,
    code_warnings,
    model_fingerprints,
    resume_warnings,
)
from rlhf.run.rollout_loop import rollout_loop
from rlhf.run.run import Run
from rlhf.run.state import RunState

RESUME = Namespace(resume=True, resume_from=None)


@pytest.fixture
def model(tiny_model_dir: Path) -> Path:
    return tiny_model_dir / "model"


def state_of(config: GRPOConfig) -> RunState:
    return RunState(
        step=2,
        config=config.model_dump(mode="json"),
        models=model_fingerprints(config),
        updates=config.update_plan,
    )


def resume(began: GRPOConfig, now: GRPOConfig, tmp_path: Path) -> None:
    state = RunState.from_json(state_of(began).to_json())
    check_resumed_state(now, tmp_path / "run", state)


@pytest.mark.parametrize(
    ("sections", "messages"),
    [
        (
            {"learner": {"optimizer": {"lr": 1e-5}}},
            [r"learner\.optimizer\.lr=1e-05: .*\b1e-06\b"],
        ),
        (
            {"reward": {"parts": [{"name": "multiple_choice"}]}},
            [r"reward\.parts\.0\.name=multiple_choice: .*\bmath\b"],
        ),
        (
            {"algo": {"kl_coef": 0.1}, "rollout": {"temperature": 0.7}},
            [r"algo\.kl_coef=0\.1", r"rollout\.temp.*=0\.7"],
        ),
        ({"run": {"seed": 1}}, [r"run\.seed=1: .*run\.seed=0\b"]),
        ({"model": {"dtype": "bfloat16"}}, [r"model\.dtype=bfloat16: .*\bfloat32\b"]),
        ({"model": {"lora": {"rank": 8}}}, [r"model\.lora=\{.*: .*\bnull\b"]),
        ({"reward_model": {"path": "x/y"}}, [r"reward_model=\{.*: .*\bnull\b"]),
        ({"data": {"prompt_suffix": "Think."}}, [r"data\.prompt_suffix=Think\.: .*\bnull\b"]),
        ({"learner": {"epochs_per_step": 3}}, [r"learner\.epochs_per_step=3: .*epochs_per_step=1\b"]),
    ],
)
def test_what_the_run_learns_from_is_refused_by_name_with_both_values(
    model: Path, tmp_path: Path, sections: dict[str, Any], messages: list[str]
) -> None:
    began = make_config(model)
    resume(began, make_config(model), tmp_path)
    for message in messages:
        with pytest.raises(ValueError, match=message):
            resume(began, make_config(model, **sections), tmp_path)


def test_where_and_how_fast_a_run_is_computed_is_free(model: Path, tmp_path: Path) -> None:
    now = make_ppo_config(
        model,
        cluster={"device": "cpu", "learners": 4, "engines": 3, "step_deadline_s": 60.0},
        learner={"zero_stage": 3, "max_tokens_per_microbatch": 256},
        critic={"zero_stage": 1},
        rollout={"prompts_per_step": 4, "samples_per_prompt": 4, "max_response_tokens": 64, "kv_cache_gib": 2},
        reward={"workers": 1},
        logging={"level": "info"},
        evaluation={"every": 3},
        checkpoint={"every": 5, "keep": 1},
        run={"steps": 20, "export": False},
        data={"eval": str(model.parent / "test.jsonl")},
    )
    resume(make_ppo_config(model), now, tmp_path)


def test_a_deterministic_run_also_keeps_what_sums_are_rounded_by(model: Path, tmp_path: Path) -> None:
    deterministic = {"run": {"deterministic": True}}
    began, plain = make_config(model, **deterministic), make_config(model)
    more_engines = {"device": "cpu", "engines": 2, "min_engines": 2}
    resume(began, make_config(model, **deterministic, cluster=more_engines), tmp_path)
    two = {"device": "cpu", "learners": 2}
    message = r"cluster\.learners=2: .*cluster\.learners=1\b.*run\.deterministic=false\b"
    with pytest.raises(ValueError, match=message):
        resume(began, make_config(model, **deterministic, cluster=two), tmp_path)
    resume(began, make_config(model, cluster=two), tmp_path)
    resume(plain, make_config(model, **deterministic, cluster=two), tmp_path)


def test_options_of_vllm_are_compared_together(model: Path, tmp_path: Path) -> None:
    """Also where only one of the two runs has an option."""
    began = make_config(model, run={"deterministic": True})
    now = make_config(model, run={"deterministic": True}, rollout={"engine": {"max_num_batched_tokens": 512}})
    with pytest.raises(ValueError, match=r"rollout\.engine=.*max_num_batched_tokens.*run\.deterministic=false\b"):
        resume(began, now, tmp_path)
    resume(make_config(model), make_config(model, rollout={"engine": {"max_num_batched_tokens": 512}}), tmp_path)


def test_teachers_may_move_and_none_may_come_go_or_change(model: Path, tmp_path: Path) -> None:
    def taught(**by_source: Path) -> GRPOConfig:
        teachers = {name: {"path": str(path)} for name, path in by_source.items()}
        return make_config(model, algo={"teacher": {"reward": "add", "by_source": teachers}})

    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(model, moved)
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    resume(taught(train=model), taught(train=moved), tmp_path)
    with pytest.raises(ValueError, match=rf"^algo\.teacher\.by_source\.train\.path={other}: the fingerprint"):
        resume(taught(train=model), taught(train=other), tmp_path)
    gone = make_config(model, algo={"teacher": {"reward": "add", "path": str(model)}})
    for began, now in ((taught(train=model), gone), (gone, taught(train=model))):
        with pytest.raises(ValueError, match=r"algo\.teacher\.by_source\.train="):
            resume(began, now, tmp_path)


@pytest.mark.parametrize(
    ("key", "resume"),
    [
        ("run.dir", "free"),
        ("run.seed", "fixed"),
        ("cluster.learners", "rounding"),
        ("logging.wandb.mode", "free"),
        ("critic.zero_stage", "rounding"),
        ("critic.optimizer.lr", "fixed"),
        ("environment.options", "fixed"),
        ("environment.by_name.chess.url", "free"),
        ("environment.by_name.chess.command", "fixed"),
        ("reward.parts.0.network", "free"),
        ("reward.parts.0.options", "fixed"),
    ],
)
def test_a_field_or_the_section_around_it_says_whether_a_resumed_run_may_change_it(key: str, resume: str) -> None:
    def values(value: Any, names: list[str]) -> Any:
        inside = values(value, names[1:]) if len(names) > 1 else value
        return [inside] if names[0].isdigit() else {names[0]: inside}

    (change,) = changed_keys(PPOConfig, *(values(value, key.split(".")) for value in (0, 1)))
    assert (change.key, change.resume) == (key, resume)


def test_a_name_of_the_users_that_is_new_or_gone_is_a_change() -> None:
    without, one = {"environment": {"by_name": {}}}, {"environment": {"by_name": {"chess": {}}}}
    for began, now in ((without, one), (one, without)):
        (change,) = changed_keys(GRPOConfig, began, now)
        assert (change.key, change.resume) == ("environment.by_name.chess", "fixed")


def test_a_longer_run_is_the_same_run_with_a_warning_where_its_schedule_spans_it(model: Path) -> None:
    plain, longer = make_config(model), make_config(model, run={"steps": 20})
    assert list(resume_warnings(longer, state_of(plain))) == []
    schedule = {"learner": {"schedule": {"name": "cosine"}}}
    began, now = make_config(model, **schedule), make_config(model, run={"steps": 20}, **schedule)
    (warning,) = resume_warnings(now, state_of(began))
    assert "run.steps=20: the run began with 10, and learner.schedule=cosine spans the whole run" in warning


def test_evaluations_that_go_on_with_another_metric_are_warned_of(model: Path) -> None:
    def run_by(metric: str | None) -> GRPOConfig:
        parts = {"reward": {"parts": ["format", "exact"]}, "evaluation": {"metric": metric}}
        return make_config(model, data={"eval": "test.jsonl"}, **parts)

    state = state_of(run_by("exact"))
    assert list(resume_warnings(run_by("format"), state)) == []  # nothing is evaluated so far
    state.evaluations = {0: {"eval/test/avg@1": 0.5}}
    assert list(resume_warnings(run_by(None), state)) == []
    (warning,) = resume_warnings(run_by("format"), state)
    assert "data.eval test: its metric was exact up to step 2, but is format from here on" in warning
    assert warning.endswith("Resume with evaluation.metric=exact to go on as before.")


def test_a_model_with_another_fingerprint_is_refused_and_a_moved_one_is_not(model: Path, tmp_path: Path) -> None:
    began = make_config(model)
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    data = {"train": str(model.parent / "train.jsonl"), "max_prompt_tokens": 64}
    resume(began, make_config(model, model={"path": str(moved)}, data=data), tmp_path)
    weights = moved / "model.safetensors"
    content = bytearray(weights.read_bytes())
    head = 8 + int.from_bytes(content[:8], "little")
    for place in range(head + 1, len(content), 4):  # as training does: a little in every number
        content[place] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"^model\.path=.*moved: .*\bweights is [0-9a-f]+"):
        resume(began, make_config(model, model={"path": str(moved)}), tmp_path)
    shutil.copy(model / "model.safetensors", weights)
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    with pytest.raises(ValueError, match=r"^model\.path=.*\bconfig is [0-9a-f]+"):
        resume(began, make_config(model, model={"path": str(moved)}), tmp_path)


def test_weights_that_this_machine_does_not_have_are_not_compared(model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(model, moved)
    (moved / "model.safetensors").unlink()
    resume(make_config(model), make_config(model, model={"path": str(moved)}), tmp_path)


def finished(path: Path, config: GRPOConfig, *, step: int) -> RunFolder:
    """A run whose newest checkpoint is of this step, and whose summary says that it took all steps."""
    folder = RunFolder(path, resume=False)
    state = replace(state_of(config), step=step, program="grpo")
    folder.finish_checkpoint(folder.begin_checkpoint(step), state, keep=1)
    folder.write_summary(RunState(step=config.run.steps).summary())
    return folder


def test_resuming_a_finished_run_ends_with_status_0_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(model, run={"dir": str(tmp_path / "run")})
    finished(tmp_path / "run", config, step=10)
    assert run_program(lambda: train_with_restarts(config, RESUME, grpo.train)) == 0
    assert capsys.readouterr().out == (
        f"run.dir={tmp_path / 'run'}: the run is finished, all 10 steps of it. Raise run.steps to train on.\n"
    )
    without = make_config(model, run={"dir": str(tmp_path / "none")}, checkpoint={"every": None})
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "summary.json").write_text('{"steps": 10}')
    with pytest.raises(NothingToDoError):
        train_with_restarts(without, RESUME, grpo.train)
    longer = make_config(model, run={"dir": str(tmp_path / "run"), "steps": 11})
    assert Run(longer, resume=True).first_step == 10
    assert Run(config, resume=True, start_at="step-000010").first_step == 10  # asked for by name


def test_a_finished_run_of_another_model_or_program_is_refused_and_not_called_finished(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, run={"dir": str(tmp_path / "run")})
    finished(tmp_path / "run", config, step=10)
    other = shutil.copytree(model, tmp_path / "other")
    (other / "config.json").write_text(f"{(other / 'config.json').read_text()}\n")
    with pytest.raises(ValueError, match=r"^model\.path=\S+other: the fingerprint of its config"):
        Run(make_config(other, run={"dir": str(tmp_path / "run")}), resume=True)
    with pytest.raises(ValueError, match=r"^algo\.kl_coef=0\.5: the run began with"):
        Run(make_config(model, run={"dir": str(tmp_path / "run")}, algo={"kl_coef": 0.5}), resume=True)


def test_a_run_whose_last_checkpoint_failed_repeats_its_last_steps_though_it_has_a_summary(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, run={"dir": str(tmp_path)})
    finished(tmp_path, config, step=8)
    assert Run(config, resume=True).first_step == 8


@pytest.mark.parametrize("content", [b'{"steps": 1', b"", b"\xff\xfe", b"[]", b'{"steps": null}', b"[" * 100_000])
def test_a_summary_that_cannot_be_read_counts_as_not_finished_with_a_message(
    model: Path, tmp_path: Path, content: bytes
) -> None:
    config = make_config(model, run={"dir": str(tmp_path)})
    finished(tmp_path, config, step=10).summary.write_bytes(content)
    run = Run(config, resume=True)
    assert run.first_step == 10
    (warning,) = run.folder.warnings
    assert warning.startswith(f"{tmp_path / 'summary.json'}: the ")
    assert warning.endswith(" The run counts as not finished.")


@pytest.mark.parametrize("torn", [b'{"step": 2, "a\xff', b"\xff\xfe\x00", b"[" * 100_000, b'{"step": null}'])
def test_lines_of_the_metrics_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path, torn: bytes) -> None:
    file, warnings = tmp_path / "metrics.jsonl", list[str]()
    file.write_bytes(b'{"step": 1}\n' + torn + b'\n{"step": 2}\n{"step": 3}\n{"st\xff')
    JsonlSink(file, PatientFiles(warnings.append), resume_step=2)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2]
    assert warnings == [f"{file}: 1 line(s) could not be read and were dropped."]


def test_metrics_are_cut_by_rename_so_that_another_reader_keeps_its_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with file.open() as reader:
        sink = JsonlSink(file, PatientFiles(print), resume_step=2)
        sink.log(3, {"a": 1})
        assert len(reader.read().splitlines()) == 4
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_resumed_run_warns_of_other_code_in_its_reward_and_one_that_restarts_itself_ends(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(response, **_):\n    return 1.0\n")
    reward = {"parts": [f"{file}:score"], "workers": 1}
    config = make_config(model, run={"dir": str(tmp_path / "run")}, reward=reward)
    with Scorer(config.reward) as scorer:
        before = RunState.from_json(RunState(step=2, rewards=scorer.sources).to_json()).rewards
        assert code_warnings("reward", before, scorer.sources, restarted=True) == []
        assert code_warnings("reward", {}, scorer.sources, restarted=True) == []
    file.write_text("def score(response, **_):\n    return 2.0\n")
    problem = f"reward name='{file}:score': mine.py has changed since the run began."
    with Scorer(config.reward) as scorer:
        assert code_warnings("reward", before, scorer.sources, restarted=False) == [problem]
    run = Run(config, resume=False, restarted=True)
    run.state.rewards = before

    async def start() -> None:
        async with rollout_loop(run):
            raise AssertionError("started")

    with pytest.raises(ValueError, match=rf"^{re.escape(problem)} .*--resume"):
        asyncio.run(start())
