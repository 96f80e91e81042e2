"""An adapter in peft's format, on its way from the learner into the one LoRA slot of every engine.

    learner rank 0                                   engine actor i                    each of its vLLM workers
    --------------                                   --------------                    ------------------------
    client.load_adapter(bytes, v)     ----->         a new folder, add_lora    ----->  slot := the adapter
                                                     adapter_problem           ----->  does the slot hold exactly it?
                                                     version := v

The base is never sent: both sides have loaded it, and neither changes it. An adapter is small next to it and goes
through Ray, whatever the device. A new one has a new name, because vLLM's prefix cache knows adapters by name and path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rlhf.algo.layer_names import last_parts
from rlhf.algo.lora import B
from rlhf.config.sections import LoraConfig
from rlhf.weights.client import EngineClient

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def peft_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.lora_A -> its name in a file of peft."""
    return f"{PREFIX}{name}.weight"


def layer_name(peft_name: str) -> str:
    """The layer to which a tensor of such a file belongs."""
    return peft_name.removeprefix(PREFIX).rpartition(".lora_")[0]


def peft_config(layers: Iterable[str], *, rank: int, alpha: int, base: str | None = None) -> str:
    """adapter_config.json; layers are named in full, since only some with the same last part may be trained."""
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": alpha,
        "target_modules": sorted(set(layers)), "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip
    return json.dumps(values, indent=2)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], lora: LoraConfig, *, base: str) -> str:
    """Write an adapter for peft; `tensors` by their names in the model. Returns a warning, or ""."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {peft_name(name): tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    (folder / WEIGHTS).write_bytes(save(stored, {"format": "pt"}))
    text = peft_config(map(layer_name, stored), rank=lora.rank, alpha=lora.alpha, base=base)
    (folder / CONFIG).write_text(text)
    return not_finite_warning(
        {name: count for n, t in stored.items() for name, count in count_not_finite(n, t).items()}
    )


def count_not_finite(name: str, tensor: Tensor) -> dict[str, int]:
    """The number of values of a tensor that are not finite, by its name; empty if there are none."""
    if not tensor.is_floating_point() or tensor.isfinite().all():
        return {}
    return {name: tensor.numel() - int(tensor.isfinite().sum())}


def not_finite_warning(counts: Mapping[str, int]) -> str:
    """A warning about non-finite weights; empty without any. `counts`: tensor -> number of such values."""
    if not counts:
        return ""
    first, values = next(iter(counts)), sum(counts.values())
    return (
        f"{values:,} values in {len(counts)} tensors of the model that was written are NaN or infinite, the first in "
        f"{first} ({counts[first]:,} values): it computes nothing of use. Export an earlier checkpoint."
    )


def slot_arguments(lora: LoraConfig, layers: Sequence[str]) -> dict[str, Any]:
    """The arguments of an engine with a slot for an adapter of these layers.

    vLLM wraps layers by the last part of their names. It would wrap the head too, which the learner never adapts.
    """
    return {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": lora.slot_rank,
        "lora_target_modules": last_parts(layers),
    }  # fmt: skip


def write_for_engine(folder: Path, file: bytes, layers: Sequence[str], lora: LoraConfig) -> None:
    """Write the file of `AdapterSender`, which has multiplied B by alpha / rank: the slot then holds the same bits."""
    partial = folder.with_name(f"{folder.name}.partial")
    partial.mkdir()
    (partial / WEIGHTS).write_bytes(file)
    (partial / CONFIG).write_text(peft_config(layers, rank=lora.rank, alpha=lora.rank))
    partial.rename(folder)


class AdapterSender:
    """The learner's end. Only rank 0 sends; the others take part in gathering.

    `tensors`: yields the whole tensors of the adapter by their names in the model; iterating may be a collective.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterator[tuple[str, Tensor]]],
        client: EngineClient,
        lora: LoraConfig,
        *,
        rank: int,
    ) -> None:
        self._tensors, self._client, self._scale, self._is_sender = tensors, client, lora.scale, rank == 0

    def send(self, version: int) -> None:
        """Send the adapter as `version`. Called on every learner rank."""
        if torch.accelerator.is_available():  # DeepSpeed's step ends in an all-gather that may still run
            torch.accelerator.synchronize()
        stored = {}
        for name, tensor in self._tensors():
            if self._is_sender:
                scaled = tensor.detach() * (self._scale if name.endswith(B) else 1)
                stored[peft_name(name)] = scaled.cpu()
        if self._is_sender:
            self._client.load_adapter(save(stored), str(version))

    def close(self) -> None:
        pass
