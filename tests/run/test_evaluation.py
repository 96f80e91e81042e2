"""Accuracies of an evaluation by hand, and whether their intervals hold the truth as often as they say."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from worlds import make_config, make_groups

from rlhf import evaluate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import resolved_yaml
from rlhf.config.sections import RolloutConfig
from rlhf.log.panels import metric_title, metric_titles
from rlhf.run.evaluation import bootstrap_interval, graded_responses, group_metrics, ungraded_warning
from rlhf.run.folder import RunFolder, with_date
from rlhf.types import RolloutGroup


def graded(right: Sequence[Sequence[tuple[float | None, str]]], part: str = "math") -> list[RolloutGroup]:
    groups = make_groups(groups=len(right), samples=len(right[0]), vocabulary=9, longest=20, seed=0)
    return [
        dataclasses.replace(
            group,
            samples=tuple(
                dataclasses.replace(sample, reward_parts={part: score}, extracted=answer)
                for sample, (score, answer) in zip(group.samples, answers, strict=True)
            ),
        )
        for group, answers in zip(groups, right, strict=True)
    ]


def test_avg_pass_and_maj_by_hand() -> None:
    metrics = group_metrics(
        graded(
            [
                [(1.0, "7"), (0.0, "8"), (1.0, "7")],  # the majority is right
                [(0.0, "1"), (1.0, "2"), (0.0, "1")],  # the majority is wrong
                [(0.0, ""), (0.0, ""), (0.0, "")],
            ]
        ),
        "math",
    )
    assert metrics["avg@3"] == pytest.approx(3 / 9)
    assert metrics["pass@3"] == pytest.approx(2 / 3)
    assert metrics["maj@3"] == pytest.approx(1 / 3)
    for name in ("avg@3", "pass@3", "maj@3"):
        assert 0.0 <= metrics[f"{name}/low"] <= metrics[name] <= metrics[f"{name}/high"] <= 1.0


def test_answers_that_say_the_same_vote_together_and_ties_go_to_the_first() -> None:
    answers = [(0.0, "3+4", "3+4"), (0.0, "2", "2"), (1.0, "7", "3+4"), (0.0, "2", "2"), (1.0, "7", "3+4")]
    (group,) = graded([[(score, answer) for score, answer, _ in answers]])
    samples = [dataclasses.replace(s, vote=vote) for s, (*_, vote) in zip(group.samples, answers, strict=True)]

    def majority(*chosen: int) -> float:
        chosen_of_group = dataclasses.replace(group, samples=tuple(samples[i] for i in chosen))
        return group_metrics([chosen_of_group], "math")[f"maj@{len(chosen)}"]

    assert majority(0, 1, 2, 3, 4) == 1.0  # as it is spelled most often
    assert majority(1, 3, 2, 4) == 0.0
    assert majority(2, 4, 1, 3) == 1.0


def with_parts(*parts: dict[str, float | None], statuses: Sequence[str] = ()) -> RolloutGroup:
    (group,) = graded([[(0.0, "")] * len(parts)])
    samples = (
        dataclasses.replace(sample, reward=None, reward_parts=values, status=status)
        for sample, values, status in zip(group.samples, parts, statuses or ["ok"] * len(parts), strict=True)
    )
    return dataclasses.replace(group, samples=tuple(samples))


def test_the_metric_is_the_part_that_is_named_wherever_it_stands_and_the_others_are_beside_it() -> None:
    group = with_parts(
        {"format": 1.0, "exact": 0.0, "own.py:f": None}, {"own.py:f/n": 3.0, "exact": 1.0, "format": 1.0}
    )
    metrics = group_metrics([group], "exact")
    assert {name: metrics[name] for name in ("avg@2", "pass@2", "part/format", "part/own.py:f/n")} == {
        "avg@2": 0.5, "pass@2": 1.0, "part/format": 1.0, "part/own.py:f/n": 3.0,
    }  # fmt: skip
    assert {"part/exact", "part/own.py:f", "maj@2"}.isdisjoint(metrics)  # no answer was read, so none has most votes
    assert group_metrics([group], "format")["avg@2"] == 1.0
    has = {"evaluation", "evaluation, several parts", "evaluation, a function returns some"}
    check_documented([{f"eval/test/{name}": value for name, value in metrics.items()}], logged=has)


def test_responses_that_nothing_graded_are_counted_and_are_not_wrong() -> None:
    """Means of the graded ones: 1, 1/2, 0. Two problems are graded whole; the fourth is not measured."""
    values: list[list[float | None]] = [[1.0, None], [1.0, 0.0], [0.0, 0.0], [None, None]]
    groups = graded([[(value, "7") for value in of_problem] for of_problem in values])
    metrics = group_metrics(groups, "math")
    assert (metrics["avg@2"], metrics["ungraded_fraction"]) == (0.5, 3 / 8)
    assert (metrics["pass@2"], metrics["maj@2"]) == (1 / 2, 1 / 2)
    assert metrics["avg@2/low"] >= 0.0
    nothing = group_metrics(groups[3:], "math")
    assert nothing["ungraded_fraction"] == 1.0
    assert not any("@" in name for name in nothing)
    assert [row["value"] for row in graded_responses({"a": groups[:2]}, {"a": "math"})] == [1.0, None, 1.0, 0.0]


def test_a_second_part_never_stands_in_for_a_metric_that_said_none_and_a_call_over_a_limit_is_wrong() -> None:
    group = with_parts(
        {"judge": None, "form": 1.0},
        {},
        {"judge": 1.0},
        {},
        statuses=["failed", "call_limit", "ok", "environment_failed"],
    )
    metrics = group_metrics([group], "judge")
    assert (metrics["avg@4"], metrics["ungraded_fraction"]) == (0.5, 0.5)
    said = ungraded_warning("test", [group], "judge")
    assert "judge gave no value for 2 of 4 responses (1 x failed, 1 x environment_failed). They do not" in said


def test_more_than_2_in_100_ungraded_responses_are_told_and_what_values_there_are_if_all_are() -> None:
    fifty: list[list[tuple[float | None, str]]] = [[(None, "")], *[[(1.0, "")]] * 49]
    assert ungraded_warning("test", graded(fifty), "math") == ""
    assert "1 of 49 responses (1 x no value)" in ungraded_warning("test", graded(fifty[:49]), "math")
    said = ungraded_warning("test", graded(fifty), "own.py:f/sovled")
    assert said.endswith("so nothing was measured. There are values of math: name one as evaluation.metric.")


@pytest.mark.parametrize(("metric", "value", "is_outside"), [("own.py:f", 1.25, True), ("reward_model", 0.5, False)])
def test_what_is_no_accuracy_has_no_share_of_right_answers(metric: str, value: float, is_outside: bool) -> None:
    metrics = group_metrics([with_parts({metric: value}, {metric: 0.5})], metric)
    assert metrics["avg@2"] == (value + 0.5) / 2
    assert ("pass@2" in metrics, metrics.get("outside_fraction", 0.0)) == (False, 0.5 * is_outside)
    assert metric_titles({"test": metric}, [{f"eval/test/{name}": 0.0 for name in metrics}]) == {"test": metric}
    if is_outside:
        check_documented([{f"eval/test/{name}": 0.0 for name in metrics}], logged={"evaluation, a value is outside"})


def test_titles_name_the_part_and_the_sets_where_they_differ() -> None:
    assert metric_title({"a": "math", "b": "math"}, [{"eval/a/avg@1": 0.5}]) == "accuracy (math)"
    assert metric_title({"a": "math", "b": "own.py:f"}, [{}, {"eval/b/outside_fraction": 0.1}]) == (
        "a: accuracy (math), b: own.py:f"
    )


def test_lengths_responses_that_were_cut_off_and_those_without_an_answer_by_hand() -> None:
    (group,) = graded([[(1.0, "7"), (0.0, ""), (0.0, ""), (0.0, "3")]])
    ends, statuses = ("stop", "length", "length", "stop"), ("ok", "no_answer", "no_answer", "ok")
    samples = tuple(
        dataclasses.replace(sample, status=status, rollout=dataclasses.replace(sample.rollout, finish_reason=end))
        for sample, end, status in zip(group.samples, ends, statuses, strict=True)
    )
    metrics = group_metrics([dataclasses.replace(group, samples=samples)], "math")
    lengths = [sample.rollout.response_length for sample in samples]
    assert metrics["response_length"] == pytest.approx(sum(lengths) / 4)
    assert (metrics["stopped_fraction"], metrics["answered_fraction"]) == (0.5, 0.5)
    asked_for_none = [dataclasses.replace(sample, status="ok", extracted="") for sample in samples]
    assert "answered_fraction" not in group_metrics([dataclasses.replace(group, samples=tuple(asked_for_none))], "math")


@pytest.mark.slow
def test_intervals_over_problems_hold_the_truth_about_95_times_in_100() -> None:
    rng, problems, samples = np.random.default_rng(1), 100, 4
    chances = rng.beta(1.0, 2.0, size=(400, problems))  # problems differ: samples of one are alike
    means = rng.binomial(samples, chances) / samples
    intervals = [bootstrap_interval(values) for values in means]
    covered = np.mean([low <= 1 / 3 <= high for low, high in intervals])
    assert 0.91 <= covered <= 0.98


def test_equal_problems_leave_no_doubt() -> None:
    assert bootstrap_interval(np.ones(8)) == (1.0, 1.0)


@pytest.mark.slow
def test_several_models_stand_side_by_side_and_their_responses_in_one_file(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir / "model", other)
    right = {str(tiny_model_dir / "model"): 0.0, str(other): 1.0}

    async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:  # without engines
        return {"test": graded([[(right[config.model.path], "7"), (0.0, "8")]] * 2)}

    monkeypatch.setattr(evaluate, "sample_and_grade", sample_and_grade)
    data = {"train": str(tiny_model_dir / "train.jsonl"), "eval": str(tiny_model_dir / "test.jsonl")}
    config = make_config(tiny_model_dir / "model", data=data, evaluation={"samples_per_prompt": 2})
    (tmp_path / "mine.yaml").write_text(resolved_yaml(config))
    flags = ["--config", str(tmp_path / "mine.yaml"), "--also", str(other)]
    files = ["--output", str(tmp_path / "m.json"), "--responses", str(tmp_path / "r.jsonl")]
    monkeypatch.setenv("COLUMNS", "400")
    evaluate.main([*flags, *files])
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "test/avg@2" in line]
    assert [cell.split()[0] for cell in rows[0][2:4]] == ["0.000", "0.500"]
    metrics = json.loads((tmp_path / "m.json").read_text())
    assert {model: values["eval/test/avg@2"] for model, values in metrics.items()} == {
        str(tiny_model_dir / "model"): 0.0, str(other): 0.5,
    }  # fmt: skip
    responses = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [row["model"] for row in responses] == [str(tiny_model_dir / "model")] * 4 + [str(other)] * 4
    with pytest.raises(ValueError, match=r"model\.path=/nowhere: "):
        evaluate.main([*flags, "--also", "/nowhere"])


def test_an_evaluation_that_graded_nothing_writes_its_files_and_fails(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:  # without engines
        return {"test": graded([[(None, "7"), (None, "8")]] * 2)}

    monkeypatch.setattr(evaluate, "sample_and_grade", sample_and_grade)
    (tmp_path / "mine.yaml").write_text(json.dumps(with_data(tiny_model_dir)))
    with pytest.raises(ValueError, match=r"test: no response of .* was graded by math"):
        evaluate.main(["--config", str(tmp_path / "mine.yaml"), "--output", str(tmp_path / "m.json")])
    assert "test/ungraded_fraction │ 1.000" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "m.json").read_text())["eval/test/ungraded_fraction"] == 1.0


@pytest.mark.slow
def test_the_reward_is_tried_once_however_many_models_there_are(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("def score(response, **_):\n    print('tried')\n    return 1.0\n")
    others = [str(shutil.copytree(tiny_model_dir / "model", tmp_path / name)) for name in ("one", "two")]
    values = with_data(tiny_model_dir, reward=[{"name": f"{tmp_path}/own.py:score"}])

    async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:  # without engines
        return {"test": graded([[(1.0, "7"), (0.0, "8")]] * 2, part=config.metrics["test"])}

    monkeypatch.setattr(evaluate, "sample_and_grade", sample_and_grade)
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    evaluate.main(["--config", str(tmp_path / "mine.yaml"), "--also", others[0], "--also", others[1]])
    assert capfd.readouterr().err.count(": tried\n") == 1


# Everything that an evaluation reads and that has no default.
MINIMAL: dict[str, Any] = {
    "data": {"max_prompt_tokens": 64},
    "evaluation": {"max_response_tokens": 20, "samples_per_prompt": 2},
    "cluster": {"device": "cpu"},
}


def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], *arguments: str) -> GRPOConfig:
    """The config that the program would sample with."""
    asked = []

    async def sample_and_grade(config: GRPOConfig) -> dict[str, list[RolloutGroup]]:  # without engines
        asked.append(config)
        return {"test": graded([[(1.0, "7"), (0.0, "8")]] * 2)}

    monkeypatch.setattr(evaluate, "sample_and_grade", sample_and_grade)
    (tmp_path / "mine.yaml").write_text(json.dumps(values))
    evaluate.main(["--config", str(tmp_path / "mine.yaml"), *arguments])
    (config,) = asked
    return config


def with_data(tiny_model_dir: Path, **changed: Any) -> dict[str, Any]:
    values = MINIMAL | {"model": {"path": str(tiny_model_dir / "model")}}
    return values | {"data": values["data"] | {"eval": str(tiny_model_dir / "test.jsonl")}} | changed


@pytest.mark.slow
def test_an_evaluation_writes_prompts_with_the_day_of_the_run_that_a_model_is_from_and_tells_of_its_training_data(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    folder = RunFolder(run, resume=False)
    first = datetime.date(2026, 1, 2)
    data = {"train": str(tiny_model_dir / "test.jsonl")}
    folder.create(with_date(make_config(Path("x/model"), data=data), today=first))
    folder.unlock()
    model = shutil.copytree(tiny_model_dir / "model", run / "model")
    of_run, before = with_data(tiny_model_dir, model={"path": str(model)}), with_data(tiny_model_dir)
    assert evaluated(tmp_path, monkeypatch, of_run).data.date == first
    told = f"warning: data.eval={data['train']}: training data of {model}, as {run}/config.yaml says."
    assert capsys.readouterr().err.count(told) == 1
    assert evaluated(tmp_path, monkeypatch, before).data.date == datetime.date.today()
    assert capsys.readouterr().err == ""
    assert str(evaluated(tmp_path, monkeypatch, of_run, "data.date=2026-03-04").data.date) == "2026-03-04"


@pytest.mark.parametrize(("text", "said"), [("{{ strftime_now('%d') }}", "data.date=2026-01-02: "), ("x", "")])
def test_the_day_is_said_where_the_template_writes_it(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "own.jinja").write_text(text)
    data = {"template": str(tmp_path / "own.jinja"), "date": "2026-01-02", "eval": str(tmp_path / "none.jsonl")}
    config = make_config(tiny_model_dir / "model", data={"train": "unread", **data})
    with pytest.raises(ValueError, match=r"none\.jsonl"):  # the data, which are read before anything is started
        asyncio.run(evaluate.sample_and_grade(config))
    out = capsys.readouterr().out
    assert out.startswith(said)
    assert ("data.date" in out) == bool(said)


@pytest.mark.parametrize("program", ["grpo", "ppo"])
def test_an_evaluation_asks_for_no_key_that_only_training_reads(
    program: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = evaluated(tmp_path, monkeypatch, with_data(tiny_model_dir), "--program", program)
    assert config.max_sequence_tokens == 84


def test_contradictions_of_the_training_are_no_concern_of_an_evaluation(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {
        "checkpoint": {"best": "eval/another/avg@8"},
        "algo": {"clip_low": 1.5},
        "run": {"dir": "x", "steps": 3},
    }
    training |= {
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 1, "max_response_tokens": 21},
        "learner": {"max_tokens_per_microbatch": 8},
    }
    config = evaluated(tmp_path, monkeypatch, with_data(tiny_model_dir, **training))
    assert (config.run.steps, config.max_sequence_tokens) == (3, 85)
    refused = {
        "rollout": {"truncate_after": 3},
        "cluster": {"device": "cuda"},
        "model": {"path": "x", "dtype": "float32"},
    }
    with pytest.raises(ValueError, match=r"(?s)rollout\.truncate_after=3: .*model\.dtype=float32 with cluster"):
        evaluated(tmp_path, monkeypatch, with_data(tiny_model_dir, **refused))


def test_the_longest_response_is_that_of_all_sets_or_of_the_training(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [
        {"path": str(tiny_model_dir / "test.jsonl"), "max_response_tokens": 70},
        {"path": str(tiny_model_dir / "train.jsonl"), "max_response_tokens": 90},
    ]
    values = with_data(tiny_model_dir, evaluation={"samples_per_prompt": 2}, data={"eval": sets})
    assert evaluated(tmp_path, monkeypatch, values).rollout.max_response_tokens == 90
    del sets[1]["max_response_tokens"]
    default = RolloutConfig().max_response_tokens
    assert evaluated(tmp_path, monkeypatch, values).rollout.max_response_tokens == default
