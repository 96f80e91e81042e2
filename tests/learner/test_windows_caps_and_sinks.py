"""Windows, chunks, caps and sinks of attention, and logits that change after the head, as transformers has them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from rlhf.algo.packing import pack
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, logit_transform, prepare_transformer
from tools.model_families import WINDOW, make_family

pytestmark = pytest.mark.slow

SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
SWITCHED: dict[str, Any] = {**SLIDING, "use_sliding_window": True, "max_window_layers": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "dots1": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": {},
    "gemma4_text": {},
    "gpt_oss": {},
    "llama4_text": {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5},
    "mistral": {},
    "mixtral": SLIDING,
    "phimoe": SLIDING,
    "qwen2": SWITCHED,
    "qwen2_moe": SWITCHED,
    "qwen3": SWITCHED,
    "qwen3_moe": {**SLIDING, "use_sliding_window": True},
    "smollm3": SWITCHED,
}
LENGTHS = (3 * WINDOW, 5, WINDOW, 3 * WINDOW + 2, 2 * WINDOW - 1, 40, WINDOW + 1)


def rows(vocabulary: int, *, shared: int) -> list[np.ndarray]:
    """Sequences of LENGTHS tokens, with `shared` first tokens in common where they are longer than that."""
    rng = np.random.default_rng(0)
    beginning = rng.integers(3, vocabulary, shared)
    return [
        np.concatenate([beginning[: length - 1], rng.integers(3, vocabulary, max(length - shared, 1))]).astype(np.int32)
        for length in sorted(LENGTHS)
    ]


def alone(model: PreTrainedModel, sequences: list[np.ndarray], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of all tokens of each sequence by transformers itself, 0 at each first."""
    logprobs, entropy = [], []
    for sequence in sequences:
        ids = torch.from_numpy(sequence).long()
        log_pi = (model(input_ids=ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs.append(torch.nn.functional.pad(log_pi.gather(1, ids[1:, None])[:, 0], (1, 0)))
        entropy.append(torch.nn.functional.pad(-(log_pi.exp() * log_pi).sum(-1), (1, 0)))
    return torch.cat(logprobs), torch.cat(entropy)


@pytest.mark.parametrize(("shared", "checkpointing"), [(0, False), (2 * WINDOW + 3, True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_longer_than_the_window_are_computed_as_transformers_does(
    family: str, shared: int, checkpointing: bool
) -> None:
    plain = make_family(family, **FAMILIES[family])
    packed = copy.deepcopy(plain)
    plain.set_attn_implementation("eager")
    packed.set_attn_implementation(PACKED)
    prepare_transformer(packed, gradient_checkpointing=checkpointing)
    sequences = rows(plain.config.vocab_size, shared=shared)
    tokens = DeviceTokens.of(pack(sequences), torch.device("cpu"))
    assert (tokens.segments.expand is not None) == bool(shared)

    ours = PolicyModel(packed, temperature=0.7)(tokens, for_update=True)
    logprobs, entropy = alone(plain.eval(), sequences, 0.7)
    assert ours.entropy is not None
    torch.testing.assert_close(ours.logprobs, logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.entropy, entropy, rtol=0, atol=1e-5)
    weights = torch.linspace(0.5, 1.5, len(logprobs))
    (ours.logprobs * weights + 0.1 * ours.entropy).sum().backward()
    (logprobs * weights + 0.1 * entropy).sum().backward()
    error = norm = 0.0
    for (name, value), other in zip(packed.named_parameters(), plain.parameters(), strict=True):
        gradient = torch.zeros_like(value) if value.grad is None else value.grad  # an expert that no token chose
        expected = torch.zeros_like(value) if other.grad is None else other.grad
        assert (gradient - expected).norm() <= 1e-4 * expected.norm(), name
        error, norm = error + (gradient - expected).square().sum(), norm + expected.square().sum()
    assert error**0.5 <= 1e-5 * norm**0.5


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        ("qwen2", {}, (1.0, None)),
        ("gemma2", {}, (1.0, 30.0)),
        ("cohere2", {}, (0.0625, None)),
        ("falcon_h1", {"lm_head_multiplier": 0.25}, (0.25, None)),
        ("granitemoehybrid", {"logits_scaling": 8.0}, (0.125, None)),
        ("hyperclovax", {"logits_scaling": 8.0}, (8.0, None)),
        ("minicpm3", {"hidden_size": 2560, "dim_model_base": 256}, (0.1, None)),
    ],
)
def test_scale_and_cap_of_logits_are_read_under_each_familys_name(
    model_type: str, keys: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    assert logit_transform(CONFIG_MAPPING[model_type](**keys)) == expected
