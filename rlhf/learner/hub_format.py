"""A model's tensors in the format of its checkpoints on the hub, which is what vLLM's loaders read.

transformers renames some tensors and stacks a layer's experts when it loads a model, and undoes that when it saves one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def state_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, such as the bias that balances a router: no gradient, but part of it."""
    stored = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def hub_tensors(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What the hub has for a tensor of the model: several where transformers stacked them; always in the same order."""
    yield from revert_weight_conversion(transformer, {name: tensor}).items()


def hub_shapes(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same on the meta device; at ZeRO-3 the tensor need not be gathered."""
    shape = getattr(tensor, "ds_shape", tensor.shape)
    yield from hub_tensors(transformer, name, torch.empty(shape, dtype=tensor.dtype, device="meta"))
