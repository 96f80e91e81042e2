"""A fault of vLLM's rotary positions on CPU, mended in each of its processes by the plugin."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def rotate_heads_on_cpu() -> None:
    """vLLM's rotary kernel for CPU takes [tokens, heads x size]. Models that hand it [tokens, heads, size] get torch's.

    The kernel would turn one head of each token, and it by a wrong angle (LFM2, DeepSeek).
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotary: Any = RotaryEmbedding
    kernel = rotary.forward_cpu
    if kernel.__module__ == __name__:
        return

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        return (kernel if query.dim() == 2 else rotary.forward_native)(self, positions, query, key)

    rotary.forward_cpu = forward_cpu
