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

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.learner.segments import checkpoint_contexts

# Without batched products (bmm): most are scores of attention, which grow with the square of the length.
KEPT = frozenset((
    "aten::mm", "aten::addmm", "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
))  # fmt: skip


class _Mode(TorchDispatchMode):
    """`outputs`: the kept operations of a layer's forward, in order: (operation, outputs); None: compute it again."""

    def __init__(self, outputs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.outputs = outputs
        self.places: dict[int, int] = {}  # storage of an output -> its index in `outputs`

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions, such as flex attention, stay compiled, and are recomputed


class _Keep(_Mode):
    """Active in the forward of a layer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.name() in KEPT:
            kept = tuple(map(_detached, out)) if isinstance(out, tuple) else _detached(out)
            self.places |= {storage: len(self.outputs) for storage in _storages(kept)}
            self.outputs.append((func, kept))
        elif func._schema.is_mutable:
            for storage in _storages(_written_arguments(func, args, kwargs)):
                if (place := self.places.pop(storage, None)) is not None:
                    self.outputs[place] = self.outputs[place][0], None
        return out


class _Reuse(_Mode):
    """Active in the recomputation of a layer."""

    place = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in KEPT:
            place, self.place = self.place, self.place + 1
            called, kept = self.outputs[place] if place < len(self.outputs) else (None, None)
            assert called is func, f"the recomputation calls {func} where the forward called {called}"
            self.outputs[place] = called, None  # its memory is free as soon as it is used
            if kept is not None:
                return kept
        return func(*args, **(kwargs or {}))


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _written_arguments(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments that an operation changes; of a list of tensors each."""
    arguments = func._schema.arguments
    written = {x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write}
    by_name = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    changed = [value for name, value in by_name.items() if name in written]
    return tuple(x for value in changed for x in (value if isinstance(value, list | tuple) else (value,)))


def _storages(tensors: Any) -> list[int]:
    """A number for the memory of each; torch keeps one object for it as long as it is in use."""
    each = tensors if isinstance(tensors, tuple) else (tensors,)
    return [id(x.untyped_storage()) for x in each if isinstance(x, Tensor)]


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of selective gradient checkpointing."""
    _, of_row = checkpoint_contexts()
    outputs: list[tuple[Any, Any]] = []
    return _Keep(outputs), _both(of_row, _Reuse(outputs))


@contextlib.contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield
