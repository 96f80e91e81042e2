"""A model's tensors in the format of its checkpoints on the hub, which is what vLLM's loaders read.

transformers renames some tensors and stacks a layer's experts when it loads a model, and undoes that when it saves one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rlhf.learner.rank_checkpoint import save_tensors

FILE_BYTES = 5 * 10**9  # the size at which the hub's own tools begin another file
INDEX = "model.safetensors.index.json"


def state_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, such as a router's balancing bias: part of the model, without gradient."""
    stored = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def hub_tensors(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The hub's tensors for one of the model: several where transformers stacked them; always in the same order."""
    yield from revert_weight_conversion(transformer, {name: tensor}).items()


def hub_shapes(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """As `hub_tensors`, on the meta device; at ZeRO-3 the tensor need not be gathered."""
    shape = getattr(tensor, "ds_shape", tensor.shape)
    yield from hub_tensors(transformer, name, torch.empty(shape, dtype=tensor.dtype, device="meta"))


def model_tensors(transformer: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of the model: parameters, then the buffers that are stored with them."""
    return {**dict(transformer.named_parameters()), **state_buffers(transformer)}


def empty_model(folder: Path, *, dtype: str, trust_remote_code: bool, scalar: bool = False) -> PreTrainedModel:
    """The model that a config.json describes, on the meta device.

    Args:
        scalar: it gives one number per token, not logits.

    Raises:
        ValueError: the model needs code of its own, and that code is not trusted.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)


class HubWriter:
    """Writes a model folder in Hugging Face format, file by file: no more than one file is in memory."""

    def __init__(self, folder: Path, transformer: PreTrainedModel) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("model*.safetensors"), folder / INDEX):
            old.unlink(missing_ok=True)
        self._folder, self._transformer = folder, transformer
        self._held: dict[str, Tensor] = {}  # of the next file
        self._files: list[list[str]] = []  # names in each written file
        self._bytes = 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Take a whole tensor of the model, under the names of the hub."""
        for hub_name, part in hub_tensors(self._transformer, name, tensor.detach()):
            if self._held and sum(held.nbytes for held in self._held.values()) + part.nbytes > FILE_BYTES:
                self._write_file()
            self._held[hub_name] = part.contiguous().to("cpu", copy=True)

    def finish(self) -> None:
        self._write_file()
        last = len(self._files)
        names = [f"model-{n:05d}-of-{last:05d}.safetensors" for n in range(1, last + 1)]
        names = names if last > 1 else ["model.safetensors"]
        for number, name in enumerate(names):
            (self._folder / f"model-{number}.safetensors").rename(self._folder / name)
        if last > 1:
            weight_map = {tensor: file for file, held in zip(names, self._files, strict=True) for tensor in held}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2))

    def _write_file(self) -> None:
        save_tensors(self._folder / f"model-{len(self._files)}.safetensors", self._held)
        self._files.append(list(self._held))
        self._bytes += sum(tensor.nbytes for tensor in self._held.values())
        self._held = {}


def write_model_config(folder: Path, transformer: PreTrainedModel) -> None:
    """config.json, generation_config.json, and the code of a model that came with its own."""
    config = transformer.config
    names = config.architectures or []
    own = type(transformer).__name__
    if [name.lower() for name in names] != [own.lower()]:  # vLLM knows Phi 3.5 MoE only in the hub's spelling
        config.architectures = [own]
    config.dtype = str(transformer.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    if transformer.is_remote_code():
        custom_object_save(transformer, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if transformer.can_generate():
        transformer.generation_config.save_pretrained(folder)
