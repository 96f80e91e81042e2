"""The driver's account of the reward: counters, the failure budget, errors, and rewards that say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, rollout_of

from rlhf.config.reward import RewardConfig, RewardPart
from rlhf.run.reward_outcomes import RewardOutcomes, silent_rewards
from rlhf.types import Prompt, RolloutGroup, ScoredRollout

FUNCTION = "mine:judge"
REWARD = RewardConfig.model_validate(
    {"parts": [FUNCTION, "math"], "failures_always_allowed": 2, "failure_fraction": 0.1}
)
FINE, RAISED = ("ok", ""), ("failed", "mine.py:3: KeyError: 'a key'")


def group_of(*calls: tuple[str, str], part: str = FUNCTION, row: str = "p/1") -> RolloutGroup:
    """A group with a response for each call of a part: its status, and its error."""
    prompt = Prompt(row, 0, np.ones(1, np.int32), (), "", "p")
    samples = [
        ScoredRollout(rollout_of([1]), "", "", 1.0, {}, "ok", "", {part: status}, {part: error} if error else {})
        for status, error in calls
    ]
    return RolloutGroup(prompt, tuple(samples))


def test_failures_beyond_the_budget_end_the_run_with_one_clear_error() -> None:
    outcomes = RewardOutcomes(REWARD)
    outcomes.check(group_of(RAISED, FINE, RAISED))
    with pytest.raises(RuntimeError) as ended:
        outcomes.check(group_of(FINE, RAISED, row="p/7"))
    assert str(ended.value) == (
        "reward 'mine:judge': 3 of 5 calls failed, last for p/7 (failed: mine.py:3: KeyError: 'a key'), more than "
        "reward.failure_fraction=0.1 allows. Repair the function or its endpoint, or raise the fraction."
    )


def test_the_budget_is_one_however_many_workers_the_failures_are_spread_over() -> None:
    outcomes = RewardOutcomes(REWARD)
    of_worker = [group_of(("timeout", "killed"), row=f"p/{number}") for number in range(3)]
    for number in range(2):
        outcomes.check(of_worker[number])
    with pytest.raises(RuntimeError, match=r"3 of 3 calls failed, last for p/2 \(timeout: killed\)"):
        outcomes.check(of_worker[2])


def test_a_share_of_many_calls_may_fail_and_so_may_built_in_rewards_and_environments() -> None:
    outcomes = RewardOutcomes(REWARD)
    outcomes.check(group_of(*[FINE] * 40, *[RAISED] * 4))
    for part in ("math", "environment", "reward_model"):
        outcomes.check(group_of(*[RAISED] * 9, part=part))


def test_the_budget_of_a_resumed_run_counts_the_calls_before() -> None:
    outcomes = RewardOutcomes(REWARD, {f"{FUNCTION}/ok": 10, f"{FUNCTION}/failed": 2})
    with pytest.raises(RuntimeError, match="3 of 13 calls failed"):
        outcomes.check(group_of(RAISED))


def test_counters_are_those_of_groups_that_were_trained() -> None:
    outcomes = RewardOutcomes(REWARD, {f"{FUNCTION}/ok": 10})
    trained, waiting = group_of(FINE, RAISED), group_of(FINE, FINE)
    for group in (trained, waiting):
        outcomes.check(group)
    outcomes.add_step([trained])
    assert outcomes.counters == {f"{FUNCTION}/ok": 11, f"{FUNCTION}/failed": 1}


def test_each_error_is_told_once_with_the_calls_so_far() -> None:
    outcomes = RewardOutcomes(REWARD)
    outcomes.check(group_of(RAISED, FINE, RAISED))
    assert outcomes.new_errors() == [f"reward {FUNCTION}: 2 of 3 calls failed with {RAISED[1]}"]
    unlimited = RewardOutcomes(REWARD.model_copy(update={"failure_fraction": 1.0}))
    unlimited.check(group_of(RAISED))
    unlimited.new_errors()
    unlimited.check(group_of(RAISED, ("timeout", "killed after 1 s")))
    assert unlimited.new_errors() == [f"reward {FUNCTION}: 1 of 3 calls failed with timeout: killed after 1 s"]
    unlimited.check(group_of(("failed", "too large"), part="environment"))
    unlimited.check(group_of(("failed", "too large"), part="math"))
    assert unlimited.new_errors() == ["reward environment: 1 of its rewards failed with too large"]


def test_the_failures_of_a_part_are_counted_by_error_and_distinct_ones_are_bounded() -> None:
    outcomes, part = RewardOutcomes(REWARD.model_copy(update={"failure_fraction": 1.0})), RewardPart(name=FUNCTION)
    assert outcomes.failures(part) == ""
    outcomes.check(group_of(RAISED, RAISED, *(("failed", f"other {number}") for number in range(6))))
    first, *shown, others = outcomes.failures(part).splitlines()
    assert first == f"reward {FUNCTION}: 8 of 8 calls failed"
    assert shown[0] == f"  2 x {RAISED[1]}"
    assert others == "  2 x other errors"
    assert outcomes.failed_always(part)
    assert outcomes.missing_value_reason(part) == "every call failed"


# --- rewards that say nothing ---

VALUE, NONE = {"exact": 1.0, "format": 1.0}, {"exact": None, "format": 1.0}


@pytest.mark.parametrize(
    ("sections", "parts", "rewards", "warning", "note"),
    [
        ({}, [VALUE, NONE], [1.0, None], "", ""),
        ({}, [NONE, NONE], [None, None],
         "reward: every reward of step 1 was None: exact: its calls ended as bad_gold (2). ", ""),
        ({}, [NONE, {"exact": 1.0, "format": None}], [None, None],
         "reward: every reward of step 1 was None: no response has a value of each part (exact 1 of 2, format 1 of 2).",
         ""),
        ({}, [NONE, NONE], [1.0, 1.0], "",
         "reward: exact judged none of the 2 responses of step 1: its calls ended as bad_gold (2)."),
        ({"reward": {"by_source": {"p": ["exact"]}}}, [NONE, NONE], [None, None],
         "reward.by_source.p: every reward of step 1 for prompts of p was None: exact: its calls ended", ""),
        ({"reward": {"parts": []}, "reward_model": {"path": "m"}}, [{"reward_model": None}] * 2, [None, None],
         "reward: every reward of step 1 was None: reward_model: it gave no score.", ""),
        ({"reward": {"parts": []}, "environment": {"name": "game.py:Game"}}, [{}, {}], [None, None],
         "reward: every reward of step 1 was None: environment: it gave no reward.", ""),
        ({"reward": {"parts": []}, "algo": {"teacher": {"path": "t"}}}, [{}, {}], [None, None], "", ""),
    ],
)  # fmt: skip
def test_a_step_whose_rewards_say_nothing_names_what_is_silent(
    tmp_path: Path, sections: dict[str, Any], parts: list[Any], rewards: list[float | None], warning: str, note: str
) -> None:
    config = make_config(tmp_path / "model", **({"reward": {"parts": ["exact", "format"]}} | sections))
    prompt = Prompt("p/1", 0, np.ones(1, np.int32), (), "", "p")
    samples = [
        ScoredRollout(
            rollout_of([1]), "", "", reward, values, "ok",
            part_status={name: "bad_gold" if value is None else "ok" for name, value in values.items()},
        )
        for values, reward in zip(parts, rewards, strict=True)
    ]  # fmt: skip
    outcomes, group = RewardOutcomes(config.reward), RolloutGroup(prompt, tuple(samples))
    outcomes.check(group)
    for told, expected in zip(silent_rewards(config, outcomes, [group], step=1), (warning, note), strict=True):
        assert len(told) == bool(expected)
        assert "".join(told).startswith(expected)
