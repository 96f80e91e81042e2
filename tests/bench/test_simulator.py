"""The simulator of engines and learners, on cases whose times can be found by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulator import FLAGSHIP, LAYOUTS, VERL_STEP_S, Simulation, System, bound_s, flagship, verl_row
from benchmarks.simulator import STEPS as QUICK
from rlhf.check.hours import step_time
from rlhf.check.model_shape import shape_at
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import load_config
from rlhf.config.program import with_values

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


# --- engines and learners on the same GPUs ---


def test_without_a_lag_a_shared_step_is_its_longest_response_and_the_learners_turn() -> None:
    assert mean_step([[3, 5]], shared=True, transfer_s=0.5, swap_s=1.0) == (5 + 2 + 0.5 + 1.0, 0)


def test_shared_gpus_never_do_both_at_once() -> None:
    # one slot, never empty: 4 tokens per step
    assert mean_step([[4]], slots=1, max_policy_lag=2) == (4, 0)
    assert mean_step([[4]], slots=1, max_policy_lag=2, shared=True, swap_s=0.5) == (4 + 2 + 0.5, 0)


def test_an_interrupted_response_goes_on_after_the_prefill_of_its_tokens() -> None:
    changes = {"shared": True, "max_policy_lag": 1, "training_s": 3.0, "prefill_token_s": 0.5, "prompt_tokens": 10}
    simulation = Simulation(System(**PLAIN | changes), [[2], [6]], STEPS)
    simulation.run()
    # The first group ends at 2 s, and the learners train until 5. The second one has 2 tokens; 12 are computed again,
    # until 11, and 4 more are sampled, until 15.
    assert simulation.done_at[:2] == [2 + 3, 15 + 3]


def test_with_a_lag_the_longest_response_may_take_the_sampling_of_two_steps() -> None:
    # At lag 0 steps take 2 + 3 and 6 + 3. At lag 1 a group of 6 tokens is asked for with the next one of 2 under way:
    # 6 tokens and two turns of the learners for two steps.
    assert mean_step([[2], [6]], shared=True, training_s=3.0) == ((2 + 3 + 6 + 3) / 2, 0)
    assert mean_step([[2], [6]], shared=True, training_s=3.0, max_policy_lag=1) == ((6 + 3 + 3) / 2, 0)


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_on_shared_gpus_every_group_is_trained_once_whatever_its_length(lag: int) -> None:
    lengths = [[3, 4], [5, 2], [4, 4], [40, 3]]
    changes = {"shared": True, "max_policy_lag": lag, "groups_per_step": 4, "slots": 8, "transfer_s": 0.5}
    simulation = Simulation(System(**PLAIN | changes), lengths, 40)
    simulation.run()
    assert simulation.stale == 0
    assert len(set(simulation.trained)) == len(simulation.trained)
    assert set(range(4 * (40 - lag))) <= set(simulation.trained)
    assert simulation.interrupted > 0


@pytest.mark.parametrize(("name", "lag"), [("8 shared", 0), ("8 shared", 1), ("4 engines, 4 learners", 1)])
def test_the_plan_of_the_flagship_is_within_a_twentieth_of_the_simulation(name: str, lag: int) -> None:
    system, lengths = flagship(0.5, lag, **LAYOUTS[name])
    config = with_values(load_config(GRPOConfig, [FLAGSHIP]), cluster=LAYOUTS[name], rollout={"max_policy_lag": lag})
    time = step_time(config, shape_at(config.model.path))
    assert time is not None
    step_s = Simulation(system, lengths, QUICK).run()
    assert time.total + system.transfer_s == pytest.approx(step_s, rel=0.05)  # the plan counts no transfer


def test_a_published_run_of_verl_is_met_within_a_tenth() -> None:
    published = VERL_STEP_S["colocate_async"] / VERL_STEP_S["sync"]
    assert verl_row(2 * QUICK)["verl's colocated"] == pytest.approx(published, abs=0.1)
