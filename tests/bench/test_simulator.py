"""The simulator of engines and learners, on cases whose times can be found by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulator import Simulation, System, bound_s

PLAIN: dict[str, Any] = {
    "engines": 1, "slots": 64, "base_s": 1.0, "sequence_s": 0.0, "request_s": 0.0, "training_s": 2.0, "transfer_s": 0.0,
    "prefill_token_s": 0.0, "groups_per_step": 1, "max_policy_lag": 0,
}  # fmt: skip
STEPS = 12


def mean_step(lengths: list[list[int]], **changes: Any) -> tuple[float, int]:
    simulation = Simulation(System(**PLAIN | changes), lengths, STEPS)
    return simulation.run(), simulation.stale


def test_at_lag_0_sampling_and_training_take_turns() -> None:
    assert mean_step([[3, 5]]) == (5 + 2, 0)  # the longest of the group, then the learner


def test_with_a_lag_the_slower_of_the_two_sets_the_pace() -> None:
    assert mean_step([[1, 1]], max_policy_lag=1) == (2, 0)  # training
    assert mean_step([[6, 6]], slots=2, max_policy_lag=1) == (6, 0)  # sampling: the next group waits for the slots


def test_every_engine_stands_still_during_a_transfer() -> None:
    assert mean_step([[3, 5]], transfer_s=0.5) == (5 + 2 + 0.5, 0)


def test_a_token_takes_longer_with_more_sequences_beside_it() -> None:
    # two of 2 tokens: both for 2 tokens at 1 + 0.25 x 2; then nothing
    step_s, _ = mean_step([[2, 2]], sequence_s=0.25)
    assert step_s == pytest.approx(2 * 1.5 + 2)
    # 1 and 3: one token at 1.5, two more at 1.25
    step_s, _ = mean_step([[1, 3]], sequence_s=0.25)
    assert step_s == pytest.approx(1.5 + 2 * 1.25 + 2)


def test_groups_spread_over_engines() -> None:
    step_s, _ = mean_step([[4], [4]], engines=2, slots=1, groups_per_step=2)
    assert step_s == 4 + 2
    step_s, _ = mean_step([[4], [4]], engines=1, slots=1, groups_per_step=2)
    assert step_s == 8 + 2


def test_a_response_that_is_overtaken_by_too_many_steps_is_stale_and_sampled_again() -> None:
    lengths: list[list[int]] = [[1], [1], [1], [9]]
    step_s, stale = mean_step(lengths, max_policy_lag=1, groups_per_step=1, training_s=1.0, on_stale="drop")
    assert stale > 0
    assert step_s > 1


def test_a_step_waits_for_a_response_that_would_be_too_old_at_the_next_one() -> None:
    lengths = [[1], [1], [1], [9]]
    simulation = Simulation(System(**PLAIN | {"max_policy_lag": 1, "training_s": 1.0}), lengths, STEPS)
    simulation.run()
    assert simulation.stale == 0
    assert set(range(STEPS - 1)) <= set(simulation.trained)  # every fourth is slow
    assert simulation.slow_wait_s > 0


def test_the_bound_is_a_steps_tokens_on_full_engines() -> None:
    system = System(**PLAIN | {"engines": 2, "slots": 4, "sequence_s": 0.5, "groups_per_step": 8, "max_policy_lag": 2})
    sampling, training = bound_s(system, [[3, 5]])
    assert sampling == pytest.approx(8 * 8 * (1 + 0.5 * 4) / 4 / 2)
    assert training == 2.0


def test_at_lag_2_a_long_tailed_run_stays_near_the_bound_and_nearer_if_it_discards_slow_groups() -> None:
    from benchmarks.simulator import large_cluster, row_of

    system, lengths = large_cluster(8, 2)
    waiting, dropping = (row_of("", replace(system, on_stale=rule), lengths, 8) for rule in ("wait", "drop"))
    assert dropping["above the bound"] < 0.05
    assert waiting["above the bound"] < 0.10
    assert (waiting["stale groups"], dropping["stale groups"] > 0) == (0, True)
