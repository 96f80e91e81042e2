"""Selective gradient checkpointing: outputs of matrix products and of attention are kept, the rest is recomputed.

Norms, rotary positions, activations and sums are cheap to compute again, and are half of what a layer would keep. The
method is that of torch's `create_selective_checkpoint_contexts`, which does not fit ZeRO-3: there a layer gathers its
weights by other operations when it is recomputed, and a bias is added to a product in place, unseen by torch. So only
the kept operations are matched here, and an output that is written to afterwards is not kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen  # noqa: F401  # registers the operation of variable-length attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from rlhf.learner.segments import checkpoint_contexts

# Without batched products (bmm): most are scores of attention, which grow with the square of the length.
KEPT = frozenset((
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
))  # fmt: skip


class _Layer:
    """The kept operations of one layer's forward, in their order, each with its outputs; None: to be computed again."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, Any] | None] = []
        self.places: dict[int, int] = {}  # storage of an output -> its place in `outputs`


class _Mode(TorchDispatchMode):
    def __init__(self, layer: _Layer) -> None:
        super().__init__()
        self.layer = layer

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions, such as flex attention, stay compiled, and are recomputed


class _Keep(_Mode):
    """Active in the forward of a layer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, layer = kwargs or {}, self.layer
        out = func(*args, **kwargs)
        if func in KEPT:
            kept = tree_map_only(Tensor, Tensor.detach, out)
            layer.places |= {storage: len(layer.outputs) for storage in _storages(kept)}
            layer.outputs.append((func, kept))
        elif func._schema.is_mutable:
            for storage in _storages(_written(func, args, kwargs)):
                if (place := layer.places.pop(storage, None)) is not None:
                    layer.outputs[place] = None
        return out


class _Reuse(_Mode):
    """Active in the recomputation of a layer."""

    def __enter__(self) -> Any:
        self.place = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            place, self.place = self.place, self.place + 1
            entry, self.layer.outputs[place] = self.layer.outputs[place], None
            if entry is not None:
                assert entry[0] is func, f"the recomputation calls {func} where the forward called {entry[0]}"
                return entry[1]
        return func(*args, **(kwargs or {}))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation changes."""
    arguments = func._schema.arguments
    written = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [value for name, value in by_name.items() if name in written]


def _storages(tensors: Any) -> list[int]:
    return [x.untyped_storage()._cdata for x in tree_leaves(tensors) if isinstance(x, Tensor)]


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of selective gradient checkpointing."""
    _, of_row = checkpoint_contexts()
    layer = _Layer()
    return _Keep(layer), _both(of_row, _Reuse(layer))


@contextlib.contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield
