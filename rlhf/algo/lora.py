"""Low-rank adapters of linear layers (LoRA, arXiv:2106.09685): y = W x + s B A x, W frozen, and B = 0 at the start.

The product is added in the forward pass and never to W: in bfloat16 a small change of a weight would be rounded away.
There is no dropout, since ratios of probabilities have to be exact.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.algo.layer_names import ALL_LINEAR, is_adapted, is_named, last_parts

A, B = "lora_A", "lora_B"  # the parameters of an adapter: names in the model, and in peft's format


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: `lora_A` [r, in] and `lora_B` [out, r], of the type of the frozen weight.

    `scale`: s, alpha / r. With `adapts` False, the layer computes as it was loaded, bit for bit.
    """

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, seed: int) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate another weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scale, self.adapts = scale, True
        # The bounds are those of a new nn.Linear.
        start = torch.rand(rank, self.in_features, generator=torch.Generator().manual_seed(seed))
        start = (2 * start - 1) / math.sqrt(self.in_features)
        self.lora_A = nn.Parameter(start.to(base.weight.device, base.weight.dtype))
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(self.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + F.linear(F.linear(x, self.lora_A) * self.scale, self.lora_B) if self.adapts else y


def linear_names(model: Any, *, targets: str | Collection[str], exclude: Collection[str]) -> list[str]:
    """The linear layers that get an adapter, by name; an entry matches the last parts of a name.

    Args:
        model: of transformers, with its head, which never gets one: the fused head reads its weight alone.
        targets: `all-linear`, or such entries as `q_proj` and `layers.0.mlp.up_proj`.
        exclude: entries of layers without an adapter.

    Raises:
        ValueError: the model has experts, or an entry matches no layer.
    """
    for name, module in model.named_modules():
        if "Experts" in type(module).__name__ or name.endswith(".experts"):
            raise ValueError(
                f"model.lora: {name} holds the experts of a mixture, and adapters of such models are not supported. "
                "Train all weights (model.lora=null), or use a dense model."
            )
    head = model.get_output_embeddings()
    linears = [n for n, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    for key, entries in (("targets", () if targets == ALL_LINEAR else targets), ("exclude", exclude)):
        for entry in entries:
            if not any(is_named(layer, entry) for layer in linears):
                raise ValueError(
                    f"model.lora.{key}={entry}: no linear layer of the model has this name (the head has no adapter: a "
                    f"fused kernel reads its weight alone). It has {', '.join(last_parts(linears))}."
                )
    if names := [layer for layer in linears if is_adapted(layer, targets=targets, exclude=exclude)]:
        return names
    raise ValueError("model.lora.exclude: it leaves no layer to train. Remove entries from it.")


def adapt(model: nn.Module, names: Collection[str], *, rank: int, scale: float, seed: int = 0) -> None:
    """Freeze the model, and give the layers of these names adapters, which are all that is trained.

    Each A is drawn by the seed and the name of its layer, in whatever order, so every rank draws the same.
    """
    model.requires_grad_(False)
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        model.set_submodule(
            name, AdaptedLinear(layer, rank=rank, scale=scale, seed=zlib.crc32(f"{seed}/{name}".encode()))
        )


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, AdaptedLinear) for module in model.modules())


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was loaded."""
    layers = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True
