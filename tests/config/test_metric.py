"""Which part of the reward is the metric of an evaluation: by default, by name, and where the start asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import make_config

from rlhf.config.contradictions import metric_problems

ENVIRONMENT = {"name": "my.module:Game"}
MODEL = {"path": "some/model"}


def metrics(*parts: str, metric: str | None = None, **sections: Any) -> dict[str, str]:
    sections = {"evaluation": {"metric": metric}, "reward": {"parts": list(parts)}, **sections}
    return make_config(Path("x"), **{"data": {"train": "t.jsonl", "eval": "test.jsonl"}, **sections}).metrics


@pytest.mark.parametrize(
    ("parts", "metric"),
    [
        (["format"], "format"),
        (["own.py:f"], "own.py:f"),
        (["format", "exact"], "exact"),
        (["exact", "format"], "exact"),
        (["length", "own.py:f", "code"], "code"),
        (["rubric.py:f", "multiple_choice", "repetition"], "multiple_choice"),
    ],
)
def test_the_metric_is_the_only_part_or_the_one_that_compares_with_an_answer(parts: list[str], metric: str) -> None:
    assert metrics(*parts) == {"test": metric}
    weighted = [{"name": name, "weight": float(-index)} for index, name in enumerate(parts)]
    assert metrics(reward={"parts": weighted}) == {"test": metric}


@pytest.mark.parametrize("parts", [["format", "length"], ["own.py:f", "format"], ["exact", "f1", "format"]])
def test_with_several_candidates_the_start_asks_and_lists_them(parts: list[str]) -> None:
    for given in (parts, parts[::-1]):
        with pytest.raises(ValueError, match=rf"evaluation\.metric is not set.* test .*: {', '.join(given)}\."):
            metrics(*given)
        assert [metrics(*given, metric=name) for name in given] == [{"test": name} for name in given]
        assert metrics(*given, data={"train": "t.jsonl"}) == {}  # nothing is evaluated


def test_a_reward_model_and_an_environment_are_parts_too() -> None:
    assert metrics("math", reward_model=MODEL, environment=ENVIRONMENT) == {"test": "math"}
    assert metrics(reward_model=MODEL) == {"test": "reward_model"}
    assert metrics(environment=ENVIRONMENT) == {"test": "environment"}
    assert metrics("length", reward_model=MODEL, metric="reward_model") == {"test": "reward_model"}
    assert metrics("math", environment=ENVIRONMENT, metric="environment/won") == {"test": "environment/won"}
    with pytest.raises(ValueError, match=r"could be it: length, reward_model\."):
        metrics("length", reward_model=MODEL)
    assert metrics("format", environment={"name": "calculator"}) == {"test": "format"}  # which rewards nothing


def test_an_environment_that_gives_a_reward_next_to_a_part_that_compares_with_no_answer_is_asked_for() -> None:
    def problems(*parts: str, judges: bool = True, **sections: Any) -> list[str]:
        values = {"data": {"train": "t.jsonl", "eval": "test.jsonl"}, "reward": {"parts": list(parts)}, **sections}
        return [*metric_problems(make_config(Path("x"), environment=ENVIRONMENT, **values), environment_judges=judges)]

    (problem,) = problems("own.py:bonus")
    assert "own.py:bonus, environment" in problem
    assert [*problems("math"), *problems(), *problems("own.py:bonus", evaluation={"metric": "own.py:bonus"})] == []
    assert [*problems("math", judges=False), *problems("own.py:bonus", judges=False)] == []
    (problem,) = problems("math", judges=False, evaluation={"metric": "environment"})
    assert "evaluation.metric=environment: no part of the reward of test has this name. Known: math" in problem


def test_data_sets_with_other_rewards_have_a_metric_of_their_own() -> None:
    reward = {"parts": ["math", "format"], "by_source": {"essays": ["own.py:judge", "length"]}}
    sets = [{"path": "sums.jsonl"}, {"path": "essays.jsonl", "metric": "own.py:judge/style"}]
    assert metrics(reward=reward, data={"train": "t.jsonl", "eval": sets}) == {
        "sums": "math", "essays": "own.py:judge/style",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"evaluation\.metric=math: no part of the reward of essays .*\bmetric: NAME"):
        metrics(metric="math", reward=reward, data={"train": "t.jsonl", "eval": ["sums.jsonl", "essays.jsonl"]})


@pytest.mark.parametrize("metric", ["exat", "reward_model", "environment", "exact/number", "own.py:g"])
def test_a_name_that_no_part_has_is_refused(metric: str) -> None:
    with pytest.raises(ValueError, match=rf"evaluation\.metric={metric}: no part of the reward of test has this name"):
        metrics("exact", "own.py:f", metric=metric)


def test_the_curriculum_and_the_best_checkpoint_follow_the_metric() -> None:
    data: dict[str, Any] = {"train": "t.jsonl", "curriculum": {}}
    with pytest.raises(ValueError, match=r"data\.train t could be it: format, own\.py:f"):
        metrics("format", "own.py:f", data=data)
    with pytest.raises(ValueError, match=r"data\.curriculum with data\.train t: its metric is reward_model"):
        metrics(reward_model=MODEL, data=data)
    named = data | {"train": [{"path": "t.jsonl", "metric": "own.py:f"}]}
    assert metrics("format", "own.py:f", data=named) == {}
    same_name = {"train": [{"path": "a/t.jsonl", "metric": "format"}], "eval": ["b/t.jsonl"], "curriculum": {}}
    assert metrics("format", "own.py:f", metric="own.py:f", data=same_name) == {"t": "own.py:f"}
    with pytest.raises(ValueError, match=r"t\.jsonl has metric=exact: it has no effect without data\.curriculum"):
        metrics("exact", data=named | {"train": [{"path": "t.jsonl", "metric": "exact"}], "curriculum": None})
    best = {"checkpoint": {"every": 1, "best": "eval/test/pass@2"}, "evaluation": {"every": 1, "samples_per_prompt": 2}}
    assert metrics("exact", **best) == {"test": "exact"}
    with pytest.raises(ValueError, match=r"no evaluation measures it\. Use eval/test/avg@2\."):
        metrics(reward_model=MODEL, **best)
    with pytest.raises(ValueError, match=r"no evaluation measures it\. Use eval/test/avg@2 or eval/test/pass@2\."):
        metrics("format", **best | {"checkpoint": {"every": 1, "best": "eval/test/maj@2"}})  # it reads no answers
