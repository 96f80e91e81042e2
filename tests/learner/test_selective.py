"""Selective checkpointing: the gradients of full recomputation, bit for bit, without computing a product again."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from worlds import (
    make_config,
    make_groups,
    pack_rows,
    plan_first_epoch,
    random_column,
    record_gradients,
    rollout_of,
    run_world,
)

from rlhf.algo.lora import adapt, linear_names
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer
from rlhf.learner.selective import selective_contexts
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World
from tools.model_families import make_family

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several, gradients of gpt_oss' biases are summed in any order, whatever is kept."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def update(transformer: Any, checkpointing: Any) -> tuple[list[Any], int]:
    """Gradients of one row, and the floating-point operations of its products and attention."""
    model = copy.deepcopy(transformer)
    model.set_attn_implementation(PACKED)
    prepare_transformer(model, gradient_checkpointing=checkpointing)
    rng = np.random.default_rng(0)
    rollouts = [rollout_of(rng.integers(3, 90, n).astype(np.int32), np.arange(n) > 3) for n in (150, 12, 40)]
    counter = FlopCounterMode(display=False)
    with counter:
        tokens = DeviceTokens.of(pack_rows(rollouts, range(3)), CPU)
        PolicyModel(model, temperature=1.0)(tokens).logprobs.sum().backward()
    return [param.grad for param in model.parameters()], counter.get_total_flops()


# The experts of gpt_oss add a bias to a product in place; qwen3_5_text mixes tokens without attention too.
@pytest.mark.slow
@pytest.mark.private
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3, adapters"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "qwen3_moe", "gpt_oss", "qwen3_5_text")),
    ],
)
def test_gradients_are_those_of_full_recomputation_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    transformer: Any = make_family(family.split(",")[0])
    transformer = transformer.to(dtype)
    if "adapters" in family:
        adapt(transformer, linear_names(transformer, targets="all-linear", exclude=()), rank=4, scale=2.0)
        for name, param in transformer.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(param, std=0.1)
    off, selective, full = (update(transformer, checkpointing) for checkpointing in (False, "selective", True))
    assert any(grad is not None and grad.any() for grad in full[0])
    for ours, expected in zip(selective[0], full[0], strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.equal(ours, expected)
    assert off[1] <= selective[1] < full[1]
    if family in ("qwen2", "qwen3"):
        assert selective[1] == off[1]


def test_a_product_that_is_written_to_is_computed_again() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 4), torch.randn(4, 4, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # as in an autograd function of DeepSpeed
            shift = torch.matmul(x, weight)
            shift += 1.0
        return (torch.matmul(x, weight) * shift).sin()

    layer(x).sum().backward()
    expected, weight.grad = weight.grad, None
    assert expected is not None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]  # backward has set it


def second_gradients(world: World, model: Path, checkpointing: Any) -> dict[str, np.ndarray]:
    """Gradients of the second update at ZeRO-3, when no bias is 0 any more."""
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        model={"gradient_checkpointing": checkpointing},
        learner={
            "max_tokens_per_microbatch": 300, "zero_stage": 3, "minibatches_per_epoch": 2, "optimizer": {"lr": 1e-2}
        },
        cluster={"device": "cpu", "learners": world.size},
    )  # fmt: skip
    learner = Learner(config, world)
    seen = record_gradients(learner)
    batch, minibatches, advantages = plan_first_epoch(
        config, make_groups(groups=4, samples=4, vocabulary=250, longest=60, seed=3)
    )
    learner.start_step(batch.tokens, [minibatches])
    learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), random_column(batch, 1), None))
    return seen[1]


@pytest.mark.stack
def test_at_zero_3_too_where_weights_are_gathered_anew_and_a_bias_is_added_in_place(tiny_model_dir: Path) -> None:
    model = tiny_model_dir / "model"
    selective, full = (run_world(second_gradients, 2, model, checkpointing) for checkpointing in ("selective", True))
    assert any("bias" in name for name in full[0])
    for ours, expected in zip(selective, full, strict=True):
        assert all(np.array_equal(ours[name], expected[name]) for name in expected)
