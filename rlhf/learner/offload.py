"""Optimizer state in host memory while an engine uses the GPU, and back.

DeepSpeed 0.19.8 has `offload_states`. At ZeRO-3 it works only with DeepSpeed's own FusedAdam, at ZeRO-1 and 2 a
checkpoint cannot read the moments by parameter after a reload, and other optimizers lack it. Here only the memory of a
tensor changes, so code that holds the tensor need not know. A checkpoint can be written from host memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Offload:
    """Tensors that are moved to host memory and back; torch keeps freed page-locked memory for the next time."""

    def __init__(self) -> None:
        self._moved: list[Tensor] = []
        self._emptied: list[Tensor] = []
        self._home = torch.device("cpu")

    @property
    def away(self) -> bool:
        return bool(self._moved)

    @property
    def bytes_away(self) -> int:
        """Bytes that `come_back` will take on the device."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in self._moved}
        return sum(storages.values()) + sum(tensor.nbytes for tensor in self._emptied)

    def leave(self, tensors: Iterable[Tensor], empty: Iterable[Tensor], device: torch.device) -> None:
        """Move the tensors that are on `device` to host memory, and free the memory of `empty`, without a copy."""
        assert not self.away, "the tensors are in host memory already"
        self._home = device
        self._moved = [tensor for tensor in tensors if tensor.device == device and tensor.numel()]
        self._emptied = [tensor for tensor in empty if tensor.device == device]
        pin = device.type == "cuda"
        _change_memory(self._moved, lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=pin))
        for tensor in self._emptied:
            tensor.untyped_storage().resize_(0)

    def come_back(self) -> None:
        """Undo `leave`, if it was called; emptied tensors are 0."""
        _change_memory(self._moved, lambda size: torch.empty(size, dtype=torch.uint8, device=self._home))
        for tensor in self._emptied:
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.zero_()
        self._moved, self._emptied = [], []


def _change_memory(tensors: list[Tensor], new: Callable[[int], Tensor]) -> None:
    """Give tensors `new` memory [bytes] uint8 with the same content; tensors that shared memory still share it."""
    old = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    copies = {}
    for address, storage in old.items():
        copies[address] = new(storage.nbytes())
        copies[address].copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    for tensor in tensors:
        flat = copies[tensor.untyped_storage().data_ptr()].view(tensor.dtype)
        tensor.data = flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def optimizer_tensors(deepspeed: Any, params: Iterable[nn.Parameter]) -> list[Tensor]:
    """Master weights and moments of a rank, and their parts that DeepSpeed keeps for each parameter."""
    params = list(params)
    model = {id(param) for param in params}
    wrapper = deepspeed.optimizer
    adam = getattr(wrapper, "optimizer", wrapper)
    masters = [param for group in adam.param_groups for param in group["params"] if id(param) not in model]
    if deepspeed.zero_optimization_stage() == 3:
        masters = list(wrapper.fp32_partitioned_groups_flat)
    tensors = masters + [x for state in adam.state.values() for x in state.values() if isinstance(x, Tensor)]
    for param in params:
        if hasattr(param, "_hp_mapping") and param._hp_mapping is not None:
            mapping: Any = param._hp_mapping
            tensors += [mapping.hp_fragment, *(mapping.optim_fragment or {}).values()]
    return tensors


def gradient_buffers(deepspeed: Any) -> list[Tensor]:
    """Gradients that DeepSpeed keeps allocated between steps; every step first overwrites them or sets them to 0."""
    if deepspeed.zero_optimization_stage() == 3:
        return [deepspeed.optimizer.grad_partitions_flat_buffer]
    if hasattr(deepspeed.optimizer, "fp32_groups_gradients_flat"):  # ZeRO-1 in bfloat16
        return list(deepspeed.optimizer.fp32_groups_gradients_flat)
    return []
