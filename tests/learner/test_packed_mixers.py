"""Mixers that are not attention compute packed rows segment by segment; test_families.py has each kind of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from model_families import write_family
from torch import Tensor, nn
from worlds import make_config, run_world

from rlhf.algo.packing import pack
from rlhf.config.sections import ModelConfig
from rlhf.learner.packed_mixers import mixers_of
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.types import PackedTokens, World

pytestmark = pytest.mark.slow

MIXERS = ("qwen3_5_text", "nemotron_h", "lfm2", "minimax")  # gated delta, Mamba 2, short convolution, linear attention


def make_row(*lengths: int, seed: int = 0) -> PackedTokens:
    rng = np.random.default_rng(seed)
    return pack([rng.integers(0, 40, length).astype(np.int32) for length in lengths])


def load(path: Path, dtype: str, *, gradient_checkpointing: bool = False) -> PolicyModel:
    config = ModelConfig(path=str(path), dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    return load_policy(config, temperature=1.0)


def gradients(model: PolicyModel) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("model_type", MIXERS)
def test_checkpointed_layers_are_recomputed_on_the_row_of_their_forward(model_type: str, tmp_path: Path) -> None:
    write_family(model_type, tmp_path)
    rows = [DeviceTokens.of(make_row(*lengths), torch.device("cpu")) for lengths in ((9, 30), (21, 20, 4))]
    plain = load(tmp_path, "float32")
    for row in rows:
        plain(row).logprobs.sum().backward()
    checkpointed = load(tmp_path, "float32", gradient_checkpointing=True)
    outputs = [checkpointed(row).logprobs.sum() for row in rows]
    torch.stack(outputs).sum().backward()
    expected = gradients(plain)
    for name, grad in gradients(checkpointed).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-5)


def test_a_layer_that_is_marked_like_its_mixer_is_none_itself() -> None:
    layer = nn.Module()
    layer.layer_type = "linear_attention"
    layer.norm, layer.mixer = nn.LayerNorm(4), nn.Module()
    layer.mixer.layer_type, layer.mixer.conv1d = "linear_attention", nn.Conv1d(4, 4, 3)
    assert mixers_of(nn.ModuleList([layer])) == [layer.mixer]


@torch.no_grad()
@pytest.mark.parametrize("model_type", MIXERS)
def test_a_pass_in_float32_computes_mixers_in_float32_too(model_type: str, tmp_path: Path) -> None:
    write_family(model_type, tmp_path)
    row = DeviceTokens.of(make_row(9, 30, 21), torch.device("cpu"))
    model = load(tmp_path, "bfloat16")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rounded, exact = model(row).logprobs, model(row, in_float32=True).logprobs
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    expected = model.float()(row).logprobs
    torch.testing.assert_close(exact, expected, rtol=0, atol=1e-5)
    assert (rounded - expected).abs().mean() > 1e-3


LENGTHS_OF_RANKS = ((30, 29), (30, 12, 5))  # one block, and three


def sequences_of(rank: int) -> list[np.ndarray]:
    return [np.arange(5, 5 + length, dtype=np.int32) for length in LENGTHS_OF_RANKS[rank]]


def pass_of_own_row(world: World, model: Path) -> np.ndarray:
    from rlhf.learner.policy import Learner

    config = make_config(
        model,
        model={"gradient_checkpointing": True},
        learner={"zero_stage": 3, "optimizer": {"lr": 0.0}},
        cluster={"device": "cpu", "learners": world.size},
    )
    learner = Learner(config, world)
    logprobs = learner.deepspeed(DeviceTokens.of(pack(sequences_of(world.rank)), learner.device)).logprobs
    learner.deepspeed.backward(logprobs.sum())
    return logprobs.detach().numpy()


@pytest.mark.slow
@pytest.mark.stack
def test_at_zero_3_ranks_with_different_numbers_of_blocks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    write_family("qwen3_5_text", tmp_path)
    model = load(tmp_path, "float32")
    for rank, logprobs in enumerate(run_world(pass_of_own_row, 2, tmp_path)):
        alone = [model(DeviceTokens.of(pack([x]), torch.device("cpu"))).logprobs for x in sequences_of(rank)]
        np.testing.assert_allclose(logprobs, torch.cat(alone).detach().numpy(), rtol=0, atol=1e-5)
