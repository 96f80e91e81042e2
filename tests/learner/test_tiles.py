"""Tiled checkpointing: the numbers of one pass over all tokens, without an MLP's intermediates of more than a tile."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from worlds import pack_rows, rollout_of

from rlhf.algo.lora import adapt
from rlhf.learner import tiles
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer
from tools.model_families import make_family

TILE, LENGTHS = 16, (40, 12, 30)
FIRST = {"phi3": "gate_up_proj"}  # the first linear layer of an MLP, where it is not gate_proj
ADAPTED = [f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("gate_proj", "up_proj", "down_proj")]


def update(transformer: Any, checkpointing: Any, *, first: str) -> tuple[list[Any], int, int]:
    """Log-probs and gradients of a row; its products; the most tokens of which a layer's MLP held intermediates."""
    model = copy.deepcopy(transformer)
    model.set_attn_implementation(PACKED)
    prepare_transformer(model, gradient_checkpointing=checkpointing)
    held: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def count(_: Any, __: Any, out: torch.Tensor) -> None:
        nonlocal most
        held.append(weakref.ref(out))
        most = max(most, sum(math.prod(x.shape[:-1]) for ref in held if (x := ref()) is not None))

    for mlp in tiles.dense_mlps(model):
        mlp.get_submodule(first).register_forward_hook(count)
    rng = np.random.default_rng(0)
    rollouts = [rollout_of(rng.integers(3, 90, n).astype(np.int32), np.arange(n) > 3) for n in LENGTHS]
    tokens = DeviceTokens.of(pack_rows(rollouts, range(3)), torch.device("cpu"))
    policy, counter = PolicyModel(model, temperature=1.0), FlopCounterMode(display=False)
    with counter:
        logprobs = policy(tokens).logprobs
        logprobs.sum().backward()
    with torch.no_grad():
        assert torch.equal(policy(tokens).logprobs, logprobs)  # the old policy's: the first ratio is 1
    gradients = [param.grad for param in model.parameters() if param.requires_grad]
    return [logprobs.detach(), *gradients], counter.get_total_flops(), most


@pytest.mark.parametrize("family", ["qwen2, adapters", "phi3", "deepseek_v2"])
def test_logprobs_and_gradients_are_those_of_one_pass_and_only_one_tile_is_held(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "MLP_TILE", {"cpu": TILE})
    transformer: Any = make_family(family.split(",")[0], num_hidden_layers=2).double()
    transformer.config._experts_implementation = "eager"  # torch groups no products in float64
    if "adapters" in family:
        adapt(transformer, ADAPTED, rank=4, scale=2.0)
        for name, param in transformer.named_parameters():
            if name.endswith("lora_B"):
                torch.nn.init.normal_(param, std=0.1)
    first = FIRST.get(family, "gate_proj")
    off, full, tiled = (update(transformer, kind, first=first) for kind in (False, True, "tiled"))
    for ours, expected in zip(tiled[0], off[0], strict=True):
        assert (ours is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12 * max(1.0, float(expected.abs().max())))
    assert tiled[2] == TILE < full[2] <= off[2]
    if family != "deepseek_v2":  # what follows its shared experts keeps their output
        assert tiled[1] == full[1]


def test_a_model_without_a_dense_mlp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model\.gradient_checkpointing=tiled: MixtralForCausalLM has no dense MLP"):
        prepare_transformer(make_family("mixtral"), gradient_checkpointing="tiled")
