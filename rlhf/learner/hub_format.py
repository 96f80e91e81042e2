"""A model's tensors in the format of its checkpoints on the hub, which is what vLLM's loaders read.

transformers renames some tensors and stacks a layer's experts when it loads a model, and undoes that when it saves one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from rlhf.learner.checkpoint import layout, pieces

FILE_BYTES = 5 * 10**9  # the size at which the hub's own tools begin another file


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


def empty_model(folder: Path, *, dtype: str, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a config.json describes, on the meta device.

    Raises:
        ValueError: the model needs code of its own, and that code is not trusted.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        )


class HubWriter:
    """Writes a model folder in Hugging Face format, tensor by tensor: no more than one tensor is in memory.

    Args:
        tensors: of the model, real or on the meta device, as the files will hold them.
    """

    def __init__(self, folder: Path, transformer: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("model*.safetensors"), folder / "model.safetensors.index.json"):
            old.unlink(missing_ok=True)
        self._folder, self._transformer = folder, transformer
        files: list[list[tuple[str, torch.dtype, torch.Size]]] = [[]]
        size = total = 0
        for name, tensor in tensors:
            for hub_name, like in hub_shapes(transformer, name, tensor):
                if files[-1] and size + like.nbytes > FILE_BYTES:
                    files.append([])
                    size = 0
                files[-1].append((hub_name, like.dtype, like.shape))
                size, total = size + like.nbytes, total + like.nbytes
        self._places: dict[str, tuple[str, int]] = {}  # file and offset of each tensor
        for number, entries in enumerate(files, start=1):
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            head, places = layout(entries, {"format": "pt"})
            (folder / file).write_bytes(head)
            self._places |= {name: (file, place) for name, place in places.items()}
        if len(files) > 1:
            weight_map = {name: file for name, (file, _) in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a whole tensor of the model, under the names of the hub."""
        for hub_name, part in hub_tensors(self._transformer, name, tensor.detach()):
            file, place = self._places.pop(hub_name)
            with (self._folder / file).open("r+b") as stream:
                stream.seek(place)
                for piece in pieces(part):
                    stream.write(piece)

    def finish(self) -> None:
        assert not self._places, f"not written: {next(iter(self._places))}"


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
