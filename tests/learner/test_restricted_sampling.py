"""Tokens that were sampled from a part of the vocabulary: update, old policy and reference use that part too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_families import make_family
from torch import Tensor
from worlds import share_of_loss

from rlhf.algo.packing import filler, pack
from rlhf.learner.packed_attention import PACKED
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer, transformer_outputs
from rlhf.log.reductions import merge_metrics
from rlhf.types import PackedTokens, Support

CPU = torch.device("cpu")
SEQUENCES = [np.array(x, np.int32) for x in ([1, 2, 3, 4, 9], [1, 2, 3, 7, 8, 2], [5, 6, 7], [5, 6, 3, 3])]
MASKS = [np.arange(len(x)) > 1 for x in SEQUENCES]
TEMPERATURE = 0.8


def recorded(row: int) -> Support:
    """Supports of 1 to 6 tokens with the sampled one among them; those of the prompt and of every third are empty."""
    rng = np.random.default_rng(row)
    kept = [
        np.union1d(rng.integers(0, 16, position), [token]) if MASKS[row][position] and position % 3 else np.zeros(0)
        for position, token in enumerate(SEQUENCES[row])
    ]
    return Support.from_sizes(np.concatenate(kept), np.array([len(ids) for ids in kept]))


def packed(rows: list[int]) -> PackedTokens:
    if not rows:
        return filler()
    return pack([SEQUENCES[i] for i in rows], [MASKS[i] for i in rows], supports=[recorded(i) for i in rows])


@pytest.fixture
def policy() -> PolicyModel:
    torch.manual_seed(0)
    transformer = make_family("qwen3")
    transformer.set_attn_implementation(PACKED)
    prepare_transformer(transformer, gradient_checkpointing=False)
    return PolicyModel(transformer, temperature=TEMPERATURE)


def on_full_logits(policy: PolicyModel, row: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a sequence alone: -inf for the logits outside of the support."""
    support, ids = recorded(row), torch.from_numpy(SEQUENCES[row]).long()
    states = transformer_outputs(policy.transformer, DeviceTokens.of(pack([SEQUENCES[row]]), CPU)).last_hidden_state[0]
    logits = states[:-1] @ policy.transformer.get_output_embeddings().weight.T / TEMPERATURE
    outside = torch.zeros(logits.shape, dtype=torch.bool)
    for position in range(1, len(ids)):
        kept = support.ids[support.offsets[position] : support.offsets[position + 1]]
        if len(kept):
            outside[position - 1] = True
            outside[position - 1, torch.from_numpy(kept).long()] = False
    log_pi = logits.masked_fill(outside, float("-inf")).log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi.clamp(min=-1e9)).sum(-1)
    mask = torch.from_numpy(MASKS[row])[1:]
    return torch.where(mask, log_pi.gather(1, ids[1:, None]).squeeze(1), 0.0), torch.where(mask, entropy, 0.0)


def gradients(policy: PolicyModel) -> Tensor:
    return torch.cat([param.grad.flatten() for param in policy.parameters() if param.grad is not None])


def test_log_probs_entropies_and_gradients_equal_those_of_full_logits(policy: PolicyModel) -> None:
    rows = [0, 1, 2, 3]
    tokens = DeviceTokens.of(packed(rows), CPU)
    assert tokens.segments.expand is not None  # rows 0 and 1 begin alike, with other supports
    out = policy(tokens, for_update=True)
    assert out.entropy is not None
    ours = [out.logprobs, out.entropy]
    plain = [torch.cat(x) for x in zip(*(map(with_first, on_full_logits(policy, row)) for row in rows), strict=True)]
    for value, exact in zip(ours, plain, strict=True):
        assert (value - exact).abs().max() < 1e-5
    results = []
    for logprobs, entropy in (ours, plain):
        policy.zero_grad()
        weights = torch.linspace(-1, 1, len(logprobs))
        ((logprobs + 0.3 * entropy) * weights).sum().backward()
        results.append(gradients(policy))
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()


def with_first(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x])


@pytest.mark.parametrize("old", [False, True], ids=["the policy is the old one", "a pass before the update"])
def test_on_the_first_step_the_ratio_is_exactly_1_and_the_kl_to_the_reference_exactly_0(
    policy: PolicyModel, old: bool
) -> None:
    metrics = share_of_loss(policy, packed([0, 1, 2, 3]), [0, 1, 2, 3], old=old)[1]
    assert metrics["policy/ratio"].value() == metrics["policy/ratio_max"].value() == 1.0
    assert metrics["policy/kl_k1"].value() == metrics["policy/kl_k2"].value() == 0.0


def test_order_and_microbatches_change_neither_loss_nor_gradient(policy: PolicyModel) -> None:
    results = []
    for rows in ([[0, 1, 2, 3]], [[3, 0, 2, 1]], [[2], [1, 0], [3], []]):
        policy.zero_grad()
        parts = []
        for row in rows:
            loss, metrics = share_of_loss(policy, packed(row), row)
            loss.backward()
            parts.append(metrics)
        merged = merge_metrics(parts)
        results.append((merged["policy/loss"].value(), merged["policy/entropy"].value(), gradients(policy)))
    (loss, entropy, grads), *others = results
    for other in others:
        assert other[:2] == pytest.approx((loss, entropy), rel=1e-5)
        assert (other[2] - grads).norm() < 1e-5 * grads.norm()
