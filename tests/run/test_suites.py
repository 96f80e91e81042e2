"""A suite of data sets: where its rows are read from, what is refused before a model is loaded, and its table."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from test_evaluation import graded

import rlhf
from rlhf import evaluate
from rlhf.config.cli import shipped_folder
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.suites import suite_values
from rlhf.run.evaluation import bootstrap_interval, mean_over_sets
from rlhf.types import RolloutGroup

SUITES = shipped_folder("configs") / "suites"
ROWS = {
    "gsm8k/test": {"question": "1 + 1?", "answer": "One and one.\n#### 2"},
    "MATH-500": {"problem": "2 + 2?", "solution": r"It is \boxed{4}.", "answer": "4", "level": 1},
    "aime24/train": {"id": 60, "problem": "3 + 3?", "solution": "6.", "answer": "006"},
    "math-ai/aime25/test": {"problem": "4 + 4?", "answer": "8", "id": "0"},
    "amc23": {"id": 0, "question": "5 + 5?", "answer": "10.0", "url": "x"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set as a folder with a split, or as a file; by its label or by its name at the hub."""
    for name, row in ROWS.items():
        file = tmp_path / "sets" / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row) + "\n")
    return tmp_path / "sets"


@pytest.fixture
def run(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GRPOConfig]:
    """Runs `rlhf evaluate` without engines. `right`: values of the responses to each problem, by data set."""

    def start(*arguments: str, right: dict[str, list[list[float | None]]]) -> GRPOConfig:
        asked = []

        async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:
            asked.append(config)
            return {label: groups_of(label, values) for label, values in right.items()}

        with monkeypatch.context() as patched:
            patched.setattr(evaluate, "sample_and_grade", sample_and_grade)
            small = ["evaluation.max_response_tokens=20", "cluster.device=cpu"]  # fits the context of the model
            evaluate.main([f"model.path={tiny_model_dir / 'model'}", *small, *arguments])
        return asked[0]

    return start


def groups_of(label: str, values: list[list[float | None]]) -> list[RolloutGroup]:
    groups = graded([[(value, "7") for value in of_problem] for of_problem in values])
    named = []
    for number, group in enumerate(groups):
        prompt = dataclasses.replace(group.prompt, id=f"{label}/{number}", source=label)
        samples = [
            dataclasses.replace(s, rollout=dataclasses.replace(s.rollout, prompt_id=prompt.id)) for s in group.samples
        ]
        named.append(dataclasses.replace(group, prompt=prompt, samples=tuple(samples)))
    return named


def test_every_set_of_the_suite_is_read_from_a_folder_with_its_columns_split_and_answer(
    folder: Path, tiny_model_dir: Path
) -> None:
    from rlhf.data.load import load_prompts
    from rlhf.data.model_files import load_tokenizer

    config = load_config(
        GRPOConfig, [{"model": {"path": str(tiny_model_dir / "model")}}, suite_values("math", SUITES, str(folder))],
        contradictions=GRPOConfig.sampling_contradictions, complete=evaluate.complete,
    )  # fmt: skip
    prompts = load_prompts(config.data, "eval", load_tokenizer(config.model), vocab_size=10**6).prompts
    answers = {label: [prompt.answer for prompt in of_set] for label, of_set in prompts.items()}
    assert answers == {"gsm8k": ["2"], "math500": ["4"], "aime24": ["006"], "aime25": ["8"], "amc23": ["10.0"]}
    question = prompts["amc23"][0].messages[-1]["content"]
    assert question == "5 + 5?\nPlease reason step by step, and put your final answer within \\boxed{}."


def test_the_keys_of_a_suite_win_over_those_of_a_config_and_overrides_win_over_both(
    folder: Path, tmp_path: Path, run: Callable[..., GRPOConfig]
) -> None:
    training = {
        "data": {"eval": "x.jsonl", "prompt_column": "ask", "system_prompt": "Think."},
        "reward": [{"name": "length", "max_tokens": 9, "buffer_tokens": 3}],
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(training))
    chosen = ["--suite", "math", "--suite-dir", str(folder), "--only", "aime24,gsm8k"]
    config = run(
        *chosen, "--config", str(tmp_path / "mine.yaml"), "evaluation.temperature=1",
        right={"gsm8k": [[1.0]], "aime24": [[1.0, 0.0]]},
    )  # fmt: skip
    assert [(source.label, source.name) for source in config.data.eval] == [("gsm8k", None), ("aime24", None)]
    assert (config.data.prompt_column, config.data.system_prompt) == (None, "Think.")
    assert [part.name for part in config.reward.parts] == ["math"]
    drawn = {label: (each.samples_per_prompt, each.temperature) for label, each in config.evaluations.items()}
    assert drawn == {"gsm8k": (1, 1.0), "aime24": (32, 1.0)}


def test_the_table_fits_80_columns_and_counts_ungraded_and_cut_off_responses_apart(
    folder: Path, run: Callable[..., GRPOConfig], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    right: dict[str, list[list[float | None]]] = {
        "gsm8k": [[1.0], [0.0], [None], [1.0]],
        "math500": [[1.0, 0.0]] * 2,
        "aime24": [[0.0, 0.0]] * 2,
    }
    run("--suite", "math", "--suite-dir", str(folder), "--only", "gsm8k,math500,aime24", right=right)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    cells = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert cells["gsm8k"][:3] == ["4", "1", "0.667"]
    assert cells["gsm8k"][-3:] == ["-", "1", "0"]  # no maj@1; ungraded, cut off
    assert cells["math500"][:3] == ["2", "2", "0.500"]
    assert cells["math500"][-4] == "1.000"  # pass@2
    assert cells["mean"][0] == "0.389"  # (2/3 + 1/2 + 0) / 3


def test_the_mean_weighs_sets_equally_and_its_interval_draws_problems_of_each() -> None:
    rng = np.random.default_rng(0)
    draws = {"small": rng.binomial(1, 0.5, 30), "large": rng.binomial(1, 0.5, 300)}
    groups = {label: groups_of(label, [[float(value)] for value in values]) for label, values in draws.items()}
    mean = mean_over_sets(groups, dict.fromkeys(groups, "math"))
    check_documented([mean], logged={"rlhf evaluate --suite"})
    assert mean["eval/mean/avg"] == pytest.approx(np.mean([values.mean() for values in draws.values()]))
    half = {label: np.subtract(*bootstrap_interval(values.astype(float))[::-1]) / 2 for label, values in draws.items()}
    expected = np.hypot(half["small"], half["large"]) / 2  # of independent sets
    assert (mean["eval/mean/avg/high"] - mean["eval/mean/avg/low"]) / 2 == pytest.approx(expected, rel=0.15)
    ungraded = groups | {"none": groups_of("none", [[None]])}
    assert mean_over_sets(ungraded, dict.fromkeys(ungraded, "math")) == {}


def test_two_evaluations_of_a_suite_are_compared_set_by_set(
    folder: Path, tmp_path: Path, run: Callable[..., GRPOConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--suite", "math", "--suite-dir", str(folder), "--only", "gsm8k,amc23"]
    chosen.append("data.eval.1.samples_per_prompt=2")
    run(*chosen, "--responses", str(tmp_path / "r.jsonl"), right={"gsm8k": [[0.0]] * 3, "amc23": [[0.0, 1.0]]})
    run(*chosen, "--compare-with", str(tmp_path / "r.jsonl"), right={"gsm8k": [[1.0]] * 3, "amc23": [[0.0, 1.0]]})
    out = capsys.readouterr().out
    assert ", gsm8k: accuracy 0.000 -> 1.000 on the same 3 problems: 3 better" in out
    assert ", amc23: accuracy 0.500 -> 0.500 on the same 1 problems: 0 better" in out


REFUSED: dict[str, tuple[list[str], str]] = {
    "no such suite": (["--suite", "maths"], r"--suite maths: there is no such suite\. Name one \(math\),"),
    "no such set": (
        ["--suite", "math", "--only", "gsm"],
        r"--only gsm: the suite has no 'gsm'\. It has gsm8k,",
    ),
    "no such folder": (["--suite", "math", "--suite-dir", "/none"], r"--suite-dir /none: there is no such folder"),
    "no suite": (["--suite-dir", "/none"], r"--suite-dir /none: it chooses from a suite\. Add --suite math"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_suite_that_cannot_be_is_refused(case: str, run: Callable[..., GRPOConfig]) -> None:
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        run(*arguments, right={})


def test_sets_that_the_folder_lacks_are_named_together_with_what_leaves_them_out(
    folder: Path, run: Callable[..., GRPOConfig]
) -> None:
    (folder / "amc23.jsonl").unlink()
    (folder / "MATH-500.jsonl").unlink()
    with pytest.raises(ValueError, match=r"lacks data sets \(math500: no math500 or .*; amc23: no amc23 or ") as caught:
        run("--suite", "math", "--suite-dir", str(folder), right={})
    assert str(caught.value).endswith("or leave them out: --only gsm8k,aime24,aime25.")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reward: [math]", "has no data.eval"),
        ("data: {eval: [{split: test}]}", "has no data.eval"),
        ("[", "not readable"),
    ],
)
def test_a_file_that_is_no_suite_is_refused(
    text: str, message: str, tmp_path: Path, run: Callable[..., GRPOConfig]
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        run("--suite", str(tmp_path / "mine.yaml"), right={})


def test_two_sets_of_one_name_are_refused(tmp_path: Path, run: Callable[..., GRPOConfig]) -> None:
    (tmp_path / "mine.yaml").write_text("data: {eval: [a/test.jsonl, b/test.jsonl]}")
    with pytest.raises(ValueError, match=r"data\.eval: 2 sources are labelled 'test'"):
        run("--suite", str(tmp_path / "mine.yaml"), "--only", "test", right={})


def test_python_measures_a_suite_too(folder: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:  # without engines
        return {source.label: groups_of(source.label, [[1.0], [0.0]]) for source in config.data.eval}

    monkeypatch.setattr(evaluate, "sample_and_grade", sample_and_grade)
    keys = {"cluster.device": "cpu", "evaluation.max_response_tokens": 20}
    measured = rlhf.evaluate_model(
        model=str(tiny_model_dir / "model"), suite="math", suite_dir=str(folder), only="gsm8k,amc23", **keys
    )
    assert {name: measured.metrics[name] for name in ("eval/gsm8k/avg@1", "eval/mean/avg")} == {
        "eval/gsm8k/avg@1": 0.5, "eval/mean/avg": 0.5,
    }  # fmt: skip


def test_rows_with_other_columns_are_named_before_an_engine_starts(folder: Path, tiny_model_dir: Path) -> None:
    (folder / "amc23.jsonl").write_text('{"ask": "1 + 1?", "answer": "2"}\n')
    values: list[Any] = [{"model": {"path": str(tiny_model_dir / "model")}, "cluster": {"device": "cpu"}}]
    values.append(suite_values("math", SUITES, str(folder)))
    config = load_config(GRPOConfig, values, contradictions=lambda _: (), complete=evaluate.complete)
    with pytest.raises(ValueError, match=r"data\.eval\.4.*amc23"):
        asyncio.run(evaluate.sample_and_grade(config))
