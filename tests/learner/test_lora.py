"""Adapters of a real model: what they compute, what is trained, published, saved and put back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from worlds import make_config, make_groups, plan_first_epoch, run_world, save

from rlhf.algo.lora import adapters_off, linear_names
from rlhf.algo.packing import pack
from rlhf.config.sections import LoraConfig, ModelConfig
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.step.batch import broadcast_to_tokens
from rlhf.types import PolicyTargets, World

LORA = {"rank": 4, "alpha": 12}
GROUPS: dict[str, Any] = {"groups": 2, "samples": 2, "vocabulary": 250, "longest": 20, "seed": 3}
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def row() -> DeviceTokens:
    sequences = [np.arange(5, 5 + length, dtype=np.int32) for length in (9, 6)]
    return DeviceTokens.of(pack(sequences), torch.device("cpu"))


def policies(model: Path, dtype: str, **lora: Any) -> tuple[PolicyModel, PolicyModel]:
    """The model whole, and with adapters."""
    options: dict[str, Any] = {"path": str(model), "dtype": dtype}
    return load_policy(ModelConfig(**options), temperature=1.0), load_policy(
        ModelConfig(**options, lora=LoraConfig(**{**LORA, **lora})), temperature=1.0
    )


def draw_b(policy: PolicyModel) -> dict[str, nn.Parameter]:
    """Give B values other than its zeros; -> all that is trained."""
    trained = {name: param for name, param in policy.transformer.named_parameters() if param.requires_grad}
    with torch.no_grad():
        for name, param in trained.items():
            if name.endswith("lora_B"):
                param.normal_(std=0.05)
    return trained


def test_a_is_drawn_by_the_seed_of_the_run_and_differs_from_layer_to_layer(tiny_model_dir: Path) -> None:
    model = ModelConfig(path=str(tiny_model_dir / "model"), dtype="float32", lora=LoraConfig(rank=4))

    def drawn(seed: int) -> list[torch.Tensor]:
        params = load_policy(model, temperature=1.0, seed=seed).transformer.named_parameters()
        return [param for name, param in params if name.endswith("q_proj.lora_A")]

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_new_adapters_and_those_that_are_off_compute_the_base_bit_for_bit(tiny_model_dir: Path, dtype: str) -> None:
    base, adapted = policies(tiny_model_dir / "model", dtype)
    with torch.no_grad():
        expected = base(row()).logprobs
        assert torch.equal(adapted(row()).logprobs, expected)
        trained = draw_b(adapted)
        assert {param.dtype for param in trained.values()} == {getattr(torch, dtype)}
        assert not torch.equal(adapted(row()).logprobs, expected)
        with adapters_off(adapted.transformer):
            assert torch.equal(adapted(row()).logprobs, expected)
        in_float32 = adapted(row(), in_float32=True).logprobs
    assert (adapted(row()).logprobs - in_float32).abs().max() < (1e-5 if dtype == "float32" else 0.1)


def test_the_gradients_of_a_and_b_are_those_of_the_weight_w_plus_s_b_a(tiny_model_dir: Path) -> None:
    base, adapted = policies(tiny_model_dir / "model", "float32", exclude=("layers.1.self_attn.q_proj",))
    trained = draw_b(adapted)
    assert len(trained) == 2 * (2 * len(LAYERS) - 1)
    adapted(row()).logprobs.square().sum().backward()
    own = {name: param.detach().clone().requires_grad_() for name, param in trained.items()}
    scale = LORA["alpha"] / LORA["rank"]
    merged: dict[str, Tensor] = {
        f"transformer.{name[:-7]}.weight": base.transformer.get_parameter(f"{name[:-7]}.weight")
        + scale * own[name[:-1] + "B"] @ own[name]
        for name in own
        if name.endswith("lora_A")
    }
    torch.func.functional_call(base, merged, (row(),)).logprobs.square().sum().backward()
    for name, param in trained.items():
        assert param.grad is not None
        torch.testing.assert_close(param.grad, own[name].grad, rtol=1e-4, atol=1e-5)
        assert param.grad.abs().max() > 0
    assert all(param.grad is None for name, param in adapted.named_parameters() if "lora" not in name)


def small_model(kind: str) -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, num_key_value_heads=2, vocab_size=16, num_local_experts=2)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_all_linear_is_every_linear_layer_but_the_head() -> None:
    names = linear_names(
        small_model("llama"), targets="all-linear", exclude=["mlp.up_proj", "layers.0.self_attn.q_proj"]
    )
    expected = {f"layers.{i}.{part}" for i in (0, 1) for part in ("mlp.gate_proj", "mlp.down_proj")}
    expected |= {f"layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qkvo"} - {"layers.0.self_attn.q_proj"}
    assert {name.removeprefix("model.") for name in names} == expected
    one = linear_names(small_model("llama"), targets=["layers.1.mlp.up_proj"], exclude=[])
    assert one == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        ("llama", {"targets": ["q_proj", "query"]}, r"model.lora.targets=query: no linear layer .* It has down_proj, "),
        ("llama", {"targets": ["lm_head"]}, r"model.lora.targets=lm_head: .*the head has no adapter"),
        ("llama", {"exclude": ["c_attn"]}, r"model.lora.exclude=c_attn: no linear layer"),
        ("llama", {"targets": ["q_proj"], "exclude": ["self_attn.q_proj"]}, "model.lora.exclude: it leaves no layer"),
        ("mixtral", {}, "model.lora: .* holds the experts"),
    ],
)
def test_layers_that_cannot_be_adapted_are_refused_by_name(kind: str, lora: Mapping[str, Any], message: str) -> None:
    chosen: dict[str, Any] = {"targets": "all-linear", "exclude": [], **lora}
    with pytest.raises(ValueError, match=message):
        linear_names(small_model(kind), **chosen)


def update_and_look(world: World, model: Path, folder: Path, stage: int, dtype: str) -> dict[str, Any]:
    from rlhf.learner.policy import Learner

    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype, "lora": LORA},
        "learner": {"zero_stage": stage, "optimizer": {"lr": 1e-2}},
        "algo": {"kl_coef": 0.1, "kl_place": "reward", "kl_estimator": "k1"},
    }
    config = make_config(model, **sections, cluster={"learners": world.size, "device": "cpu"})
    learner = Learner(config, world)
    batch, minibatches, advantages = plan_first_epoch(config, make_groups(**GROUPS))
    learner.start_step(batch.tokens, [minibatches])

    def values() -> dict[str, np.ndarray]:
        return {name: x.detach().float().numpy().copy() for name, x in learner.each_whole(learner.trained.items())}

    def base() -> dict[str, Tensor]:
        rest = ((n, p) for n, p in learner.transformer.named_parameters() if n not in learner.trained)
        return {name: tensor.detach().clone() for name, tensor in learner.each_whole(rest)}

    def update() -> None:
        learner.update(PolicyTargets(broadcast_to_tokens(batch, advantages), None, None))

    def kl() -> float:
        old, ref = learner.logprobs()
        assert old is not None
        assert ref is not None
        return float(np.abs(old - ref).max(initial=0))

    start, kls = base(), [kl()]
    update()
    save(learner, folder)
    stored = learner.checkpoint_bytes()
    kls.append(kl())
    update()
    after = values()
    learner.load(str(folder))
    update()
    resumed = values()
    learner.export(str(folder / "export"), str(model))
    (logprobs,) = learner.canary([np.arange(5, 25, dtype=np.int32)])
    unchanged = all(torch.equal(tensor, start[name]) for name, tensor in base().items())
    learner.close()
    return {"kl": kls, "after": after, "resumed": resumed, "bytes": stored, "unchanged": unchanged, "lp": logprobs}


@pytest.mark.stack
def test_updates_checkpoints_and_exports_of_adapters_agree_over_ranks_and_stages(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    model, results = tiny_model_dir / "model", []
    for stage, ranks, dtype in ((0, 1, "float32"), (3, 2, "float32"), (2, 2, "bfloat16")):
        folder = tmp_path / f"{stage}"
        folder.mkdir()
        (folder / "model").mkdir()
        by_rank = run_world(update_and_look, ranks, model, folder, stage, dtype)
        results.append(by_rank[0])
        seen, of_adapters = by_rank[0], sum(tensor.size for tensor in by_rank[0]["after"].values())
        assert [rank["kl"][0] for rank in by_rank] == [0.0] * ranks
        assert max(rank["kl"][1] for rank in by_rank) > 1e-3
        assert seen["unchanged"]
        # weights and two moments, float32; and the states of the random generators
        assert 0 <= sum(rank["bytes"] for rank in by_rank) - 12 * of_adapters < 20_000
        for name, tensor in seen["after"].items():
            np.testing.assert_array_equal(seen["resumed"][name], tensor)
    exact = results[0]
    assert max(np.abs(tensor).max() for name, tensor in exact["after"].items() if name.endswith("B")) > 1e-3
    for name, tensor in exact["after"].items():
        np.testing.assert_allclose(results[1]["after"][name], tensor, rtol=1e-4, atol=1e-5)
    assert_export_is_the_learner(tmp_path / "0" / "export", model, exact["lp"])


def assert_export_is_the_learner(export: Path, model: Path, logprobs: np.ndarray) -> None:
    """The export, read as peft does, gives the learner's log-probs."""
    config = json.loads((export / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 12, str(model))
    tensors = load_file(export / "adapter_model.safetensors")
    policy = load_policy(ModelConfig(path=str(model), dtype="float32"), temperature=1.0)
    assert len(tensors) == 2 * len(config["target_modules"])
    with torch.no_grad():
        for layer in config["target_modules"]:
            a, b = (tensors[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
            policy.transformer.get_parameter(f"{layer}.weight").add_(config["lora_alpha"] / config["r"] * b @ a)
        tokens = DeviceTokens.of(pack([np.arange(5, 25, dtype=np.int32)]), torch.device("cpu"))
        np.testing.assert_allclose(policy(tokens).logprobs[1:], logprobs[1:], atol=1e-5)
