"""The text model of a checkpoint that wraps one: Qwen 3.5 to 3.8, Gemma 3 and 4, Mistral 3, Llama 4, Qwen3-VL.

transformers loads the whole checkpoint, so that tensors and config.json have their names on the hub. The encoders of
images and sounds are then dropped: they are never trained, and an export copies them from the original files.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)


def language_model(path: str, *, trust_remote_code: bool) -> tuple[PreTrainedConfig, Any]:
    """The config of a model, and the class of transformers that loads the model with its head."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return config, language_model_class(config)


def language_model_class(config: PreTrainedConfig) -> Any:
    own_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if wraps_text_model(config) and known and not own_code else AutoModelForCausalLM


def wraps_text_model(config: PreTrainedConfig) -> bool:
    return config.get_text_config() is not config


def decoder_of(model: PreTrainedModel) -> Any:
    """The text model without its head; transformers' `get_decoder` of Llama 4 gives it with the head."""
    decoder = model.get_decoder()
    return decoder.model if decoder.get_output_embeddings() is not None else decoder


def drop_encoders(model: PreTrainedModel) -> PreTrainedModel:
    """Remove all but the text model and its head, in place; a model that wraps nothing stays as it is."""
    if wraps_text_model(model.config):
        _keep(model, {decoder_of(model), model.get_output_embeddings()})
    return model


def _keep(module: nn.Module, kept: set[nn.Module]) -> None:
    for name, child in list(module.named_children()):
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
        elif child not in kept:
            _keep(child, kept)
    for name, _ in list(module.named_parameters(recurse=False)):
        delattr(module, name)
