"""Models whose norms, rotary positions and gated products are computed by kernels, and those that stay as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from model_families import make_family

from rlhf.algo import numerics
from rlhf.algo.packing import pack
from rlhf.learner import fused, packed_attention
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.slow
def test_a_packed_row_with_checkpoints_has_the_plain_log_probs_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that begin alike are computed once; qwen3 has norms of queries and keys too."""
    pytest.importorskip("triton")
    transformer = make_family("qwen3").to(DEVICE)
    transformer.set_attn_implementation(PACKED)
    prepare_transformer(transformer, gradient_checkpointing=True)
    model = PolicyModel(transformer, temperature=0.9)
    sequences = [np.array(x, np.int32) for x in ([1, 2, 3, 4], [1, 2, 3, 7, 8], [5, 6, 7])]
    tokens = DeviceTokens.of(pack(sequences, [np.arange(len(x)) > 1 for x in sequences]), DEVICE)
    assert tokens.segments.expand is not None
    results = []
    for devices in (set(), {DEVICE.type}):
        monkeypatch.setattr(numerics, "KERNEL_DEVICES", devices)
        model.zero_grad()
        logprobs, entropy, *_ = model(tokens, for_update=True)
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        results.append((logprobs.detach(), entropy.detach(), gradients))
    for plain, kernels in zip(*results, strict=True):
        assert (kernels - plain).norm() < 2e-6 * plain.norm()


ALL = {"norm", "mlp", "rotary"}
COMPUTED_BY_KERNELS = {
    "llama": ALL, "qwen2": ALL, "qwen3": ALL, "mistral": ALL,
    "mixtral": {"norm", "rotary"}, "phi3": {"norm"}, "olmo2": {"mlp"}, "gemma2": {"rotary"}, "gpt_oss": set(),
}  # fmt: skip


@pytest.mark.private
@pytest.mark.parametrize("kind", COMPUTED_BY_KERNELS)
def test_only_modules_with_the_usual_code_are_replaced(kind: str) -> None:
    model = make_family(kind)
    fused.use_kernels(model)
    forwards = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    replaced = {fused._normalize: "norm", fused._gated_mlp: "mlp"}
    found = {replaced[forward.func] for forward in forwards}
    file = sys.modules[type(model).__module__]
    if isinstance(vars(file)[fused.ROTARY], functools.partial):
        found.add("rotary")
    assert found == COMPUTED_BY_KERNELS[kind]


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.library.Library]:
    """A machine that says it is a Hopper, and the package of flash attention 3 with its two operators."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    (tmp_path / f"{packed_attention.FLASH_3}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    operators = torch.library.Library("flash_attn_3", "DEF")
    operators.define("fwd(Tensor q) -> Tensor")
    operators.define("bwd(Tensor q) -> Tensor")
    yield operators
    operators._destroy()


def test_flash_attention_3_is_used_on_hopper_where_it_is_installed(
    hopper: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

    try:
        assert packed_attention.use_flash_attention_3()
        assert current_flash_attention_impl() == "FA3"
    finally:
        restore_flash_attention_impl()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not packed_attention.use_flash_attention_3()
    assert current_flash_attention_impl() is None
