"""Every family of models in packed rows: log-probs and gradients are transformers' own, of each sequence alone.

The families are those of tools/model_families.py, with windows of 16 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, MAMBA_AND_ATTENTION, MODEL_TYPES, WINDOW, WRAPPERS, make_family
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from worlds import pack_rows, rollout_of

from rlhf.algo.packing import shared_beginnings
from rlhf.config.sections import ModelConfig
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, check_packed, load_policy, logit_transform
from rlhf.learner.value_model import load_scalar_transformer
from rlhf.types import Rollout

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8
LENGTHS = ((20, (40, 14, 11)), (5, (12,)))  # of two prompts, and of the responses to each
SHARED, NONE_SHARED = (0, 1, 2, 3), (1, 3, 2)  # the row that begins with three alike, and one without any
CPU = torch.device("cpu")
FOUR_LAYERS = ("llama4_text", "gemma4_text", "nemotron_h", "smollm3", "zamba2")  # two would lack a kind, or sharing
EVERY_FOURTH = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # has attention


SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
SWITCHED: dict[str, Any] = {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}
# Windows that a family does not have by default, and scales of queries by their position.
FURTHER: dict[str, dict[str, Any]] = {
    "dots1": {"layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 0.5},
    **dict.fromkeys(("mixtral", "phimoe"), SLIDING),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "smollm3"), SWITCHED),
    "qwen3_moe": {**SLIDING, "use_sliding_window": True},
}
CASES = [*((name, {}) for name in MODEL_TYPES), *FURTHER.items()]


def make_shallow(model_type: str, **changes: Any) -> PreTrainedModel:
    """The model of a family with as few layers as have all its kinds, and what its layers share."""
    text_type = WRAPPERS.get(model_type, (model_type,))[0]
    if text_type in FOUR_LAYERS:
        return make_family(model_type, **changes)
    attention = {"layer_types": MAMBA_AND_ATTENTION} if text_type in EVERY_FOURTH else {}
    kinds = {
        key: value[:2] for key, value in (FAMILIES.get(text_type, {}) | attention).items() if isinstance(value, list)
    }
    return make_family(model_type, num_hidden_layers=2, **kinds, **changes)


def make_rollouts(vocabulary: int) -> list[Rollout]:
    """In both rows two of them make one block, with padding."""
    rng = np.random.default_rng(0)
    rollouts = []
    for length, responses in LENGTHS:
        question = rng.integers(0, vocabulary, length)
        for more in responses:
            ids = np.concatenate([question, rng.integers(0, vocabulary, more)]).astype(np.int32)
            mask = np.arange(len(ids)) >= length
            rollouts.append(rollout_of(ids, mask))
    return rollouts


def weights_of(rollout: Rollout) -> Tensor:
    return torch.linspace(0.5, 1.5, len(rollout.sequences[0].token_ids))


def logprobs_alone(model: PreTrainedModel, rollout: Rollout) -> Tensor:
    """transformers' log-probs of one sequence; [L], 0 outside of the response."""
    (sequence,) = rollout.sequences
    ids = torch.from_numpy(sequence.token_ids).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, ids[1:, None])[:, 0]
    logprobs = torch.where(torch.from_numpy(sequence.response_mask)[1:], logprobs, 0.0)
    return torch.cat([logprobs.new_zeros(1), logprobs])


def compare_gradients(policy: PolicyModel, alone: PreTrainedModel) -> None:
    pairs = []
    own_params = dict(alone.named_parameters())
    for name, param in policy.transformer.named_parameters():
        own = own_params[name]
        if own.grad is None or not own.grad.any():
            assert param.grad is None or not param.grad.any(), name
            continue
        assert param.grad is not None, name
        assert (param.grad - own.grad).norm() <= 1e-2 * own.grad.norm(), name  # a sum that cancels is less exact
        pairs.append((param.grad.flatten(), own.grad.flatten()))
    packed, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    assert (packed - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=[f"{n}, changed" if c else n for n, c in CASES])
def test_packed_rows_have_the_logprobs_and_gradients_of_each_sequence_alone(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    alone = make_shallow(model_type, **changes)
    alone.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), dtype="float32", gradient_checkpointing=True)
    policy = load_policy(config, temperature=TEMPERATURE)
    check_packed(lambda tokens: policy(tokens).logprobs, CPU, dtype="float32", key="model.path", path=model_type)
    alone.set_attn_implementation("eager")
    rollouts = make_rollouts(alone.config.get_text_config().vocab_size)
    expected = [logprobs_alone(alone.eval(), rollout) for rollout in rollouts]
    torch.cat([x * weights_of(rollout) for x, rollout in zip(expected, rollouts, strict=True)]).sum().backward()

    row, row_without = pack_rows(rollouts, SHARED), pack_rows(rollouts, NONE_SHARED)
    assert shared_beginnings(row).any()
    assert not shared_beginnings(row_without).any()
    logprobs = policy(DeviceTokens.of(row, CPU)).logprobs
    torch.testing.assert_close(logprobs, torch.cat([expected[i] for i in SHARED]), rtol=0, atol=1e-5)
    (logprobs * torch.cat([weights_of(rollouts[i]) for i in SHARED])).sum().backward()
    compare_gradients(policy, alone)
    with torch.no_grad():
        logprobs = policy(DeviceTokens.of(row_without, CPU)).logprobs
    torch.testing.assert_close(logprobs, torch.cat([expected[i] for i in NONE_SHARED]), rtol=0, atol=1e-5)


def test_a_critic_of_a_family_without_a_class_for_it_is_refused(tmp_path: Path) -> None:
    make_family("granite").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^critic\.path=.*\bSequenceClassification\b",
    ):
        load_scalar_transformer(str(tmp_path), ModelConfig(path=str(tmp_path)), key="critic.path", new_head="zeros")


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
