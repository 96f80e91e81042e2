"""The learners' speed in the log, against arithmetic by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import make_config, make_groups

from rlhf.check.model_shape import model_shape
from rlhf.run.speed import LearnerSpeed
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import plan_epochs

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


def test_only_active_experts_are_counted() -> None:
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
    values = LearnerSpeed(config, device_name).step_metrics(batch, epochs, np.array(shared), 0.5)
    tokens = len(batch.tokens.token_ids)
    computed = tokens - sum(shared)
    assert values["learner/shared_fraction"] == pytest.approx(sum(shared) / tokens)
    assert values["learner/tokens_per_second"] == tokens / 0.5
    assert values["learner/packing_efficiency"] == computed / (3 * 128)
    assert values["learner/padding_fraction"] == pytest.approx(2 / (computed + 2))  # two rows and a filler of two
    order = [int(row) for rank in epochs[0][0].microbatches for rows in rank for row in rows]
    lengths, responses = batch.tokens.lengths[order].tolist(), int(batch.tokens.response_mask.sum())
    return values | {"flops": model_shape(SHAPE).training_flops(lengths, responses, list(shared))}


def test_mfu_is_a_fraction_of_the_peak_of_the_named_device(model: Path) -> None:
    values = speed_of(model, "NVIDIA H100 80GB HBM3")
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 989e12 * 3))
    assert speed_of(model, "NVIDIA H100 PCIe")["learner/mfu"] == pytest.approx(values["learner/mfu"] * 989 / 756)


def test_tokens_that_were_computed_with_the_previous_sequence_are_not_counted_as_work(model: Path) -> None:
    values = speed_of(model, "NVIDIA H100 80GB HBM3", shared=(0, 3))
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 989e12 * 3))
    assert values["flops"] < speed_of(model, "NVIDIA H100 80GB HBM3")["flops"]


def test_a_step_in_which_only_the_critic_learns_has_no_speed_of_the_policy(model: Path) -> None:
    config = make_config(model, cluster={"device": "cpu"})
    batch = make_batch(make_groups(groups=1, samples=2, vocabulary=9, longest=20, seed=0), mask_truncated=False)
    assert LearnerSpeed(config, "NVIDIA H100 80GB HBM3").step_metrics(batch, [], np.zeros(2, np.int64), 0.5) == {}


def test_mfu_takes_the_peak_of_the_config_and_is_left_out_without_one(model: Path) -> None:
    values = speed_of(model, "cpu", peak_tflops=0.5)
    assert values["learner/mfu"] == pytest.approx(values["flops"] / (0.5 * 0.5e12 * 3))
    assert "learner/mfu" not in speed_of(model, "cpu")
