"""Each rule of the diagnosis fires on made metrics of a run with its illness, and none on three healthy runs."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import flat_keys, load_config
from rlhf.log.diagnosis import RULES, Diagnosis, Finding, Outside, diagnose_run, outside_at_the_end

ROOT = Path(__file__).parent.parent.parent
HEALTHY = ROOT / "tests/fixtures/healthy_quickstarts.csv"  # metrics of three runs of configs/quickstart.yaml
CONFIG = flat_keys(load_config(GRPOConfig, [str(ROOT / "configs/quickstart.yaml")]).model_dump(mode="json"))

Row = dict[str, Any]


def healthy_runs() -> list[list[Row]]:
    runs: dict[str, list[Row]] = {}
    with HEALTHY.open() as file:
        for line in csv.DictReader(file):
            values = {name: float(value) for name, value in line.items() if value and name != "run"}
            runs.setdefault(line["run"], []).append({**values, "step": int(line["step"]), "time/step": 1.0})
    return list(runs.values())


def ill(**values: Any) -> list[Row]:
    """A healthy run whose metrics are `values` from step 41 on; a function gets the step."""
    rows = healthy_runs()[0]
    for row in rows[40:]:
        row |= {name: value(row["step"]) if callable(value) else value for name, value in values.items()}
    return rows


def since_40(rate: float) -> Any:
    return lambda step: rate * (step - 40)


GRADER = {"reward/status/math/timeout": since_40(30), "reward/status/math/ok": lambda step: 512 * step}
WAITS = {"time/learner_idle": 8.0, "time/engine_idle": 0.5, "time/update": 4.0, "time/transfer": 1.0}
ILLNESSES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no answers": ({"reward/answered_fraction": 0.0}, {}, "data.prompt_suffix"),
    "no answers, cut off": (
        {"reward/answered_fraction": 0.02, "rollout/stopped_fraction": 0.3},
        {},
        "2.0% of the responses held an answer in the form that the reward reads. Most were cut off: raise "
        "rollout.max_response_tokens=24.",
    ),
    "no tool was ever called": ({"environment/used_fraction": 0.0}, {}, "rollout.tool_parser=auto"),
    "almost all tool calls fail": (
        {"environment/tool_calls": 0.5, "environment/tool_errors": 0.48},
        {},
        "96% of the tool calls failed. Read the answers",
    ),
    "rollouts end at their last turn": (
        {"environment/used_fraction": 0.9, "environment/ended_by/max_turns": 0.95},
        {"rollout.max_turns": 3},
        "rollout.max_turns=3",
    ),
    "equal rewards in most groups": ({"reward/equal_group_fraction": 1.0}, {}, "harder data.train"),
    "equal rewards in most groups, too hard": (
        {"reward/equal_group_fraction": 0.8, "reward/mean": 0.01},
        {},
        "easier data.train",
    ),
    "equal rewards in most groups, one value": (
        {"reward/equal_group_fraction": 1.0, "reward/mean": 0.0, "reward/max": 0.0},
        {},
        "Does the reward read the answers",
    ),
    "responses are cut off": ({"rollout/stopped_fraction": 0.05}, {}, "raise rollout.max_response_tokens=24"),
    "KL to the reference is running away": ({"policy/kl_k1": 3.0}, {}, "algo.kl_coef=0.0"),
    "KL to the reference is running away, k1 in the loss": (
        {"policy/kl_k1": 3.0},
        {"algo.kl_estimator": "k1", "algo.kl_place": "loss", "algo.kl_coef": 0.1},
        "algo.kl_estimator=k1 in the loss does not limit the KL, and a larger kl_coef does harm: use k3.",
    ),
    "KL to the reference is running away, k3 in the reward": (
        {"policy/kl_k1": 3.0},
        {"algo.kl_estimator": "k3", "algo.kl_place": "reward", "algo.kl_coef": 0.1},
        "algo.kl_estimator=k3 in the reward limits the KL little near the reference: use k1.",
    ),
    "entropy collapsed": (
        {"policy/entropy": 0.001, "reward/mean": 0.3},
        {},
        f"optimizer.lr={CONFIG['learner.optimizer.lr']}",
    ),
    "much clipping": (
        {"policy/clip_fraction": 0.4},
        {},
        f"minibatches_per_epoch={CONFIG['learner.minibatches_per_epoch']}",
    ),
    "a mask leaves out many tokens": (
        {"policy/geometric_mask_fraction": lambda step: 0.3 if step in (50, 51, 52) else 0.0},
        {"algo.geometric_mask": [0.99, 1.01]},
        "algo.geometric_mask left out 30% of the tokens or more in each of the last 3 steps. Let the policy that "
        f"samples be nearer: lower learner.optimizer.lr={CONFIG['learner.optimizer.lr']}, rollout.max_policy_lag=0 or "
        "learner.minibatches_per_epoch=2. Or widen algo.geometric_mask=[0.99, 1.01].",
    ),
    "a mask leaves out many tokens, of wrong responses": (
        {"policy/off_policy_mask_fraction": 0.26},
        {"algo.off_policy_mask": 0.02},
        "Or raise algo.off_policy_mask=0.02.",
    ),
    "a mask leaves out many tokens, one by one": (
        {"policy/importance_outside_fraction": 0.5},
        {"algo.importance_correction": "masked", "algo.importance_floor": 0.5, "algo.importance_cap": 5.0},
        "Or widen the bounds algo.importance_floor=0.5 and algo.importance_cap=5.0",
    ),
    "engines and learner drift apart": (
        {"policy/engine_kl_excess": 7.0, "policy/engine_kl/from_64": 0.2},
        {},
        "7 times as far from the learner's as rounding explains (policy/engine_kl/from_64=0.2 nats",
    ),
    "engines and learner drift apart, with a lag": (
        {"policy/engine_kl_excess": lambda step: 1.5 if step == 60 else 0.5},
        {"rollout.max_policy_lag": 4},
        "Lower rollout.max_policy_lag=4",
    ),
    "rollouts are dropped as too old": ({"account/stale": since_40(100)}, {}, "rollout.max_policy_lag=0"),
    "learners wait": (WAITS | {"time/slow_groups": 5.0}, {"rollout.max_policy_lag": 1}, "max_policy_lag=1"),
    "engines wait": (
        {"time/learner_idle": 2.0, "time/engine_idle": 8.0, "time/update": 8.0},
        {"rollout.max_policy_lag": 2, "cluster.device": "cuda"},
        "The engines waited for 80% of the time (training takes longer). Raise cluster.learners=1",
    ),
    "the KV cache is full": (
        {"rollout/kv_cache_wait_fraction": 0.4},
        {},
        "full in 40% of the engines' forward passes: requests waited for others to end, or were preempted and computed "
        "again. Raise rollout.kv_cache_gib=0.25 or cluster.engines=1. If no memory is left, lower "
        "rollout.max_concurrent_sequences=256",
    ),
    "the KV cache is full, on GPUs": (
        {"rollout/kv_cache_wait_fraction": 0.25},
        {"cluster.device": "cuda"},
        "Raise rollout.gpu_memory_utilization=0.85 or",
    ),
    "grades are missing": (GRADER, {}, "(math/timeout). Raise reward.wall_seconds=10.0"),
}


@pytest.mark.parametrize("illness", ILLNESSES)
def test_a_rule_finds_the_illness_it_is_for_and_names_the_key_to_turn(illness: str) -> None:
    values, config, expected = ILLNESSES[illness]
    found = {finding.title: finding for finding in diagnose_run(ill(**values), CONFIG | config)}
    finding = found[illness.split(",")[0]]
    assert expected.casefold() in finding.text.casefold()
    assert 41 <= finding.first <= 80


@pytest.mark.parametrize(
    ("metrics", "config", "line"),
    [
        ({"time/slow_groups": 5.0}, {"rollout.max_policy_lag": 1}, "(slow prompts): raise rollout.max_policy_lag"),
        ({}, {"rollout.max_policy_lag": 1, "cluster.device": "cuda"}, "(sampling takes longer): raise cluster.engines"),
        (
            {},
            {"cluster.device": "cuda"},
            "(sampling and training take turns): raise rollout.max_policy_lag or cluster.engines",
        ),
        ({}, {}, ""),  # on CPU both compute on the same cores
        ({}, {"cluster.device": "cuda", "run.deterministic": True}, ""),  # which refuses a lag
        ({}, {"cluster.device": "cuda", "cluster.placement": "colocated"}, ""),  # they take turns on shared GPUs
        (
            {"time/slow_groups": 5.0},
            {"rollout.max_policy_lag": 1, "cluster.device": "cuda", "cluster.placement": "colocated"},
            "(slow prompts): raise rollout.max_policy_lag",
        ),
        ({"time/learner_idle": 7.0}, {"cluster.device": "cuda"}, ""),  # 7 of 12 s are less than 60%
        ({"time/evaluation": 4.0}, {"cluster.device": "cuda"}, ""),  # an evaluation is no wait: 4 of 9 s
    ],
)
def test_the_terminal_line_says_who_waits_and_names_a_key_that_the_config_accepts(
    metrics: Row, config: Row, line: str
) -> None:
    diagnosis = Diagnosis(CONFIG | config)
    for row in ill(**(WAITS | metrics)):
        diagnosis.after_step(row["step"], row)
    assert diagnosis.who_waits() == (line and f"learner waits 62% {line}")


def test_nobody_is_said_to_wait_before_several_steps_agree() -> None:
    diagnosis = Diagnosis(CONFIG | {"cluster.device": "cuda"})
    for step in range(1, 6):
        assert diagnosis.who_waits() == ""
        diagnosis.after_step(step, {**WAITS, "time/step": 1.0})
    assert diagnosis.who_waits().startswith("learner waits 62%")


def test_every_rule_has_a_run_that_is_ill_by_it() -> None:
    assert {illness.split(",")[0] for illness in ILLNESSES} == set(RULES)


@pytest.mark.parametrize("run", range(3))
def test_healthy_runs_have_no_findings(run: int) -> None:
    assert diagnose_run(healthy_runs()[run], CONFIG) == []


def test_weights_that_are_cut_and_a_mask_that_leaves_out_much_for_two_steps_are_no_finding() -> None:
    assert CONFIG["algo.importance_correction"] == "truncated"
    two_steps = {"policy/geometric_mask_fraction": lambda step: 0.9 if step in (50, 51, 53) else 0.0}
    assert diagnose_run(ill(**{"policy/importance_outside_fraction": 0.9}, **two_steps), CONFIG) == []


def test_a_finding_is_new_once_and_its_steps_go_on() -> None:
    diagnosis = Diagnosis(CONFIG)
    new: list[Finding] = []
    for row in ill(**{"policy/clip_fraction": 0.9}):
        new += diagnosis.after_step(row["step"], row)
    assert [(finding.title, finding.first) for finding in new] == [("much clipping", 42)]  # 0.9 / 5 is below the bound
    assert (diagnosis.findings["much clipping"].first, diagnosis.findings["much clipping"].last) == (42, 80)


def test_a_resumed_run_does_not_report_what_its_counters_held_before() -> None:
    rows = [row | {"account/stale": 9e9} for row in healthy_runs()[0][30:]]
    assert diagnose_run(rows, CONFIG) == []


def test_a_metric_that_is_outside_of_its_healthy_range_is_a_notice_and_no_finding() -> None:
    rows = ill(**{"rollout/stopped_fraction": 0.35, "reward/answered_fraction": 0.4})
    assert diagnose_run(rows, CONFIG) == []
    assert outside_at_the_end(rows) == [
        Outside("reward/answered_fraction", pytest.approx(0.4), "above 0.9"),
        Outside("rollout/stopped_fraction", pytest.approx(0.35), "above 0.9"),
    ]
    diagnosis = Diagnosis(CONFIG)
    for row in rows:
        diagnosis.after_step(row["step"], row)
    assert "reward/answered_fraction 0.4 (above 0.9), rollout/stopped_fraction 0.35 (above 0.9)" in diagnosis.notice()
    diagnosis.after_evaluation({"eval/test/stopped_fraction": 0.2})
    assert "eval/test/stopped_fraction 0.2 (above 0.9)" in diagnosis.notice()


def test_a_healthy_run_has_no_notice_whatever_its_first_steps_were() -> None:
    assert outside_at_the_end(healthy_runs()[0]) == []
    assert (
        outside_at_the_end([{"step": 1, "time/step": 1.0, "rollout/stopped_fraction": 0.1}, *healthy_runs()[0]]) == []
    )
