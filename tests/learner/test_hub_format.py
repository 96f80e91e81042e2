"""Engines are sent the names and values of a checkpoint, also for families whose layers transformers rebuilds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import write_family
from safetensors.torch import load_file
from worlds import make_config, run_world, save

from rlhf.algo.packing import pack
from rlhf.config.sections import ModelConfig
from rlhf.learner import hub_format
from rlhf.learner.hub_format import (
    empty_model,
    hub_shapes,
    hub_tensors,
    model_tensors,
    start_generation_config,
    state_buffers,
    write_model,
    write_model_config,
)
from rlhf.learner.policy_model import DeviceTokens, load_policy
from rlhf.types import World

# stacked experts under three names, renamed layers, buffers that are state, weights that layers share
REBUILT = ["llama", "mixtral", "granitemoehybrid", "nemotron_h", "kimi_linear", "ernie4_5_moe", "gemma4_text", "zamba2"]


@pytest.mark.parametrize("model_type", REBUILT)
def test_the_tensors_that_are_sent_are_those_of_the_checkpoint(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_family(model_type, tmp_path), dtype=torch.float32)
    stored = load_file(tmp_path / "model.safetensors")
    announced, sent = [], {}
    for name, tensor in {**dict(model.named_parameters()), **state_buffers(model)}.items():
        announced += [(hub_name, like.shape) for hub_name, like in hub_shapes(model, name, tensor)]
        sent |= dict(hub_tensors(model, name, tensor.detach()))
    assert announced == [(name, tensor.shape) for name, tensor in sent.items()]
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in stored)


@pytest.mark.private
@torch.no_grad()
@pytest.mark.parametrize("model_type", ["glm4_moe", "minimax_m2"])  # the second one's class does not ask for it
def test_a_bias_that_balances_a_router_is_not_rounded_with_the_weights(model_type: str, tmp_path: Path) -> None:
    folder = write_family(model_type, tmp_path)
    exact = load_policy(ModelConfig(path=str(folder), dtype="float32"), temperature=1.0)
    rounded = load_policy(ModelConfig(path=str(folder)), temperature=1.0)
    biases = state_buffers(rounded)
    assert biases
    assert all(torch.equal(biases[name], bias) for name, bias in state_buffers(exact).items())
    row = DeviceTokens.of(pack([np.arange(5, 30, dtype=np.int32)]), torch.device("cpu"))
    assert (rounded(row).logprobs - exact(row).logprobs).abs().mean() < 0.05


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def exported_and_resumed(world: World, folder: Path) -> list[dict[str, np.ndarray]]:
    """What is exported after every tensor has moved, and what is there after the checkpoint has been loaded again."""
    from rlhf.learner.policy import Learner

    learner = Learner(make_config(folder, model={"dtype": "bfloat16"}), world)
    dtypes = [meta.dtype for meta in learner.metadata()]
    assert dtypes == sorted(dtypes, reverse=True)  # the bias, in float32, comes before all others
    assert set(dtypes) == {"bfloat16", "float32"}
    learner.perturb_weights()
    save(learner, folder)
    learner.export(str(folder / "exported"), str(folder))
    learner.restore_weights()
    learner.load(str(folder))
    resumed = {name: tensor.clone() for name, tensor in learner}
    learner.close()
    exported = load_file(folder / "exported" / "model.safetensors")
    return [{name: tensor.float().numpy() for name, tensor in tensors.items()} for tensors in (exported, resumed)]


@pytest.mark.stack
def test_a_bias_that_balances_a_router_is_sent_saved_and_exported(tmp_path: Path) -> None:
    folder = write_family("glm4_moe", tmp_path / "model")
    before = load_file(folder / "model.safetensors")
    ((exported, resumed),) = run_world(exported_and_resumed, 1, folder)
    assert exported.keys() == resumed.keys() == before.keys()
    assert (exported[BIAS] != before[BIAS].numpy()).any()
    assert (resumed[BIAS] == exported[BIAS]).all()


def test_an_expert_counts_as_its_own_bytes_where_a_model_is_cut_into_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = empty_model(write_family("qwen3_moe", tmp_path / "model"), dtype="bfloat16", trust_remote_code=False)
    tensors = model_tensors(model)
    total = sum(2 * tensor.numel() for tensor in tensors.values())
    monkeypatch.setattr(hub_format, "FILE_BYTES", total // 3)
    zeros = ((name, torch.zeros_like(tensor, device="cpu")) for name, tensor in tensors.items())
    write_model(tmp_path / "out", model, tensors, zeros)
    index = json.loads((tmp_path / "out" / hub_format.INDEX).read_text())
    assert index["metadata"]["total_size"] == total
    assert len(set(index["weight_map"].values())) in (3, 4)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("generation_config.json", {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [256]}),
        ("generation_config.json", {"do_sample": False, "top_k": 20, "min_p": 0.1}),
        ("generation_config.json", {"forced_decoder_ids": [[1, 2]], "pad_token_id": -1, "_from_model_config": True}),
        ("config.json", {"temperature": 0.7, "eos_token_id": 256}),
    ],
)
def test_what_transformers_loads_is_written_again(file: str, values: dict[str, Any], tmp_path: Path) -> None:
    """transformers itself refuses to save the first two files, and the generation config that it makes of the last."""
    from transformers import AutoModelForCausalLM

    folder = write_family("llama", tmp_path / "start")
    (folder / "generation_config.json").unlink()
    old = json.loads((folder / file).read_text()) if file == "config.json" else {}
    (folder / file).write_text(json.dumps(old | values))
    write_model_config(
        tmp_path / "out", AutoModelForCausalLM.from_pretrained(folder), start_generation_config(str(folder))
    )
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written[name] for name in values} == values
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_exported_model_names_its_class_as_the_hub_does(tmp_path: Path) -> None:
    """vLLM looks a class up by this name, and transformers spells PhimoeForCausalLM."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_family("phimoe", tmp_path))
    write_model_config(tmp_path / "out", model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["PhiMoEForCausalLM"]
