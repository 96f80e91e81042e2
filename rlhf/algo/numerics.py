"""Numerics that the losses share: an exponential that stays finite, masking, sums over the segments of a packed row."""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL_DEVICES = {"cuda"}  # types of devices on which `algo.kernels` computes
MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: a probability ratio beyond it is no longer a measurement


def bounded_exp(x: Tensor) -> Tensor:
    """exp(x) up to MAX_LOG_RATIO, the tangent line beyond: finite, monotone, value and gradient exact inside.

    Unlike a clamp, the tangent keeps a gradient of the right sign where a policy has drifted furthest.
    """
    return torch.exp(x.clamp(max=MAX_LOG_RATIO)) * (1 + torch.relu(x - MAX_LOG_RATIO))


def full_precision(x: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def has_kernels(x: Tensor) -> bool:
    """Whether kernels compute with this tensor; on other devices and in float64, torch does."""
    return x.device.type in KERNEL_DEVICES and x.dtype != torch.float64


def add_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """[rows, ...]: x[i] added to row index[i], in x's type; the same bits every time, unlike atomic additions."""
    if not len(x):
        return x.new_zeros(rows, *x.shape[1:])
    summed: Tensor = torch.ops.aten.embedding_dense_backward(x.flatten(1), index, rows, -1, False)
    return summed.view(rows, *x.shape[1:])


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """x where the mask is True and 0 elsewhere, in full precision; values elsewhere, NaN too, have no effect."""
    return torch.where(mask, full_precision(x), 0.0)


def segment_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """[T] int64: the segment that each of `length` packed tokens belongs to; cu_seqlens [S+1] starts at 0."""
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


def segment_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S] int64: True tokens of mask [T] in each segment."""
    running = torch.nn.functional.pad(mask.long().cumsum(0), (1, 0))
    return running[cu_seqlens.long()].diff()


def segment_sums(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[S, ...]: sums of x [T, ...] over each segment, in a fixed order (no atomics), 0 for an empty one."""
    return torch.segment_reduce(x, "sum", offsets=cu_seqlens.long(), initial=0.0)


def segment_means(x: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] for each token the mean of x [T] over the True tokens of its segment; x must be 0 outside of the mask."""
    means = segment_sums(x, cu_seqlens) / segment_counts(mask, cu_seqlens).clamp(min=1)
    return means[segment_ids(cu_seqlens, len(x))]
