"""Tiled gradient checkpointing: dense MLPs are computed tile by tile of tokens, in forward and in recomputation.

A layer then never holds its MLP's intermediates, four numbers per token and inner dimension, for more than one tile. In
most families no product is computed more often than with full checkpointing: the recomputation of a layer ends where
its MLP begins, and each tile is recomputed when its gradient is needed. Where a norm follows the MLP, as in Gemma 2,
the recomputation of the layer goes through the MLP too, once more. Autograd adds up the gradients of a weight over the
tiles, in the model's type, before any hook of DeepSpeed sees them.

DeepSpeed's `TiledMLP` has the same gradients at every ZeRO stage, but is not used: it computes each product of an MLP
three times before the backward pass, where here the last product is computed once and the others twice. By the account
of `benchmarks/roofline.py` a 7B update takes 3% longer than with full checkpointing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlhf.algo.numerics import has_kernels
from rlhf.algo.sizes import MLP_TILE


def dense_mlps(model: nn.Module) -> list[nn.Module]:
    """The MLPs that every token passes, shared experts among them; ValueError if the model has none of a known form."""

    def is_dense(module: nn.Module) -> bool:
        linear = {name for name, child in module.named_children() if isinstance(child, nn.Linear)}
        takes_one = len(inspect.signature(type(module).forward).parameters) == 2
        return takes_one and "down_proj" in linear and not linear.isdisjoint(("up_proj", "gate_up_proj"))

    if mlps := [module for module in model.modules() if is_dense(module)]:
        return mlps
    raise ValueError(
        f"model.gradient_checkpointing=tiled: {type(model).__name__} has no dense MLP with linear layers up_proj (or "
        "gate_up_proj) and down_proj; experts are not tiled. Set it to true."
    )


def compute_in_tiles(model: nn.Module) -> None:
    """Let the dense MLPs of a model compute tile by tile; ValueError if it has none."""
    from deepspeed.utils import set_z3_leaf_module

    for mlp in dense_mlps(model):
        mlp.forward = functools.partial(_in_tiles, mlp.forward)
        # At ZeRO-3 ranks have different numbers of tiles: gathers inside the tiles would wait for each other forever.
        set_z3_leaf_module(mlp, True)


def _in_tiles(mlp: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """mlp(x) of x [..., tokens, H]; with a gradient, tiles are computed again in the backward pass."""
    size = MLP_TILE["cuda" if has_kernels(x) else "cpu"]
    if x.shape[-2] <= size:
        return mlp(x)
    if not torch.is_grad_enabled():
        return torch.cat([mlp(tile) for tile in x.split(size, -2)], -2)
    saved: Any = _Saved.apply(x, torch.empty(0, requires_grad=True)).grad_fn
    tiles = list(x.split(size, -2))

    def compute(number: int) -> Tensor:
        if not tiles:  # in the backward pass; what is saved can be read only once
            tiles.extend(saved.saved_tensors[0].split(size, -2))
        return mlp(tiles[number])

    numbers = range(len(tiles))
    outputs = [checkpoint(compute, n, use_reentrant=False, preserve_rng_state=False) for n in numbers]
    tiles.clear()  # under the checkpoint of the layer, nothing may keep its inner states
    return torch.cat(outputs, -2)


class _Saved(torch.autograd.Function):
    """Saves x before any tile is computed: it is the last tensor that the recomputation of most layers has to reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise AssertionError("no output depends on it")
