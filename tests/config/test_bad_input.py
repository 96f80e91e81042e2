"""Bad input: one message that names key or row, value, reason and remedy, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import WAIT_S
from worlds import make_config, make_ppo_config

from rlhf import evaluate, grpo
from rlhf.check.start_checks import start_problems
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import resolved_yaml
from rlhf.run.folder import RunFolder
from rlhf.run.prompts import read_data
from rlhf.run.run import Run
from rlhf.run.state import RunState


def start(folder: Path, /, **sections: dict[str, Any]) -> Run[GRPOConfig]:
    return begin(make_config(folder, **sections))


def begin(config: GRPOConfig) -> Run[GRPOConfig]:
    """What a training program does before it starts anything."""
    if problems := start_problems(config):
        raise ValueError("\n".join(problems))
    run = Run(config, resume=False)
    read_data(config, run.tokenizer)
    return run


@pytest.fixture
def model(tiny_model_dir: Path) -> Path:
    return tiny_model_dir / "model"


@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"model": {"path": "/nowhere/model"}}, ("model.path=/nowhere/model", "no such folder", "hub name")),
        ({"data": {"train": "/nowhere/train.jsonl"}}, ("data.train", "/nowhere/train.jsonl")),
        ({"data": {"eval": "/nowhere/test.parquet"}}, ("data.eval", "/nowhere/test.parquet")),
        ({"data": {"answer_column": "solution"}}, ("answer_column", "solution", "question")),
        (
            {"rollout": {"max_response_tokens": 2000}, "learner": {"max_tokens_per_microbatch": 4096}},
            ("data.max_prompt_tokens=64", "rollout.max_response_tokens=2000", "2064 tokens", "2048"),
        ),
        ({"data": {"max_prompt_tokens": 3}}, ("max_prompt_tokens", "3")),
    ],
    ids=["model", "train file", "eval file", "column", "context", "every prompt too long"],
)
def test_what_is_missing_or_too_long_is_named_with_its_key(
    model: Path, sections: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        start(model, **sections)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_folder_without_a_model_is_not_taken_for_one(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\bconfig\.json\b"):
        start(model, model={"path": str(tmp_path)})


def test_a_row_without_an_answer_is_named(model: Path, tmp_path: Path) -> None:
    rows = [{"question": "1 + 1", "answer": "2"}, {"question": "1 + 2", "answer": ""}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"row 2 of .*rows\.jsonl\b.*answer"):
        start(model, data={"train": str(file)})


def test_a_run_folder_that_holds_a_run_names_three_remedies(model: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, resume=False)
    folder.finish_checkpoint(folder.begin_checkpoint(1), RunState(step=1), keep=1)
    with pytest.raises(ValueError, match="already holds a run") as caught:
        start(model, run={"dir": str(tmp_path)})
    assert all(remedy in str(caught.value) for remedy in ("--resume", "run.dir=", "rm -r"))


def test_resuming_without_a_checkpoint_says_what_would_have_written_one(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\.every"):
        Run(make_config(model, run={"dir": str(tmp_path)}), resume=True)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"epochs_per_step": 3}}, r"learner\.epochs_per_step=3\b.*learner\.epochs_per_step=1\b"),
        (
            {"critic": {"minibatches_per_epoch": 4}},
            r"critic\.minibatches_per_epoch=4\b.*critic\.minibatches_per_epoch=1\b",
        ),
        ({"critic": {"warmup_steps": 2}}, r"critic\.warmup_steps=2\b.*critic\.warmup_steps=0\b"),
    ],
)
def test_a_resumed_run_may_not_change_its_number_of_optimizer_steps(
    model: Path, tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    run = {"run": {"dir": str(tmp_path), "steps": 10}}
    folder = RunFolder(tmp_path, resume=False)
    state = RunState(step=2, updates=make_ppo_config(model, **run).update_plan)
    folder.finish_checkpoint(folder.begin_checkpoint(2), state, keep=1)
    Run(make_ppo_config(model, **run), resume=True)
    with pytest.raises(ValueError, match=message):
        Run(make_ppo_config(model, **run, **sections), resume=True)


def test_a_run_continues_from_the_newest_complete_checkpoint(model: Path, tmp_path: Path) -> None:
    config = make_config(model, run={"dir": str(tmp_path), "steps": 10})
    folder = RunFolder(tmp_path, resume=False)
    for step in (2, 4):
        state = RunState(step=step, updates=config.update_plan)
        folder.finish_checkpoint(folder.begin_checkpoint(step), state, keep=2)
    assert Run(config, resume=True).first_step == 4
    (folder.checkpoints / "step-000004" / "driver.json").write_text("")
    assert Run(config, resume=True).first_step == 2


def test_a_run_is_resumed_by_the_program_that_began_it(model: Path, tmp_path: Path) -> None:
    run = {"run": {"dir": str(tmp_path), "steps": 10}}
    grpo, ppo = make_config(model, **run), make_ppo_config(model, **run)
    folder = RunFolder(tmp_path, resume=False)
    for began, goes_on, names in ((grpo, ppo, ("rlhf.grpo", "rlhf.ppo")), (ppo, grpo, ("rlhf.ppo", "rlhf.grpo"))):
        folder.finish_checkpoint(
            folder.begin_checkpoint(2), RunState(step=2, program=began.program, updates=began.update_plan), keep=1
        )
        with pytest.raises(ValueError, match=rf"{names[0]}\b.*{names[1]}\b.*{names[0]}\b"):
            Run(goes_on, resume=True)


@pytest.mark.parametrize("key", ["critic.path", "reward_model.path"])
def test_every_model_of_a_run_is_checked_before_anything_starts(model: Path, key: str) -> None:
    section = key.split(".")[0]
    with pytest.raises(ValueError, match=rf"^{key}=/nowhere/judge: "):
        begin(make_ppo_config(model, **{section: {"path": "/nowhere/judge"}}))


def test_a_critic_with_a_smaller_vocabulary_than_the_policys_is_refused(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    smaller = json.loads((model / "config.json").read_text()) | {"vocab_size": 3, "pad_token_id": None}
    (other / "config.json").write_text(json.dumps(smaller))
    with pytest.raises(ValueError, match=r"critic\.path=.*vocabulary of 3\b"):
        begin(make_ppo_config(model, critic={"path": str(other)}))


@pytest.mark.slow
def test_the_program_prints_one_message_and_exits_with_2(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(make_config(model).model_dump(mode="json")))
    for override, part in (
        ("model.path=/nowhere", "model.path=/nowhere"),
        ("learner.optimiser.lr=1", "Did you mean learner.optimizer"),
        ("cluster.learners=999", "reserve 500 CPUs"),
    ):
        command = [sys.executable, "-m", "rlhf.grpo", "--config", str(config), override]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 2
        assert part in done.stderr
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not (model.parent / "run").exists()  # nothing was written


def test_mistakes_of_every_kind_are_named_together(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(make_config(model).model_dump(mode="json")))
    overrides = [
        "learner.lr=1", "rollout.prompts_per_step=many", "algo.clip_low=1.5", "data.train=/nowhere.jsonl",
        "model.path=/nowhere", "run.dir=/proc/version/run", "cluster.learners=999",
    ]  # fmt: skip
    for given, expected in (
        (overrides, ["rollout.prompts_per_step", "learner.lr"]),
        (overrides[2:], ["algo.clip_low", "data.train", "model.path", "run.dir", "cluster"]),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            grpo.main(["--config", str(config), *given])
        assert [re.split("[=:]", line)[0] for line in str(caught.value).splitlines()] == expected


def test_all_wrong_values_are_named_together(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps(make_config(model).model_dump(mode="json")))
    wrong = ["data.train=3", "learner.max_tokens_per_microbatch=x", "model=here", "run.steps=ten", "rollout.stop=1"]
    with pytest.raises(ValueError, match=r".") as caught:
        grpo.main(["--config", str(config), *wrong])
    named = [re.split("[=:]", line)[0] for line in str(caught.value).splitlines()]
    assert sorted(named) == sorted(text.split("=")[0] for text in wrong)


def test_a_disk_without_room_for_the_checkpoints_is_named_with_both_sizes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model, run={"dir": str(tmp_path / "a" / "b")})
    assert start_problems(config) == []
    free = {"/dev/shm": 2**40}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free.get(str(path), 2**20)))
    (problem,) = start_problems(config)
    assert problem.startswith(f"run.dir={tmp_path}/a/b: ")
    assert "need 0.0 GiB (checkpoint.keep=2, " in problem
    assert f"{tmp_path} has 0.0 GiB free" in problem
    assert (
        start_problems(make_config(model, run={"dir": str(tmp_path), "export": False}, checkpoint={"every": None}))
        == []
    )


def test_an_evaluation_reads_the_config_of_a_ppo_run() -> None:
    config = Path(__file__).parents[2] / "configs" / "ppo_quickstart.yaml"
    flags = ["--config", str(config), "data.eval=[]"]
    with pytest.raises(ValueError, match=r"^data\.eval is empty"):
        evaluate.main(["--program", "ppo", *flags])
    with pytest.raises(ValueError, match=r"^--config .*: a config of rlhf ppo, .*Add --program ppo\.$"):
        evaluate.main(flags)


def test_a_checkpoint_to_resume_from_that_is_not_there_is_refused_with_those_that_are(
    model: Path, tmp_path: Path
) -> None:
    config = make_config(model, run={"dir": str(tmp_path / "run")})
    folder = RunFolder(tmp_path / "run", resume=False)
    folder.finish_checkpoint(folder.begin_checkpoint(1), RunState(step=1), keep=1)
    (tmp_path / "mine.yaml").write_text(resolved_yaml(config))
    flags = ["--config", str(tmp_path / "mine.yaml"), "--resume-from"]
    with pytest.raises(ValueError, match=r"^--resume-from best: .*\bstep-000001\b"):
        grpo.main([*flags, "best"])
    with pytest.raises(ValueError, match=r"^--resume-from step-000002: "):
        grpo.main([*flags, "step-000002"])
