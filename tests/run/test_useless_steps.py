"""Steps that teach nothing: the end of the run after many, with what the diagnosis says to change."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.config.load import flat_keys
from rlhf.log.diagnosis import Diagnosis
from rlhf.log.reductions import UpdateOutcome, to_values
from rlhf.run.rollout_log import rollout_metrics
from rlhf.run.useless_steps import UselessSteps
from rlhf.types import RolloutGroup, ScoredRollout

Step = tuple[list[RolloutGroup], np.ndarray, int, int]  # groups, advantages, rollouts trained, updates taken


def equal_groups(extracted: str, status: str, reward: float | None, finish_reason: str = "stop") -> list[RolloutGroup]:
    """Two groups of 4, all of whose responses were graded alike."""

    def graded(sample: ScoredRollout) -> ScoredRollout:
        rollout = dataclasses.replace(sample.rollout, finish_reason=finish_reason)
        return dataclasses.replace(sample, rollout=rollout, extracted=extracted, status=status, reward=reward)

    groups = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0)
    return [dataclasses.replace(group, samples=tuple(map(graded, group.samples))) for group in groups]


FLAT: Step = equal_groups("", "no_answer", 0.0), np.zeros(8), 8, 1
GOOD: Step = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0), np.linspace(-1, 1, 8), 8, 1
CUT_FLAT: Step = equal_groups("", "no_answer", 0.0, "length"), np.zeros(8), 8, 1
WRONG: Step = equal_groups("7", "ok", 0.0), np.zeros(8), 8, 1
UNSCORABLE: Step = equal_groups("7", "failed", None), np.zeros(8), 0, 1
CUT_OFF: Step = equal_groups("7", "ok", 0.5, "length"), np.zeros(8), 0, 1
SKIPPED: Step = GOOD[0], GOOD[1], 8, 0


def end_of(*steps: Step, budget: int | None = 4, planned: int = 10, **sections: Any) -> tuple[int, str]:
    """The step after which the run is ended, counted from 1, and why; (0, "") if it goes on."""
    run = {"max_useless_steps": budget, "steps": planned}
    config = make_config(Path("x/model"), run=run, **sections)
    diagnosis = Diagnosis(flat_keys(config.model_dump(mode="json")))
    watch = UselessSteps(config.run, diagnosis, teachers=config.algo.teacher is not None)
    skipped, statuses = 0, Counter[str]()
    for number, (groups, advantages, trained, taken) in enumerate(steps, start=1):
        samples = [sample for group in groups for sample in group.samples]
        metrics = rollout_metrics(groups, advantages, version=0, asynchronous=False)
        skipped += not taken
        statuses.update(f"reward/status/math/{sample.status}" for sample in samples)
        values = to_values(metrics) | statuses | {"learner/updates_skipped": skipped}
        watch.after_step(groups, advantages, [UpdateOutcome("learner", bool(taken), {})], trained=trained)
        diagnosis.after_step(number, values)
        try:
            watch.check()
        except RuntimeError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("steps", "sections", "parts"),
    [
        ([FLAT] * 9, {}, ["no group had a signal (4)", "0.0% of the responses held an answer", "data.prompt_suffix"]),
        ([CUT_FLAT] * 9, {}, ["no group had a signal (4)", "0.0% of the responses", "rollout.max_response_tokens=64"]),
        ([WRONG] * 9, {}, ["no group had a signal (4)", "the mean reward was 0.0", "read some (rlhf.show)"]),
        ([UNSCORABLE] * 9, {}, ["no rollout was trained on (4)", "could be scored (math/failed). Repair the reward"]),
        (
            [CUT_OFF] * 9,
            {"algo": {"mask_truncated": True}},
            ["no rollout was trained on (4)", "100% of the responses did not stop", "set algo.mask_truncated=false"],
        ),
        ([SKIPPED] * 9, {}, ["every optimizer step was skipped (4)", "learner.optimizer.lr"]),
        (
            [SKIPPED, SKIPPED, FLAT, SKIPPED],
            {},
            ["every optimizer step was skipped (3), no group had a signal (1)", "learner.optimizer.lr"],
        ),
    ],
    ids=["no answer", "no answer, cut off", "all wrong", "unscorable", "masked", "skipped", "mixed"],
)
def test_a_run_that_learns_nothing_ends_and_says_why_and_what_to_change(
    steps: list[Step], sections: dict[str, Any], parts: list[str]
) -> None:
    number, message = end_of(*steps, **sections)
    assert number == 4
    assert message.startswith("run.max_useless_steps=4: the last 4 steps taught the policy nothing: ")
    assert all(part in message for part in parts), message
    assert "held an answer" not in message or "In 100% of the groups" not in message  # one reason is enough


def test_equal_rewards_are_no_signal_even_if_a_critic_gives_advantages() -> None:
    assert end_of(*[(FLAT[0], np.linspace(-1, 1, 8), 8, 1)] * 4)[0] == 4


def test_rewards_that_differ_by_rounding_alone_are_no_signal() -> None:
    first, second = FLAT[0]
    rounded = [dataclasses.replace(sample, reward=sample.reward + 2**-52) for sample in first.samples]
    groups = [dataclasses.replace(first, samples=(*first.samples[:2], *rounded[2:])), second]
    metrics = to_values(rollout_metrics(groups, np.zeros(8), version=0, asynchronous=False))
    assert metrics["reward/equal_group_fraction"] == 1
    assert end_of(*[(groups, np.linspace(-1, 1, 8), 8, 1)] * 4)[0] == 4


def test_a_teacher_gives_a_signal_where_all_rewards_are_equal() -> None:
    taught: Step = FLAT[0], np.linspace(-1, 1, 8), 8, 1
    teacher = {"algo": {"teacher": {"path": "x/teacher"}}}
    assert end_of(*[taught] * 9, **teacher) == (0, "")
    number, message = end_of(*[FLAT] * 9, **teacher)  # it agrees with the policy on every token
    assert (number, "In 100% of the groups" in message) == (4, False)


def test_an_unscorable_response_does_not_make_the_rewards_of_its_group_differ() -> None:
    first, second = FLAT[0]
    groups = [dataclasses.replace(first, samples=(*first.samples[:3], UNSCORABLE[0][0].samples[3])), second]
    metrics = to_values(rollout_metrics(groups, np.zeros(8), version=0, asynchronous=False))
    assert metrics["reward/equal_group_fraction"] == 1
    assert end_of(*[(groups, np.linspace(-1, 1, 8), 7, 1)] * 4)[0] == 4


def test_a_run_goes_on_while_some_steps_teach_and_a_short_one_is_judged_by_all_of_its_steps() -> None:
    assert end_of(*[FLAT, SKIPPED, UNSCORABLE, GOOD] * 4) == (0, "")
    assert end_of(*[FLAT] * 9, budget=None) == (0, "")
    number, message = end_of(*[FLAT] * 2, budget=20, planned=2)
    assert number == 2
    assert message.startswith("run.max_useless_steps=20: all 2 steps of the run taught the policy nothing: ")
    assert end_of(GOOD, FLAT, budget=20, planned=2) == (0, "")
    assert end_of(FLAT, budget=20, planned=100) == (0, "")  # the last step of a resumed run
