"""Names of layers, as `model.lora` selects them; importable without torch."""

from __future__ import annotations

from collections.abc import Collection

ALL_LINEAR = "all-linear"


def is_named(layer: str, entry: str) -> bool:
    """Whether an entry, such as `up_proj` or `layers.0.mlp.up_proj`, gives the last parts of a layer's name."""
    return f".{layer}".endswith(f".{entry}")


def is_adapted(layer: str, *, targets: str | Collection[str], exclude: Collection[str]) -> bool:
    """Whether a linear layer, which is not the head, gets an adapter."""
    chosen = targets == ALL_LINEAR or any(is_named(layer, entry) for entry in targets)
    return chosen and not any(is_named(layer, entry) for entry in exclude)


def last_parts(layers: Collection[str]) -> list[str]:
    """Each once, in alphabetic order: `q_proj`."""
    return sorted({layer.rpartition(".")[2] for layer in layers})
