"""Models with a sliding window are refused before anything is loaded, where a sequence could be longer than it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)
from worlds import make_config, make_ppo_config

from rlhf.algo.packing import pack
from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.data.model_checks import check_models, check_pairs_window
from rlhf.data.model_files import attention_window
from rlhf.doctor.examination import Patient
from rlhf.doctor.machine import check_data
from rlhf.learner.attention import PACKED, UnpackableError
from rlhf.learner.model import DeviceTokens, hidden_states
from rlhf.plan.report import plan_text
from rlhf.run.training_run import TrainingRun

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
ON = {"use_sliding_window": True, "sliding_window": 16}
CONFIGS = {
    "gemma3": Gemma3Config(text_config={**SMALL, "sliding_window": 16, "layer_types": MIXED}),
    "gemma3, text alone": Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=MIXED),
    "gemma3, full layers alone": Gemma3TextConfig(**SMALL, sliding_window=16, layer_types=["full_attention"] * 2),
    "olmo3": Olmo3Config(**SMALL, sliding_window=16),
    "cohere2": Cohere2Config(**SMALL, sliding_window=16),
    "mistral": MistralConfig(**SMALL, sliding_window=16),
    "mistral, off": MistralConfig(**SMALL, sliding_window=None),
    "mixtral": MixtralConfig(**SMALL, sliding_window=16),
    "phi3": Phi3Config(**SMALL, sliding_window=16),
    "qwen2": Qwen2Config(**SMALL, **ON, max_window_layers=1),
    "qwen2, off": Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=16, max_window_layers=1),
    "qwen2, off by default": Qwen2Config(**SMALL, sliding_window=16),
    "qwen2, in layers it does not have": Qwen2Config(**SMALL, **ON, max_window_layers=2),
    "qwen3": Qwen3Config(**SMALL, **ON, max_window_layers=0),
    "qwen3, off": Qwen3Config(**SMALL, use_sliding_window=False, sliding_window=16),
    "qwen3 moe": Qwen3MoeConfig(
        **SMALL, **ON, max_window_layers=2, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "qwen3 moe, off": Qwen3MoeConfig(
        **SMALL, sliding_window=16, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=8
    ),
    "smollm3, off": SmolLM3Config(**SMALL, sliding_window=16, use_sliding_window=False),
    "llama": LlamaConfig(**SMALL),
}
# As the hub has them, from releases of transformers that wrote no layer types, or left out what is the default.
FILES = {
    "qwen2 of the hub": ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16}, None),
    "qwen2, full layers first": (
        {"model_type": "qwen2", **ON, "max_window_layers": 2, "num_hidden_layers": 2}, None,
    ),
    "qwen2, some layers": ({"model_type": "qwen2", **ON, "max_window_layers": 1, "num_hidden_layers": 2}, 16),
    "gemma3 of the hub": ({"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 6}, 16),
    "mistral, the default": ({"model_type": "mistral"}, 4096),
    "mistral 0.3": ({"model_type": "mistral", "sliding_window": None}, None),
    "llama 4": ({"model_type": "llama4_text", "attention_chunk_size": 32, "layer_types": ["chunked_attention"]}, 32),
}  # fmt: skip


def written(folder: Path, config: PreTrainedConfig) -> Path:
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_window_of_a_config_json_is_the_one_that_the_models_attention_uses(name: str, tmp_path: Path) -> None:
    window = attention_window(json.loads((written(tmp_path, CONFIGS[name]) / "config.json").read_text()))
    model = AutoModelForCausalLM.from_config(CONFIGS[name].get_text_config())
    model.set_attn_implementation(PACKED)
    row = DeviceTokens.of(pack([np.zeros(40, np.int32)]), torch.device("cpu"))
    if window is None:
        hidden_states(model, row)
    else:
        with pytest.raises(UnpackableError, match=f"40 tokens exceed its attention window of {window}"):
            hidden_states(model, row)


@pytest.mark.parametrize("name", FILES)
def test_older_files_are_read_as_transformers_reads_them(name: str) -> None:
    file, window = FILES[name]
    assert attention_window(file) == window


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_with_sequences_longer_than_the_window_is_refused_with_both_keys(
    name: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    data = {"train": str(tiny_model_dir / "train.jsonl"), "eval": None}
    config = make_config(written(tmp_path, CONFIGS[name]), data=data)
    if "off" in name or name in ("llama", "gemma3, full layers alone", "qwen2, in layers it does not have"):
        check_models(config)
        return
    message = (
        rf"^model\.path={re.escape(str(tmp_path))}: some layers attend to the last 16 tokens .*"
        r"data\.max_prompt_tokens=64 \+ rollout\.max_response_tokens=\d+ allows .* at most 16 tokens\.$"
    )
    with pytest.raises(ValueError, match=message):
        TrainingRun(config, resume=False)  # there is no tokenizer in the folder: nothing was loaded
    with pytest.raises(ValueError, match=message):
        asyncio.run(check_data(Patient(config)))
    warnings = " ".join(plan_text(config).partition("Warnings")[2].split())
    assert "some layers attend to the last 16 tokens" in warnings
    assert "The run will be refused." in warnings


def test_sequences_that_the_window_holds_pass(tmp_path: Path) -> None:
    longest = make_config(tmp_path).max_sequence_tokens
    check_models(make_config(written(tmp_path, MistralConfig(**SMALL, sliding_window=longest))))
    with pytest.raises(ValueError, match=f"the last {longest - 1} tokens"):
        check_models(make_config(written(tmp_path, MistralConfig(**SMALL, sliding_window=longest - 1))))


def test_critics_and_reward_models_are_checked_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    model, judge = (
        tiny_model_dir / "model",
        {"path": str(written(tmp_path, Olmo3Config(**SMALL | {"vocab_size": 999}, sliding_window=16)))},
    )
    with pytest.raises(ValueError, match=r"^critic\.path=.*the last 16 tokens.*rollout\.max_response_tokens"):
        TrainingRun(make_ppo_config(model, critic=judge), resume=False)
    with pytest.raises(
        ValueError, match=r"^reward_model\.path=.*the last 16 tokens.*max_tokens_per_batch=16384 .* 512"
    ):
        TrainingRun(make_config(model, reward_model=judge), resume=False)
    check_models(make_config(model, reward_model={**judge, "max_tokens_per_batch": 16}))
    training = {"run": {"dir": "runs/judge"}, "model": judge, "data": {"train": "pairs.jsonl", "max_tokens": 64}}
    with pytest.raises(ValueError, match=r"^model\.path=.*the last 16 tokens.*data\.max_tokens=64 allows"):
        check_pairs_window(RewardTrainingConfig.model_validate({**training, "cluster": {"device": "cpu"}}))
