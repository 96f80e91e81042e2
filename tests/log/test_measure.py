"""The numbers of the log about speed and waiting, against arithmetic by hand."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.log.measure import FLAT_STEPS, Clock, LearnerSpeed, SignalWatch, peak_tflops, rollout_metrics, waiting_seconds
from rlhf.log.metrics import Last, Mean, Sum, mean_over_updates
from rlhf.plan.model import model_shape
from rlhf.run.sampler import BusyMeter
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import RolloutGroup, ScoredRollout, VersionSpan

SHAPE = {
    "model_type": "llama", "vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12,
}  # fmt: skip


def test_training_flops_by_hand() -> None:
    # a layer: 2 H n d + 2 H k d = 128 + 64, 3 H I = 288; 6 FLOPs a parameter and token, 6 n d L^2 a layer of attention
    expected = 6 * 2 * (192 + 288) * (3 + 5) + 6 * 80 * 4 + 2 * 6 * 8 * (9 + 25)
    assert model_shape(SHAPE).training_flops([3, 5], 4, [0, 0]) == expected
    # two tokens of the second were computed with the first: 2 (192 + 288) parameters and 2^2 scores less
    assert model_shape(SHAPE).training_flops([3, 5], 4, [0, 2]) == expected - 6 * 2 * 480 * 2 - 2 * 6 * 8 * 4


def test_of_experts_only_the_active_ones_are_counted() -> None:
    sparse = {**SHAPE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert model_shape(sparse).active_parameters == 2 * (192 + 2 * 288 + 8 * 8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path / "model"


def speed_of(model: Path, device_name: str, shared: tuple[int, int] = (0, 0), **cluster: Any) -> dict[str, float]:
    """Of an update of 0.5 s on two rollouts by three learners; `shared` first tokens were computed only once."""
    config = make_config(
        model, learner={"max_tokens_per_microbatch": 128}, cluster={"device": "cpu", "learners": 3, **cluster}
    )
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0), mask_truncated=False)
    epochs = plan_epochs(batch, config, step=0)
    values = LearnerSpeed(config, device_name).of_step(batch, epochs, np.array(shared), 0.5)
    tokens = len(batch.tokens.token_ids)
    computed = tokens - sum(shared)
    assert values["learner/shared_fraction"] == pytest.approx(sum(shared) / tokens)
    assert values["learner/tokens_per_second"] == tokens / 0.5
    assert values["learner/packing_efficiency"] == computed / (3 * 128)
    assert values["learner/padding_fraction"] == pytest.approx(2 / (computed + 2))  # two rows and a filler of two
    order = [int(row) for rank in epochs[0][0].microbatches for rows in rank for row in rows]
    lengths, responses = batch.tokens.lengths[order].tolist(), int(batch.tokens.response_mask.sum())
    return values | {"flops": model_shape(SHAPE).training_flops(lengths, responses, list(shared))}


def test_mfu_is_the_share_of_the_peak_of_the_named_device(model: Path) -> None:
    values = speed_of(model, "NVIDIA H100 80GB HBM3")
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 989e12 * 3))
    assert speed_of(model, "NVIDIA H100 PCIe")["learner/mfu"] == pytest.approx(values["learner/mfu"] * 989 / 756)


def test_tokens_that_were_computed_with_the_sequence_before_are_no_work(model: Path) -> None:
    values = speed_of(model, "NVIDIA H100 80GB HBM3", shared=(0, 3))
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 989e12 * 3))
    assert values["flops"] < speed_of(model, "NVIDIA H100 80GB HBM3")["flops"]


def test_a_device_is_known_by_whole_words_of_its_name() -> None:
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_tflops("NVIDIA H100 NVL") == 835.0
    assert peak_tflops("NVIDIA L40") == 181.0
    assert peak_tflops("NVIDIA A10G") == 70.0
    assert peak_tflops("NVIDIA RTX A1000") is peak_tflops("NVIDIA RTX A4000") is None


def test_a_step_in_which_only_the_critic_learns_says_nothing_of_the_policys_speed(model: Path) -> None:
    config = make_config(model, cluster={"device": "cpu"})
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0), mask_truncated=False)
    assert LearnerSpeed(config, "NVIDIA H100 80GB HBM3").of_step(batch, [], np.zeros(2, np.int64), 0.5) == {}


def test_mfu_takes_the_peak_of_the_config_and_is_left_out_without_one(model: Path) -> None:
    values = speed_of(model, "cpu", peak_tflops=0.5)
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 0.5e12 * 3))
    assert "learner/mfu" not in speed_of(model, "cpu")


def test_who_waited_for_whom() -> None:
    phases = {"sampling": 3.0, "logprobs": 1.0, "update": 4.0, "transfer": 0.5, "evaluation": 1.0}
    assert waiting_seconds(phases, 10.0, 6.5) == {"time/engine_idle": 3.5, "time/learner_idle": 4.5}


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


def test_the_start_is_no_waiting_and_every_part_of_the_reward_is_logged_whoever_has_it() -> None:
    clock = Clock({})
    with clock.phase("start-up"):
        time.sleep(0.02)
    up = time.monotonic()
    clock.start_window()
    phases, window_s = clock.take()
    assert phases["start-up"] >= 0.02
    assert window_s <= time.monotonic() - up

    first, second = make_groups(groups=2, samples=2, vocabulary=9, longest=20, seed=0)

    def graded(group: RolloutGroup, parts: dict[str, float]) -> RolloutGroup:
        return RolloutGroup(group.prompt, tuple(dataclasses.replace(s, reward_parts=parts) for s in group.samples))

    metrics = rollout_metrics([graded(first, {"math": 1.0}), graded(second, {"f1": 0.5})], np.zeros(4), step=1)
    assert metrics["reward/part/math"].value() == 1.0
    assert metrics["reward/part/f1"].value() == 0.5


def test_the_loss_of_a_step_is_the_mean_over_its_updates_and_its_learning_rate_the_last_one() -> None:
    updates = [
        {"policy/loss": Sum(1.0), "policy/entropy": Mean(3.0, 1.0), "learner/lr": Last(0.2)},
        {"policy/loss": Sum(2.0), "policy/entropy": Mean(3.0, 2.0), "learner/lr": Last(0.1)},
    ]
    values = {name: metric.value() for name, metric in mean_over_updates(updates).items()}
    assert values == {"policy/loss": 1.5, "policy/entropy": 2.0, "learner/lr": 0.1}


def test_tokens_that_arrive_during_an_evaluation_are_in_the_rate_of_the_next_step() -> None:
    meter = BusyMeter()
    meter.begin()
    time.sleep(0.01)
    meter.end()
    meter.tokens += 30
    rate, busy_s = meter.take()
    assert busy_s >= 0.01
    assert rate == pytest.approx(30 / busy_s)
    assert meter.take() == (0.0, 0.0)


def test_lag_is_counted_by_token() -> None:
    (group,) = make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0)
    samples = []
    for sample in group.samples:
        end, start = len(sample.rollout.token_ids), len(group.prompt.token_ids)
        spans = (VersionSpan(start, end - 1, 4), VersionSpan(end - 1, end, 5))
        samples.append(dataclasses.replace(sample, rollout=dataclasses.replace(sample.rollout, version_spans=spans)))
    metrics = rollout_metrics([RolloutGroup(group.prompt, tuple(samples))], np.zeros(2), step=6)
    tokens = sum(sample.rollout.response_length for sample in samples)
    assert metrics["rollout/tokens_at_lag/1"].value() == 2 / tokens
    assert metrics["rollout/tokens_at_lag/2"].value() == (tokens - 2) / tokens
    assert metrics["rollout/lag_max"].value() == 2


# --- steps that teach nothing ---


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
