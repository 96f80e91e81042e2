"""Corrections of vLLM's kernels on CPU; the plugin makes them in each of vLLM's processes, more than once in some.

A run with `run.deterministic` needs an engine that computes each row to the same bits, whatever else is in the batch.
Measured on AVX-512 with the kernels of vLLM 0.32, in float32 and bfloat16:

    matrix products   on one thread, oneDNN rounds a row equally in every batch, except a single float32 row, which goes
                      to another kernel; with more threads the batch decides how the work is divided
    attention         equal for a row if its keys are not split over threads; in long sequences it also depends on how
                      many rows of the sequence are computed at once, so prompts must be computed whole, once
    everything else   works row by row

Other machines and models are not trusted: the canary compares a sequence that was sampled alone and with others.
"""

from __future__ import annotations

import os
from typing import Any

import torch.nn.functional as F
from torch import Tensor

# The environment of an engine's processes whose rows are equal. The plugin reads the first variable in each process.
EQUAL_ROWS = {
    "RLHF_EQUAL_ROWS": "1",
    "VLLM_CPU_ATTN_SPLIT_KV": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM sets the number of threads by the cores of the machine
    "OMP_NUM_THREADS": "1",
}
FEW_ROWS = 64  # torch rounds products of 1 to 3 float32 rows in another way than those of more, on one thread


def round_rows_alike() -> None:
    """In the processes of an engine with EQUAL_ROWS, multiply a single row as one of two equal rows."""
    from vllm import _custom_ops as ops

    module: Any = ops
    product = module.onednn_mm
    if "RLHF_EQUAL_ROWS" not in os.environ or product.__module__ == __name__:
        return

    def onednn_mm(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.numel() != x.shape[-1]:
            return product(handler, x, bias)
        return product(handler, x.reshape(1, -1).repeat(2, 1), bias)[:1].reshape(*x.shape[:-1], -1)

    module.onednn_mm = onednn_mm


def rotate_heads_on_cpu() -> None:
    """vLLM's rotary kernel for CPU takes [tokens, heads x size]. Models that pass [tokens, heads, size] get torch's.

    For these models (LFM2, DeepSeek) the kernel would rotate only one head of each token, and by a wrong angle.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary: Any = RotaryEmbedding
    kernel = rotary.forward_cpu
    if kernel.__module__ == __name__:
        return

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (kernel if query.dim() == 2 else rotary.forward_native)(self, positions, query, key)

    rotary.forward_cpu = forward_cpu


def add_adapter_in_two_products() -> None:
    """vLLM's own operation for CPU gathers B for each token: an engine with an adapter was five times slower.

    It would also give the adapter to requests that have none, if others in the batch have it. There is one slot here.
    """
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    wrapper: Any = PunicaWrapperCPU
    if wrapper.add_lora_linear.__module__ == __name__:
        return

    def add_lora_linear(
        self: Any, y: Tensor, x: Tensor, a_of_slices: Any, b_of_slices: Any, scale: float, sizes: Any, **_: Any
    ) -> None:
        rows, y_rows = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        adapted = self.token_lora_indices[: len(rows), None] >= 0
        start = 0
        for a, b, size in zip(a_of_slices, b_of_slices, sizes, strict=True):
            inner = _product(rows, a[0, 0]) * (adapted * scale)
            y_rows[:, start : start + size] += _product(inner.to(x.dtype), b[0, 0])
            start += size

    wrapper.add_lora_linear = add_lora_linear


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T [T, out]; with EQUAL_ROWS a few rows are computed as some of FEW_ROWS."""
    if "RLHF_EQUAL_ROWS" in os.environ and len(x) < FEW_ROWS:
        return (F.pad(x, (0, 0, 0, FEW_ROWS - len(x))) @ weight.T)[: len(x)]
    return x @ weight.T
