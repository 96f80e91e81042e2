"""Bad input: one message that names key or row, value, reason and remedy, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from worlds import make_config, make_ppo_config

from rlhf import command, evaluate, export, grpo, quickstart, score, show
from rlhf.check.start_checks import start_problems
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import resolved_yaml
from rlhf.report.__main__ import main as report
from rlhf.run.folder import RunFolder
from rlhf.run.prompts import read_data
from rlhf.run.run import Run
from rlhf.run.state import RunState

# the argument -> the key or flag, the value, the remedy
ARGUMENTS: dict[str, tuple[str, str, str]] = {
    "--lr=1": ("--lr", "=1", "learner.optimizer.lr?"),
    "--run.steps=3": ("--run.steps", "=3", "run.steps?"),
    "--paln": ("--paln", "--paln", "--help"),
    "model.lora.targets=[q_proj, query]": ("model.lora.targets", "=query", "It has down_proj, gate_proj, k_proj"),
    "model.gradient_checkpointing=tile": ("gradient_checkpointing", "=tile", "true, false, selective or tiled"),
    "run.dir=[1": ("run.dir", "[1", "Quote it: run.dir='\"...\"'."),
    "data.train=/nowhere.jsonl": ("data.train", "=/nowhere.jsonl", "Correct the path"),
    "data.train=rows.csv": ("data.train", "=rows.csv", "Correct the path"),
    "data.train=some/data": ("data.train", "=some/data", "hf download some/data"),
    "model.path=/nowhere": ("model.path", "=/nowhere", "Give a folder"),
    "model.path=some/model": ("model.path", "=some/model", "hf download some/model"),
    "run.dir=/proc/version/run": ("run.dir", "=/proc/version/run", "Name a folder."),
    "cluster.learners=999": ("cluster", "999 learners", "Ask for fewer"),
    "data.answer_column=solution": ("answer_column", "=solution", "only question, answer"),
    "data.max_prompt_tokens=3": ("data.train", "the limit is 3", "Raise data.max_prompt_tokens"),
    "--resume": ("run.dir", "no complete, undamaged checkpoint", "without --resume"),
}


# the second row -> where it is, what is wrong, the remedy
ROWS: dict[str, tuple[str, str, str]] = {
    "{question: 1}": ("line 2 of", "is not JSON", "Correct or remove"),
    "[1]": ("row 2 of", "is a list, not an object", 'Write each row as {"question"'),
    '{"question": "x", "answer": ""}': ("row 2 of", "`answer` is empty", "set data.answer_format=none"),
    '{"answer": "2"}': ("row 2 of", "`question` is missing", "Correct or remove"),
    '{"question": 7, "answer": "2"}': ("row 2 of", "`question` is 7", "name another column"),
    '{"question": [{"role": "usr", "content": "x"}], "answer": "2"}': ("row 2 of", "'usr'", "a role of system, user"),
    '{"question": [{"role": "assistant", "content": "x"}], "answer": "2"}': (
        "row 2 of",
        "the assistant's",
        "Remove it",
    ),
}


@pytest.fixture(scope="module")
def config(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("bad") / "config.yaml"
    values = make_config(tiny_model_dir / "model", run={"dir": str(file.parent / "run")}).model_dump(mode="json")
    file.write_text(json.dumps(values))
    return file


def message(config: Path, *arguments: str) -> str:
    def begin_program() -> None:
        argv = ["--config", str(config), *arguments]
        parsed, flags = cli.parse("rlhf.grpo", "", GRPOConfig, argv, check=start_problems)
        read_data(parsed, Run(parsed, resume=flags.resume).tokenizer)

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller compares the message
        begin_program()
    return str(caught.value)


def _check(message: str, parts: tuple[str, ...]) -> None:
    assert [part for part in parts if part not in message] == [], message
    assert message.count("\n") <= 1, message  # one message; a remedy may have a line of its own


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_bad_argument_is_named_with_its_value_and_the_remedy(config: Path, argument: str) -> None:
    _check(message(config, argument), ARGUMENTS[argument])


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
        ({"data": {"eval": "/nowhere/test.parquet"}}, ("data.eval", "/nowhere/test.parquet")),
        (
            {"rollout": {"max_response_tokens": 2000}, "learner": {"max_tokens_per_microbatch": 4096}},
            ("data.max_prompt_tokens=64", "rollout.max_response_tokens=2000", "2064 tokens", "2048"),
        ),
    ],
)
def test_missing_files_and_too_long_sequences_are_named_with_their_key(
    model: Path, sections: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        start(model, **sections)
    _check(str(caught.value), parts)


def test_a_folder_without_a_model_is_not_taken_for_one(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\bconfig\.json\b"):
        start(model, model={"path": str(tmp_path)})


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
    with pytest.raises(ValueError, match=r"^--config .*: a config of rlhf ppo, .*Add --program ppo\."):
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


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_row_is_named_with_its_value_and_the_remedy(config: Path, tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1", "answer": "2"}\n' + row + "\n")
    _check(message(config, f"data.train={file}"), (*ROWS[row], str(file)))


@pytest.mark.parametrize(
    ("program", "arguments", "parts"),
    [
        (grpo.main, ["run.steps=3"], ("--config", "no file given", "Name a YAML file: ")),
        (grpo.main, ["mine.yaml"], ("--config", "no file given", "--config mine.yaml")),
        (grpo.main, ["--config", "nowhere.yaml"], ("--config", "nowhere.yaml", "path of a YAML file")),
        (score.main, ["nowhere.jsonl"], ("nowhere.jsonl", "no such file", "Correct the path")),
        (show.main, ["nowhere"], ("nowhere", "no", "run")),
        (report, ["nowhere"], ("nowhere", "no", "run")),
        (export.main, ["nowhere", "model"], ("nowhere", "neither a run", "Name one")),
        (quickstart.main, ["--output", "."], ("--output=.", "not an empty folder", "Name a new folder")),
        (command.main, ["configs", "copy", "mth"], ("configs copy", "mth", "There are cispo, cpu, ")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_other_programs_name_bad_arguments_too(program: Any, arguments: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        program(arguments)
    _check(str(caught.value), parts)
