"""Parameters counted from weight files, against the models that transformers builds; no weights are made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from model_families import MODEL_TYPES, family_config, write_family

from rlhf.check.known_models import KNOWN_MODELS
from rlhf.check.model_shape import ModelShape, model_shape, read_shape, shape_at, stored_tensors
from rlhf.data.model_files import USUAL_MODEL_TYPES


def built(model_type: str) -> Any:
    """The tiny model of a family on the meta device."""
    from accelerate import init_empty_weights

    from rlhf.learner.text_model import drop_encoders, language_model_class

    config = family_config(model_type)
    with init_empty_weights():
        model = language_model_class(config).from_config(config)
    model.tie_weights()
    return drop_encoders(model)


def shape_of(model: Any) -> ModelShape:
    """What the plan reads from the model's config.json and from the headers of its files."""
    from rlhf.learner.hub_format import hub_shapes, state_buffers

    tensors = {**dict(model.named_parameters()), **state_buffers(model)}
    stored = dict(pair for name, tensor in tensors.items() for pair in hub_shapes(model, name, tensor))
    return model_shape(model.config.to_dict(), {name: tuple(tensor.shape) for name, tensor in stored.items()})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_parameters_of_every_family_are_counted_exactly(model_type: str) -> None:
    model = built(model_type)
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())


# 4 layers of H = 128; attention H (4 + 2 + 2 + 4) 32; experts of 3 H 64 or 3 H 128, 2 of 4 active; routers 4 H
ATTENTION = 128 * 12 * 32


@pytest.mark.parametrize(
    ("model_type", "by_hand"),
    [
        ("llama", 4 * (ATTENTION + 3 * 128 * 128)),
        ("qwen3_moe", 4 * (ATTENTION + 2 * 3 * 128 * 64 + 4 * 128)),  # an expert per tensor
        ("granitemoe", 4 * (ATTENTION + 2 * 3 * 128 * 128 + 4 * 128)),  # experts stacked
        ("glm4_moe", 4 * ATTENTION + 3 * 128 * 128 + 3 * (3 * 3 * 128 * 64 + 4 * 128)),  # 1 dense, 1 shared expert
    ],
)
def test_of_experts_the_active_ones_are_counted(model_type: str, by_hand: int) -> None:
    assert shape_of(built(model_type)).active_parameters == by_hand


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("llama", 4),
        ("qwen3_next", 1),
        ("qwen3_5", 1),
        ("nemotron_h", 1),
        ("jamba", 2),
        ("bamba", 2),
        ("lfm2", 2),
        ("falcon_h1", 4),
    ],
)
def test_a_hybrid_has_scores_and_cache_in_its_attention_layers_alone(model_type: str, layers: int) -> None:
    shape = shape_of(built(model_type))
    quadratic = shape.training_flops([100], 0, [0]) - 2 * shape.training_flops([50], 0, [0])
    assert quadratic == 6 * layers * shape.heads * shape.head_dim * (100**2 - 2 * 50**2)


def test_the_attention_layers_of_kimi_linear_are_those_that_its_config_names() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 32}
    linear = {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]}}
    config = {"model_type": "kimi_linear", **sizes, **linear}
    assert model_shape(config, {"model.norm.weight": (64,)}).attention_layers == 1


def test_the_headers_of_a_folder_are_read_and_what_is_not_trained_is_left_out(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    model = built("smollm3")  # its head is tied
    folder = write_family("smollm3", tmp_path)
    extra = {"lm_head.weight": torch.ones(262, 128), "mtp.fc.weight": torch.ones(9, 9)}
    save_file({**extra, "model.layers.4.eh_proj.weight": torch.ones(9, 9)}, tmp_path / "more.safetensors")
    save_file({"layers.0.attention.wq.weight": torch.ones(9, 9)}, tmp_path / "consolidated.safetensors")  # a copy
    files = ("model.safetensors", "more.safetensors")
    index = {"weight_map": {name: file for file in files for name in load_file(tmp_path / file)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(stored_tensors(str(folder))) == len(load_file(tmp_path / "model.safetensors")) + 3
    shape = shape_at(str(folder))
    assert shape is not None
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_files_that_are_not_all_there_are_not_counted(tmp_path: Path) -> None:
    write_family("qwen3", tmp_path)
    whole = shape_at(str(tmp_path))
    assert whole is not None
    assert stored_tensors(str(tmp_path))
    index = {"weight_map": {"a": "model.safetensors", "b": "not-downloaded.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_tensors(str(tmp_path)) == {}
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ValueError, match=r"model\.safetensors: .*git lfs pull"):
        stored_tensors(str(tmp_path))


def test_a_reward_models_files_hold_no_head_that_could_be_taken_away() -> None:
    from rlhf.check.memory import scalar_parameters

    config = {**family_config("qwen3").to_dict(), "tie_word_embeddings": False}
    body = {"model.embed_tokens.weight": (262, 128), "model.norm.weight": (128,)}
    model, scorer = (model_shape(config, body | head) for head in ({"lm_head.weight": (262, 128)}, {}))
    assert scalar_parameters(model) == scalar_parameters(scorer) == 262 * 128 + 128 + 128


@pytest.mark.parametrize("model_type", USUAL_MODEL_TYPES)
def test_of_the_usual_families_config_json_is_enough(model_type: str) -> None:
    config = family_config(model_type)
    counted = model_shape(config.to_dict())
    assert counted.parameters == sum(parameter.numel() for parameter in built(model_type).parameters())
    tied = {**config.to_dict(), "tie_word_embeddings": None}  # a key that config.json need not have
    default = type(config)().tie_word_embeddings
    assert (model_shape(tied).head_parameters == 0) == default


def test_another_family_is_not_counted_without_weight_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(family_config("lfm2").to_json_string())
    assert shape_at(str(tmp_path)) is None


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_a_known_model_has_the_size_that_its_name_says(name: str) -> None:
    shape = shape_at(name)
    assert shape is not None
    said = {"Mixtral-8x7B": "46.7B", "Mixtral-8x22B": "140.6B", "Phi-3": "3.8B", "Phi-4-mini": "3.8B", "phi-4": "14.7B"}
    said = {words: size for words, size in said.items() if words in name} or {"": name.removesuffix("A3B")}
    number, unit = re.findall(r"(?<![\d.])(\d+(?:\.\d+)?)(m|b)\b", next(iter(said.values())).lower())[0]
    assert 0.9 < shape.parameters / (float(number) * {"m": 1e6, "b": 1e9}[unit]) < 1.35


def test_a_model_that_is_not_here_names_one_that_needs_no_download() -> None:
    with pytest.raises(ValueError, match=r"`hf download Qwen2.5-7B config.json`.* model.path=Qwen/Qwen2.5-7B\.$"):
        read_shape("Qwen2.5-7B")
