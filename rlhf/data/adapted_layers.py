"""The layers of a run's model that get an adapter, from its config.json and its code, before any weight is loaded."""

from __future__ import annotations

import torch

from rlhf.algo.lora import linear_names
from rlhf.config.program import TrainingProgramConfig


def adapted_layers(config: TrainingProgramConfig) -> list[str]:
    """Their names; [] without `model.lora`. ValueError as of `linear_names`."""
    model, lora = config.model, config.model.lora
    if lora is None:
        return []
    # imported here: most runs have no adapter
    from transformers import AutoConfig, AutoModelForCausalLM

    described = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(described, trust_remote_code=model.trust_remote_code)
    return linear_names(empty, targets=lora.targets, exclude=lora.exclude)
