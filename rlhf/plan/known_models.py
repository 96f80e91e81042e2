"""Sizes of the models that configs/ names, so that their plans need no download.

They are those of each model's config.json on the hub, which is read instead wherever it is on this machine.
"""

from __future__ import annotations

from typing import Any

SIZES = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
MODELS = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-0.5B-Instruct": ("qwen2", 896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 131072),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 131072),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 4096),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 131072),
    "Qwen/Qwen3-8B-Base": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 32768),
    "allenai/Llama-3.1-Tulu-3-8B-DPO": ("llama", 4096, 14336, 32, 32, 8, 128264, False, 131072),
}


def known_model(name: str) -> dict[str, Any] | None:
    """The sizes of a hub model, by the keys of its config.json; None if the table lacks it."""
    return dict(zip(SIZES, MODELS[name], strict=True)) if name in MODELS else None
