"""Steps that teach nothing: one warning, with the key to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.run.signal_watch import FLAT_STEPS, SignalWatch
from rlhf.types import RolloutGroup, ScoredRollout


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
    return [text for groups, advantages in steps if (text := watch.after_step(groups, advantages)) is not None]


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
def test_steps_without_a_signal_are_warned_of_once_with_the_key_to_turn(
    graded: tuple[Any, ...], rollout: dict[str, Any], parts: list[str]
) -> None:
    flat = equal_groups(*graded), np.zeros(8)
    (warning,) = warnings_of(*[flat] * (3 * FLAT_STEPS), **rollout)
    assert all(part in warning for part in parts), warning
    assert warnings_of(*[flat] * (FLAT_STEPS - 1), **rollout) == []


def test_a_step_with_a_signal_ends_the_row_of_those_without() -> None:
    flat = equal_groups("", "no_answer", 0.0), np.zeros(8)
    mixed = make_groups(groups=2, samples=4, vocabulary=9, longest=20, seed=0), np.linspace(-1, 1, 8)
    assert warnings_of(*[flat, flat, mixed] * 3) == []
    assert len(warnings_of(mixed, flat, flat, flat)) == 1


def test_equal_rewards_are_no_signal_to_a_critic_whose_advantages_are_not_zero() -> None:
    assert len(warnings_of(*[(equal_groups("", "no_answer", 0.0), np.linspace(-1, 1, 8))] * FLAT_STEPS)) == 1


def test_a_run_of_fewer_steps_is_warned_after_its_last() -> None:
    watch = SignalWatch(make_config(Path("x/model")), steps=1)
    assert watch.after_step(equal_groups("", "no_answer", 0.0), np.zeros(8)) is not None
