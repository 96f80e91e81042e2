"""Seconds, waiting and rollout metrics in the log, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from documented import check_documented
from worlds import make_groups

from rlhf.log.clock import BusyMeter, Clock, waiting_seconds
from rlhf.log.reductions import Last, Mean, Sum, UpdateOutcome, mean_over_updates, to_values
from rlhf.run.rollout_log import interruptions, rollout_metrics
from rlhf.types import RolloutGroup, VersionSpan


def test_who_waited_for_whom() -> None:
    phases = {"sampling": 3.0, "logprobs": 1.0, "update": 4.0, "transfer": 0.5, "evaluation": 1.0}
    assert waiting_seconds(phases, 10.0, 6.5) == {"time/engine_idle": 3.5, "time/learner_idle": 4.5}


def test_an_engine_is_busy_from_its_first_open_request_to_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    meter = BusyMeter()
    now[0] = 1.0
    with meter.request():
        with meter.request():
            now[0] = 3.0
        assert meter.take() == (0, 2.0)
        now[0] = 7.0
    meter.tokens += 30
    now[0] = 20.0
    assert meter.take() == (30, 4.0)
    now[0] = 30.0
    assert meter.take() == (0, 0.0)


def test_an_engine_that_sleeps_is_not_busy_though_it_has_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    meter = BusyMeter()
    with meter.request() as of_first_s:
        now[0] = 2.0
        meter.sleep()
        now[0] = 7.0
        with meter.request() as of_second_s:  # it came in the middle of the sleep
            now[0] = 10.0
            meter.wake_up()
            assert meter.take() == (0, 2.0)
            assert of_second_s() == 3.0
        now[0] = 11.0
    assert meter.take() == (0, 1.0)
    assert of_first_s() == 8.0


def test_phases_between_two_logs_belong_to_the_later_step() -> None:
    clock = Clock({"update": 10.0})
    with clock.phase("update"):
        time.sleep(0.01)
    first, window_s = clock.take()
    assert 0.01 <= first["update"] <= window_s
    with clock.phase("checkpoint"):
        pass
    second, _ = clock.take()
    assert list(second) == ["checkpoint"]
    assert clock.total["update"] == 10.0 + first["update"]


def test_the_start_is_not_counted_as_waiting() -> None:
    clock = Clock({})
    with clock.phase("start"):
        time.sleep(0.02)
    started = time.monotonic()
    clock.start_window()
    phases, window_s = clock.take()
    assert phases["start"] >= 0.02
    assert window_s <= time.monotonic() - started


def test_every_part_of_the_reward_is_logged_over_the_responses_that_have_it() -> None:
    first, second = make_groups(groups=2, samples=2, vocabulary=9, longest=20, seed=0)

    def graded(group: RolloutGroup, parts: dict[str, float]) -> RolloutGroup:
        return RolloutGroup(group.prompt, tuple(dataclasses.replace(s, reward_parts=parts) for s in group.samples))

    groups = [graded(first, {"math": 1.0}), graded(second, {"f1": 0.5, "f1/tries": 3.0})]
    metrics = rollout_metrics(groups, np.zeros(4), version=1, asynchronous=False)
    assert metrics["reward/part/math"].value() == 1.0
    assert metrics["reward/part/f1"].value() == 0.5
    check_documented([to_values(metrics)], logged={"a function returns some"})
    assert not any(name.startswith("rollout/") and "lag" in name for name in metrics)  # a synchronous run has none


def test_the_loss_of_a_step_is_the_mean_over_its_updates_and_its_learning_rate_the_last_one() -> None:
    updates = [
        {"policy/loss": Sum(1.0), "policy/entropy": Mean(3.0, 1.0), "learner/lr": Last(0.2)},
        {"policy/loss": Sum(2.0), "policy/entropy": Mean(3.0, 2.0), "learner/lr": Last(0.1)},
    ]
    values = {
        name: metric.value()
        for name, metric in mean_over_updates([UpdateOutcome("learner", True, update) for update in updates]).items()
    }
    assert values == {"policy/loss": 1.5, "policy/entropy": 2.0, "learner/lr": 0.1}


def test_lag_is_counted_by_token() -> None:
    (group,) = make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0)
    samples = []
    for sample in group.samples:
        (sequence,) = sample.rollout.sequences
        end, start = len(sequence.token_ids), sequence.prompt_length
        spans = (VersionSpan(start, end - 1, 4), VersionSpan(end - 1, end, 5))
        changed = (dataclasses.replace(sequence, version_spans=spans),)
        samples.append(dataclasses.replace(sample, rollout=dataclasses.replace(sample.rollout, sequences=changed)))
    metrics = rollout_metrics([RolloutGroup(group.prompt, tuple(samples))], np.zeros(2), version=6, asynchronous=True)
    tokens = sum(sample.rollout.response_length for sample in samples)
    assert metrics["rollout/tokens_at_lag/1"].value() == 2 / tokens
    assert metrics["rollout/tokens_at_lag/2"].value() == (tokens - 2) / tokens
    assert to_values(metrics)["rollout/lag/max"] == 2
    assert metrics["rollout/interrupted"].value() == 2
    lengths = [len(sample.rollout.sequences[0].token_ids) for sample in samples]
    assert metrics["rollout/recomputed_tokens"].value() == sum(lengths) - 2  # each lacked its last token


def test_a_turn_that_goes_on_from_the_ids_of_the_one_before_under_the_same_weights_was_not_interrupted() -> None:
    (group,) = make_groups(groups=1, samples=1, vocabulary=9, longest=20, seed=0)
    rollout = group.samples[0].rollout
    spans = (VersionSpan(3, 5, 4), VersionSpan(5, 6, 4))
    two_turns = (dataclasses.replace(rollout.sequences[0], version_spans=spans),)
    assert interruptions(dataclasses.replace(rollout, sequences=two_turns)) == []
