"""A model's tensors in the format of its checkpoints on the hub, which vLLM's loaders read.

transformers renames some tensors and stacks a layer's experts when it loads a model, and undoes that when it saves one.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from rlhf.config.base import error_text
from rlhf.config.model_folder import INDEX, local_model_folder, tensor_shapes, weight_files
from rlhf.config.sections import ModelConfig
from rlhf.learner.loading import check_report, load
from rlhf.learner.partition import whole_shape
from rlhf.learner.rank_checkpoint import save_tensors
from rlhf.learner.text_model import drop_encoders, language_model, wraps_text_model
from rlhf.weights.adapter import count_not_finite, not_finite_warning

FILE_BYTES = 5 * 10**9  # the size at which the hub's own tools begin another file


def state_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, such as a router's balancing bias: part of the model, without gradient."""
    stored = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in stored}


def hub_tensors(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The hub's tensors for one tensor of the model: several if transformers stacked them; always in the same order."""
    yield from revert_weight_conversion(transformer, {name: tensor}).items()


def hub_shapes(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """As `hub_tensors`, on the meta device; at ZeRO-3 the tensor need not be gathered."""
    yield from hub_tensors(transformer, name, torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta"))


def hub_ranges(transformer: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The elements [first, stop) of the flattened tensor that each of `hub_tensors` consists of, in its order.

    To find them, the elements are numbered and converted; two columns are enough, which saves memory. ValueError if the
    hub's format has them in another order, so that changes of a part of the tensor could not be sent.
    """
    shape = whole_shape(tensor)
    rows, columns = math.prod(shape[:-1]), min(shape[-1], 2) if len(shape) > 1 else math.prod(shape)
    numbers = torch.arange(rows * columns).view(*shape[:-1], columns) if shape else torch.arange(1).view(())
    parts = hub_tensors(transformer, name, numbers)
    for (hub_name, part), (_, meta) in zip(parts, hub_shapes(transformer, name, tensor), strict=True):
        first, factor = int(part.reshape(-1)[0]), meta.numel() // part.numel()
        consecutive = torch.equal(part.reshape(-1), torch.arange(first, first + part.numel()))
        if not consecutive or part.shape[:-1] != meta.shape[:-1]:
            raise ValueError(
                f"weights.transfer=delta: checkpoints of this model have {hub_name} in another order than {name} in "
                "memory, so parts of it cannot be sent. Set weights.transfer=full."
            )
        yield first * factor, first * factor + meta.numel()


def model_tensors(transformer: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of the model: parameters, then the buffers that are stored with them."""
    return {**dict(transformer.named_parameters()), **state_buffers(transformer)}


def empty_model(folder: Path, *, dtype: str, trust_remote_code: bool, scalar: bool = False) -> PreTrainedModel:
    """The model that a config.json describes, on the meta device; `scalar`: with one number per token, not logits.

    ValueError if the model needs code of its own, and that code is not trusted.
    """
    config, kind = language_model(str(folder), trust_remote_code=trust_remote_code)
    if scalar:
        kind = AutoModelForSequenceClassification
    with torch.device("meta"):
        empty = kind.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code)
    return drop_encoders(empty)


def load_whole(model: ModelConfig) -> PreTrainedModel:
    """The model of model.path, in its type."""
    transformer, report = load(AutoModelForCausalLM, model.path, model)
    check_report(transformer, report, model.path, key="model.path")
    return transformer


def frozen_tensors(transformer: PreTrainedModel, like: Mapping[str, Tensor], path: str) -> dict[str, Path]:
    """The tensors in the files of a checkpoint that wraps a text model beyond that one; each with its file.

    They are the encoders, and what transformers does not load, such as a layer that predicts a second token. A model
    that wraps nothing has none.

    `like`: the tensors of the text model, by their names in `transformer`. ValueError if the files at `path` are not on
    this machine, or do not have the text model under the names that an export would give it.
    """
    if not wraps_text_model(transformer.config):
        return {}
    stored = {name: file for file in weight_files(local_model_folder(path)) for name in tensor_shapes(file)}
    trained = {part for name, tensor in like.items() for part, _ in hub_shapes(transformer, name, tensor)}
    if absent := sorted(trained - stored.keys()):
        raise ValueError(
            f"model.path={path}: its files have no {absent[0]}, which is a tensor of its text model in transformers. "
            "An export could not tell what else belongs to it. Download the checkpoint as it was released."
        )
    nothing = torch.empty(0, device="meta")
    tied = {part for name in transformer.all_tied_weights_keys for part, _ in hub_tensors(transformer, name, nothing)}
    return {name: file for name, file in stored.items() if name not in trained | tied}


def _read(files: Mapping[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """These tensors of safetensors files, in the type in which they are stored."""
    for file, names in itertools.groupby(sorted(files, key=lambda name: files[name]), key=lambda name: files[name]):
        with safe_open(file, framework="pt") as stored:
            for name in names:
                yield name, stored.get_tensor(name)


def write_model(
    folder: Path,
    transformer: PreTrainedModel,
    like: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    frozen: Mapping[str, Path] | None = None,
) -> str:
    """Write whole tensors, of the shapes of `like`, as the hub's files; one file and a tensor are in memory.

    Args:
        frozen: tensors that are copied from files, as `frozen_tensors` finds them; with the settings of processors.

    Returns:
        A warning, as of `not_finite_warning`, or "".
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in {file.parent for file in (frozen or {}).values()}:
        for settings in source.glob("*processor_config.json"):
            shutil.copyfile(settings, folder / settings.name)
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    # Of a tensor that is a view, the library would count the storage: an expert is a view of all experts.
    shapes = {
        part: torch.empty_like(meta)
        for name, tensor in like.items()
        for part, meta in hub_shapes(transformer, name, tensor)
    }
    shapes |= {name: torch.empty_like(tensor, device="meta") for name, tensor in _read(frozen or {})}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=FILE_BYTES)
    held: dict[str, dict[str, Tensor]] = {file: {} for file in split.filename_to_tensors}
    parts = (part for name, tensor in tensors for part in hub_tensors(transformer, name, tensor.detach()))
    broken: dict[str, int] = {}
    for name, part in itertools.chain(parts, _read(frozen or {})):
        broken |= count_not_finite(name, part)
        file = split.tensor_to_filename[name]
        held[file][name] = part.contiguous().to("cpu", copy=True)
        if len(held[file]) == len(split.filename_to_tensors[file]):
            save_tensors(folder / file, held.pop(file))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2))
    return not_finite_warning(broken)


def start_generation_config(path: str) -> bytes | None:
    """The generation_config.json of a start model, which is loaded; None if it has none."""
    file = local_model_folder(path) / GENERATION_CONFIG_NAME
    return file.read_bytes() if file.is_file() else None


def write_model_config(folder: Path, transformer: PreTrainedModel, generation_config: bytes | None = None) -> None:
    """config.json, generation_config.json, and the code of a model that came with its own.

    `generation_config`: the start model's, which is written as it was. Without one the transformer's own is written,
    unless it does not generate. transformers refuses to save some that it loads, such as a temperature without
    do_sample.
    """
    config, class_name = transformer.config, type(transformer).__name__
    names = config.architectures or []
    if [name.lower() for name in names] != [class_name.lower()]:  # vLLM knows Phi 3.5 MoE only in the hub's spelling
        config.architectures = [class_name]
    config.dtype = str(transformer.dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    if transformer.is_remote_code():
        custom_object_save(transformer, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    if transformer.can_generate():
        file = folder / GENERATION_CONFIG_NAME
        if generation_config is None:
            transformer.generation_config.to_json_file(file)
        else:
            file.write_bytes(generation_config)


def check_written_again(transformer: PreTrainedModel, path: str, *, key: str) -> None:
    """Raise a ValueError if `write_model_config` fails for a loaded model: no checkpoint of it could be written."""
    with tempfile.TemporaryDirectory(prefix="rlhf-config-") as folder:
        try:
            write_model_config(Path(folder), transformer)
        except OSError:
            pass  # of this disk
        except Exception as error:  # of transformers, or of code that came with the model
            raise ValueError(
                f"{key}={path}: its config.json can be loaded and not written again ({error_text(error)}), so no "
                "checkpoint or export could hold it. Correct it, or name another model."
            ) from None
