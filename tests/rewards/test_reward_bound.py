"""Rewards that are too large: unscorable where a function gave them, the failed reward where an environment did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from worlds import make_config, rollout_of

from rlhf.config.reward import FLOAT32_MAX, RewardConfig
from rlhf.environments.sessions import read_outcome
from rlhf.learner import tiny_model
from rlhf.log.reductions import HISTOGRAM_BINS, counts_of
from rlhf.processes.returned import read_returned, read_scores
from rlhf.rewards.model_client import RewardModelClient
from rlhf.rewards.scorer import Scorer
from rlhf.rollout.purpose import Purpose
from rlhf.rollout.worker import RolloutWorker
from rlhf.run.reward_outcomes import RewardOutcomes
from rlhf.sampling.requests import SamplingSettings
from rlhf.types import Outcome, Prompt, RolloutGroup, ScoredRollout

FUNCTIONS = """
from decimal import Decimal
from fractions import Fraction
import numpy as np
def one(response, **_): return eval(response)
def other(response, **_): return eval(response)
async def waiting(response, **_): return eval(response)
def together(responses, **_): return [eval(each) for each in responses]
def of_trl(completions, log_metric, **_):
    log_metric("large", 1e308)
    return [eval(each[-1]["content"]) for each in completions]
"""
SOURCES: dict[str, list[dict[str, Any]]] = {
    "one": [{"name": "one"}],
    "waiting": [{"name": "waiting"}],
    "together": [{"name": "together", "group": True}],
    "of_trl": [{"name": "of_trl"}],
    "weighed": [{"name": "one", "weight": 1e-3}],
    "heavy": [{"name": "one", "weight": -1e3}],
    "unweighed": [{"name": "one", "weight": 0.0}],
    "summed": [{"name": "one"}, {"name": "other"}, {"name": "length"}],
    "opposite": [{"name": "one"}, {"name": "other", "weight": -1.0}],
}
BOUND, FLOAT32, FLOAT = "over reward.bound=10000", "too large for a float32", "too large for a float"


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scorer]:
    file = tmp_path_factory.mktemp("functions") / "mine.py"
    file.write_text(FUNCTIONS)
    by_source = {
        source: [
            {**part, "name": part["name"] if part["name"] == "length" else f"{file}:{part['name']}"} for part in parts
        ]
        for source, parts in SOURCES.items()
    }
    config = {"by_source": by_source, "workers": 1, "failure_fraction": 1.0}
    with Scorer(RewardConfig.model_validate(config)) as running:
        yield running


def prompt(source: str) -> Prompt:
    return Prompt(f"{source}/7", 0, np.zeros(3, np.int32), ({"role": "user", "content": "?"},), "", source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "returned", "reward", "problem"),
    [
        ("one", "1e4", 1e4, ""),
        ("one", "-10_000", -1e4, ""),
        ("one", "10_001", None, BOUND),
        ("one", "-2e4", None, BOUND),
        ("one", "1e308", None, FLOAT32),
        ("one", "-1e39", None, FLOAT32),
        ("one", "{'score': 1e308}", None, FLOAT32),
        ("one", "{'score': 1, 'n': 1e308}", None, "n = 1e+308"),
        ("one", "{'score': 1, 'n': 1e38}", 1.0, ""),
        ("one", "10**400", None, FLOAT),
        ("one", "Fraction(10**400)", None, FLOAT),
        ("one", "Decimal('1e400')", None, FLOAT),
        ("one", "np.longdouble('1e4000')", None, FLOAT),
        ("one", "np.float32(3e38)", None, BOUND),
        ("one", "float('inf')", None, "no finite number"),
        ("one", "float('nan')", None, "no finite number"),
        ("one", "1e-320", 1e-320, ""),
        ("one", "True", 1.0, ""),
        ("waiting", "1e308", None, FLOAT32),
        ("waiting", "2e4", None, BOUND),
        ("together", "1e308", None, FLOAT32),
        ("together", "{'score': 2e4}", None, BOUND),
        ("of_trl", "1e308", None, FLOAT32),
        ("of_trl", "np.float64(2e4)", None, BOUND),
        ("of_trl", "10**400", None, FLOAT),
        ("of_trl", "5", 5.0, ""),
        ("weighed", "1e6", 1e3, ""),
        ("weighed", "2e7", None, BOUND),
        ("heavy", "9", -9e3, ""),
        ("heavy", "11", None, "11 (-11000 in the sum)"),
        ("heavy", "1e306", None, FLOAT32),
        ("unweighed", "1e6", 0.0, ""),
        ("unweighed", "1e39", None, FLOAT32),
        ("summed", "4e3", 8e3, ""),
        ("summed", "6e3", None, "6000 (12000 in the sum)"),
        ("opposite", "1e4", 0.0, ""),
        ("opposite", "1e308", None, FLOAT32),
    ],
)  # fmt: skip
def test_a_reward_that_is_too_large_is_unscorable_with_part_row_value_and_remedy(
    scorer: Scorer, source: str, returned: str, reward: float | None, problem: str
) -> None:
    rollouts = [rollout_of([1, 2]), rollout_of([1, 2])]
    graded = asyncio.run(scorer.score_group(prompt(source), rollouts, [returned, "1"]))
    assert graded[0].reward == reward
    assert graded[0].status == ("ok" if reward is not None else "failed")
    assert graded[1].reward is not None or (source, problem) == ("of_trl", FLOAT)  # then the whole call failed
    for sample in graded:
        assert all(number is None or abs(number) <= FLOAT32_MAX for number in sample.reward_parts.values())
    outcomes = RewardOutcomes(scorer.config)
    outcomes.check(RolloutGroup(prompt(source), graded))
    told = outcomes.new_errors()
    assert bool(told) == bool(problem)
    assert problem in "".join(told)
    if problem in (BOUND, FLOAT32):
        assert f"for {source}/7" in told[0]
        assert "mine.py:" in told[0]
        assert "Scale it down" in told[0]


@pytest.mark.slow
def test_a_function_that_begins_with_too_large_rewards_is_told_before_anything_starts(scorer: Scorer) -> None:
    (problem,) = scorer.try_functions(prompt("heavy"), ["50"]).values()
    assert "50 (-50000 in the sum)" in problem.detail


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"bound": 1e39}, "bound"),
        ({"bound": 0.0}, "bound"),
        ({"parts": [{"name": "math", "weight": 2e4}]}, r"reward\.bound=10000: the weights .* add up to 20000"),
        (
            {"by_source": {"a": [{"name": "math", "weight": 0.6}, {"name": "length", "weight": -0.6}]}, "bound": 1.0},
            "up to 1.2",
        ),
    ],
)
def test_a_bound_that_right_answers_exceed_is_refused(section: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RewardConfig.model_validate(section)


@pytest.mark.parametrize(
    "section",
    [
        {"environment": {"failed_reward": -1e308}},
        {"rollout": {"non_stop_reward": 2e4}},
        {"rollout": {"missing_eos_penalty": 1e39}},
    ],
)
def test_a_reward_of_the_config_is_within_the_bound_too(section: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"over reward\.bound=10000\. Scale it down, or raise the bound"):
        make_config(tmp_path, **section)


def graded_by(tmp_path: Path, given: float | None, outcome: Outcome | None = None, **sections: Any) -> ScoredRollout:
    """A rollout that functions gave `given`, with what its environment or reward model adds."""
    config = make_config(tmp_path, environment={"name": "a.b:C", "weight": 2.0, "failed_reward": -1.0})

    class Given:
        async def score_group(self, _: Any, rollouts: Any, texts: Any, *__: Any, **___: Any) -> Any:
            pairs, ok = zip(rollouts, texts, strict=True), {"part_status": {"f": "ok"}}
            return tuple(ScoredRollout(*pair, "", given, {}, "ok", **ok) for pair in pairs)

    async def score(conversations: list[Any]) -> list[float | None]:
        return [sections["score"]] * len(conversations)

    model = RewardModelClient([score], weight=2.0) if "score" in sections else None
    given_as: Any = Given()
    worker = RolloutWorker(config, tiny_model.make_tokenizer(), cast(Any, None), given_as, cast(Any, object()), model)
    purpose = Purpose("training", 1, SamplingSettings(1.0, 9))
    rollout = replace(rollout_of([1, 2]), facts={"ended_by": "answer"}, outcome=outcome or Outcome())
    (sample,) = asyncio.run(worker.grade(prompt("p"), [rollout], purpose))
    return sample


@pytest.mark.parametrize(
    ("reward", "parts", "given"),
    [
        (1e308, {}, 0.0),
        (-1e39, {}, None),
        (float("inf"), {}, 0.0),
        (5001.0, {}, 0.0),
        (4000.0, {}, 4000.0),
        (1.0, {"n": -1e308}, 0.0),
        (None, {"n": float("inf")}, 0.0),
    ],
)
def test_what_is_too_large_of_an_environment_gives_the_rollout_the_failed_reward(
    tmp_path: Path, reward: float | None, parts: dict[str, float], given: float | None
) -> None:
    said = {"reward": reward, "parts": parts, "facts": {}, "attributes": None}
    sample = graded_by(tmp_path, given, read_outcome(json.loads(json.dumps(said))))
    assert (sample.reward, sample.status, sample.reward_parts) == (-1.0, "call_limit", {})
    assert sample.part_status == {"f": "ok", "environment": "failed"}
    ((part, problem),) = sample.errors.items()
    assert part == "environment"
    assert sample.rollout.facts == {"ended_by": "call_limit", "error": problem}
    assert "Scale it down" in problem


def test_an_environment_may_give_what_the_bound_allows(tmp_path: Path) -> None:
    sample = graded_by(tmp_path, -10.0, Outcome(reward=5000.0, parts={"n": 1e30}))
    assert (sample.reward, sample.status, sample.errors) == (9990.0, "ok", {})


@pytest.mark.parametrize(
    ("score", "reward"), [(10.0, 21.0), (1e308, None), (float("nan"), None), (6000.0, None), (-1e39, None)]
)
def test_a_score_of_a_reward_model_that_is_too_large_is_unscorable(
    tmp_path: Path, score: float, reward: float | None
) -> None:
    sample = graded_by(tmp_path, 1.0, score=score)
    assert sample.reward == reward
    assert sample.reward_parts["reward_model"] == (None if reward is None else score)
    assert list(sample.errors) == (["reward_model"] if score == 6000.0 else [])
    assert sample.part_status == {"f": "ok"} | ({"reward_model": "failed"} if score == 6000.0 else {})


def test_a_number_of_an_environment_that_no_float_holds_is_over_every_bound() -> None:
    """JSON says 1e400 and 10**400; in a process that a model reaches they are no failure of the process."""
    for value, number in ((10**400, np.inf), (-(10**400), -np.inf), (json.loads("1e400"), np.inf)):
        assert read_returned(value).score == number
        assert read_returned({"score": 1, "n": value}).numbers == {"n": number}
        with pytest.raises(ValueError, match="returned"):
            read_returned(value, finite=True)


@pytest.mark.parametrize(
    "values",
    [[0.3, 0.1 + 0.2], [1e17, 1e17], [1e300, -1e300], [1e4], [], [np.inf, 1.0, np.nan], [1e4, 1e4 + 1e-12]],
)
def test_a_histogram_of_any_values_counts_the_finite_ones(values: list[float]) -> None:
    counts, edges = counts_of(values)
    assert counts.sum() == np.isfinite(values).sum()
    assert len(edges) == HISTOGRAM_BINS + 1
    assert (np.diff(edges) > 0).all()


@pytest.mark.parametrize("booleans", [True, False])
def test_scores_may_come_from_a_generator_and_a_bare_nan_is_no_score(booleans: bool) -> None:
    assert read_scores((each for each in (1, np.nan)), 2, booleans=booleans) == [1.0, None]
    with pytest.raises(ValueError, match="no finite number"):
        read_scores([{"score": np.nan}], 1, booleans=booleans)
