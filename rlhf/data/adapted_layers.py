"""The layers of a run's model that get an adapter, from its config.json and its code, before any weight is loaded."""

from __future__ import annotations

from functools import cache

import torch

from rlhf.algo.lora import linear_names
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.sections import ModelConfig


def adapted_layers(config: TrainingProgramConfig) -> list[str]:
    """Names of the layers that get an adapter; [] without `model.lora`. Raises ValueError as `linear_names` does."""
    return [] if config.model.lora is None else _adapted_layers(config.model)


@cache
def _adapted_layers(model: ModelConfig) -> list[str]:
    # imported here: most runs have no adapter
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    if described.get_text_config() is not described:
        raise ValueError(
            f"model.lora: {model.path} wraps a text model ({described.model_type}); adapters of such models are not "
            "supported. Train all weights (model.lora=null)."
        )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(described, trust_remote_code=model.trust_remote_code)
    assert model.lora is not None
    return linear_names(empty, targets=model.lora.targets, exclude=model.lora.exclude)
