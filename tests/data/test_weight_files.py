"""Weights that are cut off, missing or of an unknown model are found from headers, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from worlds import make_config

from rlhf.config.sections import ModelConfig
from rlhf.data.model_files import load_tokenizer
from rlhf.plan.examination import check_model_files
from rlhf.plan.start_checks import input_problems


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


def test_weights_in_another_format_are_left_to_the_loader(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"")
    check_model_files(str(model))


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
    check_model_files(str(model))
