"""Steps that teach nothing: one warning with the key to change, and the end of the run after many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.run.signal_watch import FLAT_STEPS, SignalWatch, UselessRunError
from rlhf.types import RolloutGroup, ScoredRollout

Step = tuple[list[RolloutGroup], np.ndarray, int, int]  # groups, advantages, rollouts trained, updates taken


def equal_groups(extracted: str, status: str, reward: float | None, finish_reason: str = "stop") -> list[RolloutGroup]:
    """Two groups of 4, all of whose responses were graded alike."""

    def graded(sample: ScoredRollout) -> ScoredRollout:
        rollout = dataclasses.replace(sample.rollout, finish_reason=finish_reason)
        return dataclasses.replace(sample, rollout=rollout, extracted=extracted, status=status, reward=reward)

    groups = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0)
    return [dataclasses.replace(group, samples=tuple(map(graded, group.samples))) for group in groups]


def warnings_of(*steps: tuple[list[RolloutGroup], np.ndarray], **rollout: Any) -> list[str]:
    config = make_config(Path("x/model"), rollout=rollout)
    watch = SignalWatch(config, steps=10)
    texts = [watch.after_step(*step, trained=8, updates_taken=1) for step in steps]
    return [text for text in texts if text is not None]


@pytest.mark.parametrize(
    ("graded", "rollout", "parts"),
    [
        (("", "no_answer", 0.0), {}, ["0 of 24 responses held an answer", "data.prompt_suffix"]),
        (("", "no_answer", 0.0, "length"), {}, ["0 of 24", "24 were cut off", "raise rollout.max_response_tokens=64"]),
        (("7", "ok", 0.0), {}, ["24 of 24", "mean reward was 0:", "data.train", "samples_per_prompt, or rollout.dyn"]),
        (
            ("7", "ok", 1.0),
            {"dynamic_sampling": True},
            ["24 of 24", "mean reward was 1:", "rollout.samples_per_prompt."],
        ),
        (("", "ok", 0.5), {}, ["its rewards being equal. The mean reward was 0.5: use data"]),
        (("7", "bad_gold", None), {}, ["24 of 24", "No response could be scored"]),
    ],
    ids=["no answer", "cut off", "all wrong", "all right", "a user's function", "unscorable"],
)
def test_steps_without_a_signal_give_one_warning_with_the_key_to_change(
    graded: tuple[Any, ...], rollout: dict[str, Any], parts: list[str]
) -> None:
    flat = equal_groups(*graded), np.zeros(8)
    (warning,) = warnings_of(*[flat] * (3 * FLAT_STEPS), **rollout)
    assert all(part in warning for part in parts), warning
    assert warnings_of(*[flat] * (FLAT_STEPS - 1), **rollout) == []


def test_only_steps_in_a_row_count() -> None:
    flat = equal_groups("", "no_answer", 0.0), np.zeros(8)
    mixed = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0), np.linspace(-1, 1, 8)
    assert warnings_of(*[flat, flat, mixed] * 3) == []
    assert len(warnings_of(mixed, flat, flat, flat)) == 1


def test_equal_rewards_are_no_signal_even_if_a_critic_gives_advantages() -> None:
    assert len(warnings_of(*[(equal_groups("", "no_answer", 0.0), np.linspace(-1, 1, 8))] * FLAT_STEPS)) == 1


def test_a_shorter_run_is_warned_after_its_last_step() -> None:
    watch = SignalWatch(make_config(Path("x/model")), steps=1)
    assert watch.after_step(equal_groups("", "no_answer", 0.0), np.zeros(8), trained=8, updates_taken=1) is not None


FLAT: Step = equal_groups("", "no_answer", 0.0), np.zeros(8), 8, 1
GOOD: Step = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0), np.linspace(-1, 1, 8), 8, 1
UNSCORABLE: Step = equal_groups("7", "failed", None), np.zeros(8), 0, 1
CUT_OFF: Step = equal_groups("7", "ok", 0.5, "length"), np.zeros(8), 0, 1
SKIPPED: Step = GOOD[0], GOOD[1], 8, 0


def end_of(*steps: Step, budget: int | None = 4, planned: int = 10) -> tuple[int, str]:
    """The step after which the run is ended, counted from 1, and why; (0, "") if it goes on."""
    config = make_config(Path("x/model"), run={"max_useless_steps": budget, "steps": planned})
    watch = SignalWatch(config, steps=len(steps))
    for number, (groups, advantages, trained, taken) in enumerate(steps, start=1):
        watch.after_step(groups, advantages, trained=trained, updates_taken=taken)
        try:
            watch.check()
        except UselessRunError as error:
            return number, str(error)
    return 0, ""


@pytest.mark.parametrize(
    ("steps", "parts"),
    [
        ([FLAT] * 9, ["no group had a signal (4)", "0 of 24 responses held an answer", "data.prompt_suffix"]),
        (
            [UNSCORABLE] * 9,
            ["no rollout was trained on (4)", "response could be scored (failed): repair the"],
        ),
        ([CUT_OFF] * 9, ["no rollout was trained on (4)", "24 of 24 responses were cut off", "max_response_tokens=64"]),
        ([SKIPPED] * 9, ["every optimizer step was skipped (4)", "learner.optimizer.lr", "skipped/"]),
        (
            [SKIPPED, SKIPPED, FLAT, SKIPPED],
            ["every optimizer step was skipped (3), no group had a signal (1)", "learner.optimizer.lr"],
        ),
    ],
    ids=["no signal", "unscorable", "cut off", "skipped", "mixed"],
)
def test_a_run_that_learns_nothing_ends_and_says_why_and_what_to_change(steps: list[Step], parts: list[str]) -> None:
    number, message = end_of(*steps)
    assert number == 4
    assert message.startswith("run.max_useless_steps=4: the last 4 steps taught the policy nothing: ")
    assert all(part in message for part in parts), message


def test_a_run_goes_on_while_some_steps_teach_and_a_short_one_is_judged_by_all_of_its_steps() -> None:
    assert end_of(*[FLAT, SKIPPED, UNSCORABLE, GOOD] * 4) == (0, "")
    assert end_of(*[FLAT] * 9, budget=None) == (0, "")
    assert end_of(*[FLAT] * 2, budget=20, planned=2)[0] == 2
    assert end_of(GOOD, FLAT, budget=20, planned=2) == (0, "")
    assert end_of(FLAT, budget=20, planned=100) == (0, "")  # the last step of a resumed run
