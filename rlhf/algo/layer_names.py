"""Names of layers, as `model.lora` selects them; importable without torch."""

from __future__ import annotations

from collections.abc import Collection

ALL_LINEAR = "all-linear"


def is_named(layer: str, entry: str) -> bool:
    """Whether a layer's name ends with an entry, such as `up_proj` or `layers.0.mlp.up_proj`."""
    return f".{layer}".endswith(f".{entry}")


def is_adapted(layer: str, *, targets: str | Collection[str], exclude: Collection[str]) -> bool:
    """Whether a linear layer other than the head gets an adapter."""
    chosen = targets == ALL_LINEAR or any(is_named(layer, entry) for entry in targets)
    return chosen and not any(is_named(layer, entry) for entry in exclude)


def last_parts(layers: Collection[str]) -> list[str]:
    """The last parts of the names, such as `q_proj`, in alphabetic order and without duplicates."""
    return sorted({layer.rpartition(".")[2] for layer in layers})
