"""Loads a model with transformers, and checks its report about the files.

transformers fills a parameter that no file has with random numbers, and drops a tensor that no parameter takes; both
are lines in its log. Here they are refused. Which tensors belong together is left to its own code: it renames, stacks
and ties them, and ignores those that the model's class names. On the meta device it does so from their shapes alone.
"""

from __future__ import annotations

import contextlib
import itertools
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, modeling_utils
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from rlhf.config.base import first_line
from rlhf.config.model_folder import (
    AGAIN,
    INDEX,
    SINGLE,
    TORCH_INDEX,
    local_model_folder,
    tensor_shapes,
    torch_files,
    weight_files,
    weight_index,
)
from rlhf.config.sections import ModelConfig

Loaded = tuple[PreTrainedModel, LoadStateDictInfo]

SHOWN = 3  # tensors of each kind in a message
ROWS_AT_ONCE = 4096  # of two matrices that are compared
TEXT_MODEL = (
    "These are the weights of a text model inside of a larger model. Use the config.json of that model, or save the "
    "text model alone in transformers."
)
# (parts of names, remedy): the first row whose part occurs in the name of a tensor without a place in the model. For a
# text model the rest of the name must be that of a missing tensor, since larger models have such names too.
REMEDIES = (
    (
        (".base_model.model.", ".base_layer.", ".lora_A.", ".modules_to_save."),
        "An adapter was saved without being merged: save what peft's `model.merge_and_unload()` returns.",
    ),
    (
        (".qweight", ".weight_scale", ".weight_packed", "_blocks", ".SCB", ".weight.absmax"),
        "The weights are quantized, and there is no quantized training: name the model in bfloat16.",
    ),
    (
        (".language_model.", ".text_model.", ".llm.", ".thinker."),
        TEXT_MODEL,
    ),
    (
        (".module.", "._orig_mod."),
        "A wrapper was saved with the model (DDP, FSDP, torch.compile). Save the model inside of it.",
    ),
)
DOWNLOAD = "Download or save the model again, with the config.json that belongs to these weights."
OLD_CONSTANT = ".masked_bias"  # in files of GPT-2 and GPT-Neo that transformers 4 or older wrote


def load(kind: Any, path: str, model: ModelConfig, *, without_data: bool = False, **options: Any) -> Loaded:
    """`kind.from_pretrained`; its report is returned and not printed, and `check_report` has yet to judge it.

    Args:
        kind: an Auto class of transformers.
        model: type and trust; its own path is not read.
        without_data: on the meta device, from files that are on this machine.
        options: keys of the model's config.
    """
    trust, dtype = model.trust_remote_code, getattr(torch, model.dtype)
    reports: list[LoadStateDictInfo] = []

    def collect(*_: Any, loading_info: LoadStateDictInfo, **__: Any) -> None:
        reports.append(loading_info)  # transformers would print a table, and raise errors that name no tensor

    with contextlib.ExitStack() as quiet:
        quiet.enter_context(mock.patch.object(modeling_utils, "log_state_dict_report", collect))
        if without_data:
            # no progress bars and warnings: nothing is loaded yet, and problems are raised
            quiet.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            if logging.is_progress_bar_enabled():
                quiet.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust, **options)
            vars(config).pop("quantization_config", None)  # it would ask for the library of the method
            with torch.device("meta"):
                own_class = type(kind.from_config(config, trust_remote_code=trust))
            transformer = own_class.from_pretrained(
                None, config=config, state_dict=_empty_tensors(local_model_folder(path)), device_map="meta",
                dtype=dtype, ignore_mismatched_sizes=True,
            )  # fmt: skip
        else:
            transformer = kind.from_pretrained(
                path, trust_remote_code=trust, dtype=dtype, ignore_mismatched_sizes=True, **options
            )
    return transformer, reports[-1]


def has_weights(folder: Path) -> bool:
    """Whether all weight files are there, as far as an index or their names tell."""
    return all(file.is_file() for file in torch_files(folder) or weight_files(folder))


def _empty_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model's files, on the meta device."""
    torch_weights = torch_files(folder)
    shapes_of_files = map(_torch_shapes, torch_weights) if torch_weights else map(tensor_shapes, weight_files(folder))
    return {name: torch.empty(shape, device="meta") for shapes in shapes_of_files for name, shape in shapes.items()}


def _torch_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file of torch.save, whose data is not read; ValueError if it is not whole."""
    try:
        stored = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # unpickling raises many types, whose text proposes to run code of the file
        why = first_line(error) if isinstance(error, OSError) else type(error).__name__
        raise ValueError(f"{file.name} cannot be read as a file of tensors ({why}). {AGAIN}") from None
    if not isinstance(stored, dict) or not all(isinstance(value, Tensor) for value in stored.values()):
        raise ValueError(
            f"{file.name} holds other objects than named tensors, as a checkpoint of a training does. Save its model "
            "with transformers (save_pretrained)."
        )
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}


def check_report(
    transformer: PreTrainedModel,
    report: LoadStateDictInfo,
    path: str,
    *,
    key: str,
    lacks: Collection[str] = (),
    exceeds: Collection[str] = (),
) -> None:
    """Raise a ValueError unless each parameter has a tensor of its shape and each tensor a parameter.

    Args:
        lacks: parameters that need no tensor, since they are about to be set.
        exceeds: tensors that need no parameter.
    """
    needed = len(transformer.state_dict())
    missing = report.missing_keys.difference(lacks)
    unexpected = {name for name in report.unexpected_keys.difference(exceeds) if not name.endswith(OLD_CONSTANT)}
    findings = []
    if missing:
        findings.append(f"Of {needed} it lacks {len(missing)}, which would be random: {_list_of(missing)}.")
    if unexpected:
        findings.append(f"It has {len(unexpected)} that the model has no place for: {_list_of(unexpected)}.")
    for name, stored, expected in sorted(report.mismatched_keys)[:SHOWN]:
        findings.append(f"{name} has the shape {[*stored]}, not {[*expected]}.")
    if report.conversion_errors:
        findings.append(f"These cannot be put together from their parts: {_list_of(report.conversion_errors)}.")
    findings += [f"{' '.join(error.split())}." for error in report.error_msgs[:SHOWN]]
    if findings:
        names = [*missing, *unexpected, *(name for name, *_ in report.mismatched_keys)]
        file, kind = _file_of(local_model_folder(path), names), type(transformer).__name__
        what = " ".join([*findings, _remedy(missing, unexpected)])
        raise ValueError(
            f"{key}={path}: {file} does not hold the tensors of {kind} as config.json describes it. {what}"
        )


def _remedy(missing: Collection[str], unexpected: Collection[str]) -> str:
    """The remedy of the first row of REMEDIES that fits."""
    for parts, remedy in REMEDIES:
        for name, part in itertools.product([f".{name}" for name in unexpected], parts):
            if part in name and (remedy != TEXT_MODEL or name.replace(part, ".", 1)[1:] in missing):
                return remedy
    return DOWNLOAD


def _list_of(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else "")


def _file_of(folder: Path, names: Iterable[str]) -> str:
    """The file that holds the first of these names in an index; without one, the index or the single file itself."""
    index = weight_index(folder) | weight_index(folder, TORCH_INDEX)
    named_files = [index[name] for name in names if name in index]
    usual = [SINGLE, INDEX, TORCH_INDEX, *(file.name for file in torch_files(folder))]
    return next((name for name in [*named_files, *usual] if (folder / name).is_file()), SINGLE)


def check_tied(transformer: PreTrainedModel, path: str, *, key: str) -> None:
    """Raise a ValueError if config.json says that two matrices are one, and the files hold two that differ.

    transformers then uses both and vLLM one of them, and an export would hold both, with the same config.json.
    """
    declared = transformer.get_expanded_tied_weights_keys(all_submodels=True)
    for target, source in declared.items():
        names = [[*revert_weight_conversion(transformer, {name: torch.empty(0)})] for name in (source, target)]
        if target in transformer.all_tied_weights_keys and _equal(local_model_folder(path), [*itertools.chain(*names)]):
            continue
        raise ValueError(
            f"{key}={path}: by config.json {source} and {target} are one matrix (tie_word_embeddings), and "
            f"{_file_of(local_model_folder(path), names[1])} holds two that differ. Set tie_word_embeddings to false "
            f"in config.json to use both, or remove {target} from the file."
        )


def _equal(folder: Path, names: list[str]) -> bool:
    """Whether two stored matrices have the same values; also if one is not stored, or not in a safetensors file."""
    files = {name: file for file in weight_files(folder) if file.is_file() for name in tensor_shapes(file)}
    if not all(name in files for name in names):
        return True
    with contextlib.ExitStack() as opened:
        one, other = (opened.enter_context(safe_open(files[n], framework="pt")).get_slice(n) for n in names)
        starts = range(0, one.get_shape()[0], ROWS_AT_ONCE)
        return all(torch.equal(one[i : i + ROWS_AT_ONCE], other[i : i + ROWS_AT_ONCE]) for i in starts)
