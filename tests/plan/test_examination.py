"""What the files of a model lack or hold too much, which ids have no row: found from headers, before any start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import write_family
from safetensors.torch import load_file, save_file
from worlds import make_config, make_ppo_config

from rlhf.config.reward_model import RewardTrainingConfig
from rlhf.config.sections import ModelConfig
from rlhf.config.supervised import SFTConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.plan.examination import RunModel, check_class, check_files
from rlhf.plan.start_checks import evaluation_problems, input_problems, run_problems, start_problems


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_model_dir / "train.jsonl", tmp_path)
    return Path(shutil.copytree(tiny_model_dir / "model", tmp_path / "model"))


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def cut_in_the_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def damage_the_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[8:12] = b"oops"
    weights.write_bytes(bytes(content))


def put_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def remove(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def lose_a_shard(folder: Path) -> None:
    write_index(folder, {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"})


def name_what_is_not_there(folder: Path) -> None:
    write_index(folder, {"no.such.tensor": "model.safetensors", "nor.this": "model.safetensors"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors: not a whole safetensors file"),
        (cut_in_the_header, "model.safetensors: not a whole safetensors file"),
        (damage_the_header, "model.safetensors: not a whole safetensors file"),
        (put_a_pointer, "Git LFS pointer"),
        (remove, "model.safetensors: no such file"),
        (lose_a_shard, "model-00002-of-00002.safetensors: no such file"),
        (name_what_is_not_there, "no.such.tensor in model.safetensors and 1 more"),
        (lambda folder: write_index(folder, []), "model.safetensors.index.json: not an index"),  # type: ignore[arg-type]
    ],
)
def test_weights_that_are_not_whole_are_refused(model: Path, damage: Callable[[Path], None], message: str) -> None:
    assert input_problems(make_config(model)) == []
    damage(model)
    (problem,) = input_problems(make_config(model))
    assert problem.startswith(f"model.path={model}: ")
    assert message in problem


# --- tensors, ids and tied matrices ---

Tensors = dict[str, torch.Tensor]
NORM, QUERY, HEAD = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"


def change_tensors(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    stored = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


def change_json(folder: Path, file: str, **keys: Any) -> None:
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(content | keys))


def with_prefix(prefix: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {prefix + n: tensor for n, tensor in stored.items()})


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {n.replace(old, new): t for n, t in stored.items()})


def lose(*names: str) -> Callable[[Path], None]:
    return lambda folder: change_tensors(folder, lambda stored: {n: t for n, t in stored.items() if n not in names})


def reshape(folder: Path) -> None:
    change_tensors(folder, lambda stored: stored | {NORM: torch.ones(65)})


def in_config(file: str = "config.json", **keys: Any) -> Callable[[Path], None]:
    return lambda folder: change_json(folder, file, **keys)


def move_a_token(folder: Path) -> None:
    """Give a token that the template writes the first id that has no row."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    for token in tokenizer["added_tokens"]:
        token["id"] = rows if token["content"] == "<|assistant|>" else token["id"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


# Refused by all programs: the damage, and what the one message names.
DAMAGED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "an unmerged adapter": (with_prefix("base_model.model."), ("base_model.model.", "merge_and_unload")),
    "an adapted layer": (rename("q_proj.", "q_proj.base_layer."), ("q_proj.base_layer.weight", "merge_and_unload")),
    "a compiled model": (with_prefix("_orig_mod."), ("begin with _orig_mod.", "torch.compile")),
    "a wrapped model": (with_prefix("module."), ("begin with module.", "DDP")),
    "a layer more in the config": (in_config(num_hidden_layers=3, layer_types=None), ("model.layers.2.", "random")),
    "a layer fewer in the config": (in_config(num_hidden_layers=1, layer_types=None), ("model.layers.1.", "no place")),
    "a lost tensor": (lose(NORM), (f"random: {NORM}.",)),
    "a renamed tensor": (rename(NORM, "model.final_norm.weight"), (NORM, "model.final_norm.weight")),
    "a tensor of another shape": (reshape, (f"{NORM} has the shape [65], not [64]",)),
    "an end that has no row": (in_config(eos_token_id=[1, 9999]), ("eos_token_id=9999 (config.json)", "embeddings")),
    "a token of the template that has no row": (move_a_token, ("'<|assistant|>'=262", "embeddings")),
    "a head of another kind": (rename("model.norm", "v_head.summary"), ("v_head.summary.weight", NORM)),
    "a quantized model": (in_config(quantization_config={"quant_method": "awq", "bits": 4}), ("quantized (awq)",)),
}


def problems_of(program: str, folder: Path) -> list[str]:
    """What the checks of a program's start say of a model folder."""
    if program in ("sft", "reward-model"):
        schema = SFTConfig if program == "sft" else RewardTrainingConfig
        sections = {
            "run": {"dir": str(folder.parent / "run"), "epochs": 1},
            "model": {"path": str(folder)},
            "data": {"train": str(folder.parent / "train.jsonl")},
            "cluster": {"device": "cpu"},
        }
        return run_problems(schema.model_validate_json(json.dumps(sections)))
    if program == "evaluate":
        data = {"eval": str(folder.parent / "train.jsonl")}
        return evaluation_problems(make_config(folder, data=data))
    return start_problems((make_ppo_config if program == "ppo" else make_config)(folder))


@pytest.mark.parametrize("program", ["grpo", "ppo", "sft", "reward-model", "evaluate"])
def test_each_program_refuses_each_damaged_model_in_one_message(program: str, model: Path, tmp_path: Path) -> None:
    assert problems_of(program, model) == []
    for what, (damage, parts) in DAMAGED.items():
        damaged = Path(shutil.copytree(model, tmp_path / what))
        damage(damaged)
        (problem,) = problems_of(program, damaged)
        assert problem.startswith(f"model.path={damaged}: "), what
        assert [part for part in parts if part not in problem] == [], (what, problem)


def test_weights_in_another_format_are_examined_too(model: Path) -> None:
    stored = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(stored, model / "pytorch_model.bin")
    assert input_problems(make_config(model)) == []
    stored.pop("model.norm.weight")
    torch.save(stored, model / "pytorch_model.bin")
    (problem,) = input_problems(make_config(model))
    assert "pytorch_model.bin does not hold" in problem
    assert "random: model.norm.weight." in problem
    (model / "pytorch_model.bin").write_bytes(b"")
    (problem,) = input_problems(make_config(model))
    assert "pytorch_model.bin cannot be read" in problem


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("qwen99", "model_type='qwen99', which transformers "),
        (None, "model_type=None, which transformers "),
        ("t5", "model_type='t5', which is no language model"),
    ],
)
def test_a_model_that_no_class_can_load_is_refused_in_our_own_words(
    model: Path, kind: str | None, message: str
) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": kind}
    (model / "config.json").write_text(json.dumps(config))
    (problem,) = input_problems(make_config(model))
    assert message in problem
    assert "pip install" not in problem
    assert "out of date" not in problem


def test_a_model_of_the_hub_that_no_class_can_load_is_refused_when_its_files_are_here(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen99"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"^model\.path=.*qwen99.* newer transformers "):
        load_tokenizer(ModelConfig(path=str(model)))


def test_a_model_with_code_of_its_own_brings_its_class(model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"model_type": "qwen99", "auto_map": {}}
    (model / "config.json").write_text(json.dumps(config))
    own_code = RunModel("model.path", str(model))
    check_files(own_code)
    check_class(own_code, ModelConfig(path=str(model), trust_remote_code=True))


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = write_family("deepseek_v3", tmp_path, num_hidden_layers=2)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    change_tensors(folder, lambda stored: stored | {name: torch.zeros(64, 64)})
    with pytest.raises(ValueError, match=r"cannot be put together from their parts: model\.layers\.1\.mlp\.experts\."):
        check_class(RunModel("model.path", str(folder)), ModelConfig(path=str(folder)))
