"""Checkpoints that wrap a text model: that one is trained, the rest comes out of an export as it went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import NOT_LOADED, WRAPPERS, write_family
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rlhf.check.examination import RunModel, check_files
from rlhf.check.model_shape import NOT_LOADED as NOT_COUNTED
from rlhf.check.model_shape import read_shape
from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.data.adapted_layers import adapted_layers
from rlhf.learner import hub_format
from rlhf.learner.hub_format import empty_model, frozen_tensors, model_tensors, write_model, write_model_config
from rlhf.learner.policy_model import load_policy
from rlhf.learner.value_model import load_scalar_transformer

FILE = "model.safetensors"


def loaded(folder: Path) -> Any:
    return load_policy(ModelConfig(path=str(folder), dtype="float32"), temperature=1.0).transformer


def exported(folder: Path, model: Any, tensors: dict[str, Tensor], start: Path) -> dict[str, Tensor]:
    frozen = frozen_tensors(model, tensors, str(start))
    (start / "preprocessor_config.json").write_text("{}")
    write_model(folder, model, tensors, tensors.items(), frozen=frozen)
    assert (folder / "preprocessor_config.json").read_text() == "{}"
    write_model_config(folder, model)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_an_export_has_new_values_in_the_text_model_alone(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_format, "FILE_BYTES", 300_000)  # several files
    start = write_family(model_type, tmp_path / "start")
    check_files(RunModel("model.path", str(start)))
    before = load_file(start / FILE)
    model = loaded(start)
    trained = model_tensors(model)
    with torch.no_grad():
        for tensor in trained.values():
            tensor.add_(1.0)
    after = exported(tmp_path / "out", model, trained, start)
    assert after.keys() == before.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if NOT_COUNTED.search(name)} > NOT_LOADED.get(model_type, {}).keys()
    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_the_plan_counts_the_text_model_and_the_learner_holds_no_more(model_type: str, tmp_path: Path) -> None:
    start = write_family(model_type, tmp_path)
    held = sum(parameter.numel() for parameter in loaded(start).parameters())
    assert read_shape(str(start)).parameters == held
    empty = empty_model(start, dtype="float32", trust_remote_code=False)
    assert sum(parameter.numel() for parameter in empty.parameters()) == held


def test_a_type_in_the_files_is_kept_where_it_is_not_that_of_training(tmp_path: Path) -> None:
    start = write_family("gemma3", tmp_path / "start")
    name = "multi_modal_projector.mm_input_projection_weight"
    stored = load_file(start / FILE)
    save_file(stored | {name: stored[name].bfloat16()}, start / FILE)
    model = loaded(start)
    assert exported(tmp_path / "out", model, model_tensors(model), start)[name].dtype == torch.bfloat16


def test_a_second_copy_of_a_tied_head_is_not_kept_as_it_was(tmp_path: Path) -> None:
    start = write_family("qwen3_5", tmp_path / "start")
    stored = load_file(start / FILE)
    save_file(stored | {"lm_head.weight": stored["model.language_model.embed_tokens.weight"].clone()}, start / FILE)
    model = loaded(start)
    assert "lm_head.weight" not in exported(tmp_path / "out", model, model_tensors(model), start)


def test_files_without_a_tensor_of_the_text_model_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    start = write_family("qwen3_5", tmp_path)
    stored = load_file(start / FILE)
    absent = "model.language_model.norm.weight"
    save_file({name: tensor for name, tensor in stored.items() if name != absent}, start / FILE)
    with pytest.raises(ValueError, match=rf"^model\.path=.* lacks 1, .*: {absent}\. Download"):
        loaded(start)


def test_a_critic_that_wraps_a_text_model_is_refused(tmp_path: Path) -> None:
    path = str(write_family("gemma3", tmp_path))
    with pytest.raises(ValueError, match=r"^critic\.path=.* wraps a text model \(gemma3\)"):
        load_scalar_transformer(path, ModelConfig(path=path), key="critic.path", new_head="zeros")


def test_adapters_of_a_wrapper_are_refused(tmp_path: Path) -> None:
    from types import SimpleNamespace

    model = ModelConfig(path=str(write_family("qwen3_5", tmp_path)), lora=LoraConfig())
    config: Any = SimpleNamespace(model=model)
    with pytest.raises(ValueError, match=r"^model\.lora: .* wraps a text model \(qwen3_5\)"):
        adapted_layers(config)
