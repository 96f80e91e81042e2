"""Bad input of every kind, one mistake each: one message with the key or the row, the value and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf import command, export, grpo, quickstart, score, show
from rlhf.config import cli
from rlhf.config.grpo import GRPOConfig
from rlhf.report.__main__ import main as report
from rlhf.run.prompts import read_data
from rlhf.run.run import Run

# the argument -> the key or flag, the value as it is shown, the remedy
ARGUMENTS: dict[str, tuple[str, str, str]] = {
    # names
    "learner.lr=1e-6": ("learner.lr", "=1e-06", "learner.optimizer.lr?"),
    "optimizer.lr=1e-6": ("optimizer", '{"lr": 1e-06}', "learner.optimizer?"),
    "learner.optimiser.lr=1": ("learner.optimiser", '{"lr": 1}', "learner.optimizer?"),
    "run.step=3": ("run.step", "=3", "run.steps?"),
    "batch_size=8": ("batch_size", "=8", "It is rollout.prompts_per_step"),
    "algo.beta=0.1": ("algo.beta", "=0.1", "It is algo.kl_coef"),
    "rollout.topp=0.9": ("rollout.topp", "=0.9", "rollout.top_p?"),
    "data.train={pth: x.jsonl}": ("data.train.0.pth", "=x.jsonl", "data.train.0.path?"),
    "reward=[{name: maths}]": ("reward.parts.0.name", "'maths'", "math?"),
    "reward=[{name: math, mod: strict}]": ("reward.parts.0.mod", "=strict", "reward.parts.0.mode?"),
    # how it is written
    "steps": ("'steps'", "steps", "such as run.steps=10"),
    "run..steps=3": ("run..steps", "3", "such as run.steps=10"),
    "run.dir=[1": ("run.dir", "[1", "Quote it: run.dir='\"...\"'."),
    "run.dir=${nowhere}": ("run.dir", "'nowhere' not found", r"write \${...} where it is text"),
    "--learning-rate=1": ("--learning-rate", "=1", "as a key: learner.optimizer.lr=1."),
    "--run.steps=3": ("--run.steps", "=3", "as a key: run.steps=3."),
    "--paln": ("--paln", "--paln", "listed by --help"),
    "model=here": ("model", "=here", "such as model.path=VALUE"),
    "reward=math": ("reward.parts", "='math'", "Write [{name: math, weight: 1.0}]."),
    # types
    "learner.optimizer.lr=fast": ("learner.optimizer.lr", "=fast", "number >= 0"),
    "learner.optimizer.lr=-1": ("learner.optimizer.lr", "=-1", "greater than or equal to 0"),
    "run.steps=1.5": ("run.steps", "=1.5", "integer > 0"),
    'run.steps="10"': ("run.steps", '="10"', "Write run.steps=10."),
    "run.steps=null": ("run.steps", "=null", "integer > 0"),
    "run.dir=2024": ("run.dir", "=2024", "Quote it: run.dir='\"2024\"'."),
    "rollout.stop=1": ("rollout.stop", "=1", "list of text"),
    "rollout.temperature=.inf": ("rollout.temperature", "=Infinity", "finite number"),
    "learner.optimizer.betas=[0.9]": ("learner.optimizer.betas", "too few", "its type is ["),
    "data.eval=3": ("data.eval", "3 names no data", "Use a path or hub name"),
    # choices
    "algo.kl_estimator=k5": ("algo.kl_estimator", "=k5", "'k1', 'k2', 'k3' or 'k4'"),
    "algo.policy_loss=pppo": ("algo.policy_loss", "=pppo", "or MODULE:FUNCTION"),
    "algo.policy_loss='my loss:3'": ("algo.policy_loss", "'my loss:3'", "path/to/file.py:function"),
    "algo={policy_loss: 'm:f', clip_high: 0.3}": ("algo.clip_high", "=0.3", "does not get it"),
    "algo.advantage=gae": ("algo.advantage", "=gae", "rlhf.ppo"),
    "cluster.device=gpu": ("cluster.device", "=gpu", "'cuda' or 'cpu'"),
    "learner.zero_stage=4": ("learner.zero_stage", "=4", "0, 1, 2 or 3"),
    "reward=[{name: math, mode: harsh}]": ("reward.parts.0.mode", "=harsh", "'strict' or 'lenient'"),
    "checkpoint.every=never": ("checkpoint.every", "=never", "steps above 0, auto or null"),
    # contradictions
    "rollout.samples_per_prompt=1": ("rollout.samples_per_prompt", "=1", "Use at least 2"),
    "learner.max_tokens_per_microbatch=10": ("learner.max_tokens_per_microbatch", "=10", "Raise the budget"),
    "learner.schedule.warmup_steps=99": ("learner.schedule.warmup_steps", "=99", "Shorten the warm-up"),
    "learner.schedule.min_lr=1": ("learner.schedule.min_lr", "=1.0", "must not exceed the peak"),
    "reward=[]": ("reward", "[]", "Name a reward"),
    "data.curriculum={min_pass_rate: 1}": (
        "data.curriculum.min_pass_rate",
        "=1 with max_pass_rate=1",
        "Lower the former",
    ),
    "data.train=[]": ("data.train", "empty", "Name a file"),
    "model.lora.targets=q_proj": ("model.lora.targets", "=q_proj", "such as [q_proj, v_proj]"),
    "model.lora.rank=600": ("model.lora.rank", "=600", "less than or equal to 512"),
    "model.lora.targets=[q_proj, query]": ("model.lora.targets", "=query", "It has down_proj, gate_proj, k_proj"),
    # what is not there, or does not fit this machine
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


def begin(*arguments: str) -> None:
    """What a training program does before it starts anything."""
    config, flags = cli.parse("rlhf.grpo", "", GRPOConfig, arguments, check=grpo.start_problems)
    read_data(config, Run(config, resume=flags.resume).tokenizer)


def message(config: Path, *arguments: str) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller compares the message
        begin("--config", str(config), *arguments)
    return str(caught.value)


def check(told: str, parts: tuple[str, ...]) -> None:
    assert [part for part in parts if part not in told] == [], told
    assert told.count("\n") <= 1, told  # one message; a remedy may have a line of its own


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_bad_argument_is_named_with_its_value_and_the_remedy(config: Path, argument: str) -> None:
    check(message(config, argument), ARGUMENTS[argument])


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_row_is_named_with_its_value_and_the_remedy(config: Path, tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1 + 1", "answer": "2"}\n' + row + "\n")
    check(message(config, f"data.train={file}"), (*ROWS[row], str(file)))


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
        (command.main, ["configs", "copy", "mth"], ("configs copy", "mth", "There are agent_quickstart, cispo, ")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_other_programs_say_it_as_well(program: Any, arguments: list[str], parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the parts are the match
        program(arguments)
    check(str(caught.value), parts)


def test_there_are_fifty() -> None:
    assert len(ARGUMENTS) + len(ROWS) >= 50
