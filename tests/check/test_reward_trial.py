"""A function of the user that cannot grade is found before anything starts, with its line and the row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.check.start_checks import reward_problems, start_problems
from rlhf.config.grpo import GRPOConfig
from rlhf.rewards.pool import Pool

CODE = """
import statistics, time

def bug(response, *, answer, columns, metadata):
    return float(columns["limit"] > 3)

def good(response, *, answer, columns, metadata):
    assert metadata["finish_reason"] == "stop" and metadata["messages"][-1]["role"] == "user"
    return float(answer in response and columns["answer"] == answer)

def trl(completions, **kwargs):
    return [1.0 for text in completions]

def trl_with_another_name(texts, **kwargs):
    return [1.0 for text in texts]

def ranks(responses, *, answer, columns, metadata):
    spread = statistics.stdev(map(len, responses))
    return [len(response) / spread for response in responses]

def sleeps(response, **_):
    time.sleep(60)

async def waits(response, **_):
    return {"score": 1.0, "style": 0.5}

async def fails_in_its_helper(response, **_):
    return helper(response)

def helper(response):
    return response.no_such_method()

def shows(responses, *, answer, **_):
    raise KeyError(f"{len(responses)} such as {responses[0]}")

def goes_away(response, *, metadata, columns, **_):
    import os
    if "last" in columns:
        os.rename(__file__, __file__ + ".away")
        os._exit(1)
    return columns["limit"]

def never(response, **_):
    return None

def others_judge(completions, **kwargs):
    return [None for text in completions]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


def config(tiny_model_dir: Path, *parts: Any, **reward: Any) -> GRPOConfig:
    data = {"eval": str(tiny_model_dir / "test.jsonl")}
    first = parts[0] if isinstance(parts[0], str) else parts[0]["name"]
    return make_config(
        tiny_model_dir / "model", data=data, evaluation={"metric": first},
        reward={"parts": list(parts), "wall_seconds": 2.0, **reward},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("bug", "{file}:5: KeyError: 'limit'."),
        ("sleeps", "timeout: over 2 seconds"),
        ("fails_in_its_helper", "{file}:31: AttributeError: 'str' object has no attribute 'no_such_method'."),
        ("trl_with_another_name", "{file}:14: returned "),
    ],
)
def test_a_function_that_fails_is_named_with_the_row_and_its_own_line(
    tiny_model_dir: Path, file: Path, function: str, problem: str
) -> None:
    run = config(tiny_model_dir, f"{file}:{function}", "math")
    (told,) = start_problems(run)
    assert told.startswith(f"reward name='{file}:{function}': ")
    assert f"row 1 of data.train={tiny_model_dir}/train.jsonl: {problem.format(file=file)}" in told
    (told,) = start_problems(run, trains=False)
    assert "row 1 of data.eval=" in told


@pytest.mark.slow
def test_functions_that_grade_are_not_refused(tiny_model_dir: Path, file: Path) -> None:
    group = {"name": f"{file}:ranks", "group": True}
    trl = {"name": f"{file}:trl", "group": True}
    run = config(tiny_model_dir, f"{file}:good", group, trl, f"{file}:waits")
    several = run.evaluation.model_copy(update={"samples_per_prompt": 2})
    assert reward_problems(run.model_copy(update={"evaluation": several})) == []


@pytest.mark.slow
def test_a_function_in_trls_signature_fits_as_it_is(tiny_model_dir: Path, file: Path) -> None:
    assert start_problems(config(tiny_model_dir, f"{file}:trl")) == []


GUESS = """
class Guess:
    def reset(self, answer, **row):
        self._secret, self.guesses = answer, []
        return " Guess."

def score(environments, **kwargs):
    return [float(env._secret != "") for env in environments]

def rest(prompts, completions, completion_ids, answer, **kwargs):
    assert prompts[0][-1]["content"].endswith(" Guess.") and completions[0][-1]["role"] == "assistant"
    return [float(env._secret == gold) for env, gold in zip(kwargs["environments"], answer)]

def ours(response, *, metadata, **_):
    return len(metadata["turns"]) / metadata["facts"]["turns"]

def typo(environments, **kwargs):
    return [env.guesess for env in environments]
"""


@pytest.mark.slow
def test_with_an_environment_a_function_is_tried_with_what_a_rollout_would_give(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "game.py"
    file.write_text(GUESS)

    def told(*names: str) -> list[str]:
        reward = {"parts": [f"{file}:{name}" for name in names]}
        return reward_problems(
            make_config(tiny_model_dir / "model", reward=reward, environment={"name": f"{file}:Guess"})
        )

    assert told("score", "rest", "ours") == []
    (problem,) = told("typo")
    assert f"{file}:18: AttributeError: Guess.guesess cannot be read here" in problem


@pytest.mark.slow
def test_a_function_that_returns_none_is_a_warning_with_the_row_unless_others_judge(
    tiny_model_dir: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = f"row 1 of data.train={tiny_model_dir}/train.jsonl"
    for parts, silent in (
        (["never", "math"], "never"),
        (["others_judge"], "others_judge"),
        (["others_judge", "math"], ""),
    ):
        run = config(tiny_model_dir, *(name if name == "math" else f"{file}:{name}" for name in parts))
        assert reward_problems(run) == []
        told = capsys.readouterr().err
        assert told.count("\n") == bool(silent)
        assert f"warning: reward name='{file}:{silent}': it returned None for a response to {row}" in told or not silent


@pytest.mark.slow
def test_a_part_of_one_source_is_tried_with_a_row_of_that_source(
    tiny_model_dir: Path, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "1 + 1", "answer": "2", "limit": 5}\n')
    for limit, problems in ((1, 0), (0, 1)):
        named = {"other": [f"{file}:bug"]} if limit else {"train": [f"{file}:bug"]}
        data = {"train": [str(tiny_model_dir / "train.jsonl"), str(tmp_path / "other.jsonl")]}
        reward = {"parts": ["math"], "by_source": named}
        assert len(reward_problems(make_config(tiny_model_dir / "model", data=data, reward=reward))) == problems


@pytest.mark.slow
def test_bad_rows_at_the_beginning_are_not_what_a_function_is_tried_with(
    tiny_model_dir: Path, file: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "x", "answer": ""}\n{"question": "1 + 1", "answer": "2"}\n')
    data = {"train": str(rows), "eval": str(rows)}
    run = make_config(tiny_model_dir / "model", data=data, reward={"parts": [f"{file}:bug"]})
    (told,) = reward_problems(run)
    assert f"row 2 of data.train={rows}" in told
    rows.write_text('not json\n{"question": "1 + 1", "answer": "2"}\n')
    (told,) = reward_problems(run)
    assert f"row 2 of data.train={rows}" in told
    rows.write_text("[not json\n")
    assert reward_problems(run) == []  # loading the data says what is wrong with it


@pytest.mark.slow
def test_a_group_is_as_large_as_that_of_its_set_and_gives_the_first_of_several_answers(
    tiny_model_dir: Path, file: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1", "answer": ["2", "two"]}\n')
    data = {"train": str(tiny_model_dir / "train.jsonl"), "eval": [{"path": str(rows), "samples_per_prompt": 3}]}
    reward = {"parts": [{"name": f"{file}:shows", "group": True}]}
    run = make_config(tiny_model_dir / "model", data=data, reward=reward)
    train, evaluation = reward_problems(run)
    assert f"data.train={tiny_model_dir}" in train
    assert f"'{run.rollout.samples_per_prompt} such as " in train
    assert "'3 such as The answer is \\\\boxed{2}.'" in evaluation


@pytest.mark.slow
def test_what_was_found_before_the_processes_ended_is_told_too(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "reload_s", 0.5)
    (tmp_path / "own").mkdir()
    file, rows = tmp_path / "own" / "own.py", tmp_path / "rows.jsonl"
    file.write_text(CODE)
    rows.write_text('{"question": "1 + 1", "answer": "2", "last": true}\n')
    data = {"train": [str(tiny_model_dir / "train.jsonl"), str(rows), str(tiny_model_dir / "test.jsonl")]}
    reward = {"parts": [{"name": f"{file}:goes_away", "files": [str(file.parent)]}], "wall_seconds": 2.0}
    problems = reward_problems(make_config(tiny_model_dir / "model", data=data, reward=reward))
    assert "KeyError: 'limit'" in problems[0]
    assert re.search(r"own\.py .*FileNotFoundError", problems[-1])


@pytest.mark.slow
def test_a_run_whose_functions_may_always_fail_is_not_refused(tiny_model_dir: Path, file: Path) -> None:
    assert reward_problems(config(tiny_model_dir, f"{file}:bug", failure_fraction=1.0)) == []


@pytest.mark.slow
def test_nothing_heavy_is_imported_before_the_message(tiny_model_dir: Path, file: Path, tmp_path: Path) -> None:
    values = config(tiny_model_dir, f"{file}:bug").model_dump(mode="json")
    (tmp_path / "config.yaml").write_text(json.dumps(values))
    code = (
        "import sys; from rlhf.config.cli import run_program; from rlhf.grpo import main;"
        "print(run_program(lambda: main(sys.argv[1:])));"
        "print([name for name in ('torch', 'ray', 'vllm', 'deepspeed', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "config.yaml"), f"run.dir={tmp_path}/run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "KeyError: 'limit'" in ended.stderr
    assert ended.stdout.splitlines() == ["2", "[]"]
    assert not (tmp_path / "run").exists()
