"""What gradient checkpointing keeps of a layer's forward, beside its input, and what it computes again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from rlhf.learner.segments import same_row

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # of the forward, of computing it again

# Norms, rotary positions, activations and sums move few bytes; these take nearly all of a layer's time.
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
_KEPT = {getattr(torch.ops.aten, name).default for name in (*_PRODUCTS, *_ATTENTION)}


def everything_again() -> Contexts:
    """The `context_fn` that keeps nothing: layers are computed again on the row of their forward."""
    return contextlib.nullcontext(), same_row()


def all_but_products() -> Contexts:
    """The `context_fn` that keeps what matrix products and attention give."""
    keeps, again = create_selective_checkpoint_contexts(_choose)
    return keeps, _both(same_row(), again)


def _choose(_: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operation in _KEPT or operation.name() == "torch_attn::_varlen_attn"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextlib.contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
