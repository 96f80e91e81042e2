"""Corrects a fault of vLLM's rotary positions on CPU; the plugin calls it in each of vLLM's processes."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
