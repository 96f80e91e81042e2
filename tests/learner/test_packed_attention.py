"""Packed attention: each token sees its own segment's past and nothing else, for every model that a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DogeConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen3MoeConfig,
)
from worlds import pack_rows, rollout_of

from rlhf.algo.packing import pack, shared_beginnings
from rlhf.config.sections import ModelConfig
from rlhf.learner.packed_attention import PACKED, Scoring, Window, flex_scored_attention, packed_attention
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, check_packed, load_policy, prepare_transformer
from rlhf.learner.segments import segments_of, take_rows
from rlhf.learner.value_model import ValueModel
from rlhf.types import Rollout

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "qwen2, tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen2, untied": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=False)),
    "llama, attention bias": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama, untied": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)),
}
LENGTHS = (2, 3, 3, 40, 31, 30, 7, 64, 63, 5)


def make_rollouts(seed: int = 0) -> list[Rollout]:
    rng = np.random.default_rng(seed)
    rollouts = []
    for length in LENGTHS:
        ids = rng.integers(0, 97, length).astype(np.int32)
        mask = np.arange(length) >= 1 + int(rng.integers(0, length - 1))
        rollouts.append(rollout_of(ids, mask))
    return rollouts


def make_siblings(seed: int = 0) -> list[Rollout]:
    """Samples of three prompts of 12, 1 and 30 tokens, all behind the same 4; in each, responses that begin alike."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, 97, 4)
    rollouts = []
    for length in (12, 1, 30):
        question = rng.integers(0, 97, length)
        first = rng.integers(0, 97, 9)
        for same, more in ((9, 0), (5, 20), (0, 3), (5, 1), (9, 0), (2, 33)):
            response = np.concatenate([first[:same], rng.integers(0, 97, more)])
            ids = np.concatenate([system, question, response]).astype(np.int32)
            mask = np.arange(len(ids)) >= 4 + length
            rollouts.append(rollout_of(ids, mask))
    return rollouts


def in_order(rollouts: list[Rollout]) -> list[int]:
    return sorted(range(len(rollouts)), key=lambda i: rollouts[i].sequences[0].token_ids.tobytes())


BATCHES = {
    "strangers": (make_rollouts(), [3, 0, 7, 9, 1, 8, 2, 4, 6, 5]),
    "siblings": (make_siblings(), in_order(make_siblings())),
    "siblings in disorder": (make_siblings(), [7, 3, 0, 1, 17, 12, 4, 2, 9, 8, 5, 6, 16, 10, 11, 13, 14, 15]),
}


def test_positions_restart_at_every_sequence() -> None:
    tokens = DeviceTokens.of(pack([np.arange(3), np.arange(4)]), torch.device("cpu"))
    assert tokens.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize("name", BATCHES)
def test_every_computed_token_is_laid_out_and_put_back(name: str) -> None:
    packed = pack_rows(*BATCHES[name])
    lengths, shared = np.diff(packed.cu_seqlens), shared_beginnings(packed)
    segments = segments_of(packed.cu_seqlens, shared, torch.device("cpu"))
    computed = torch.arange(lengths.sum() - shared.sum())
    blocks, keys, queries, among_keys, among_queries = segments.layout
    assert sum(len(block.positions) * block.keys for block in blocks) == len(keys) <= lengths.sum() / 0.75
    assert sum(block.positions.numel() for block in blocks) == len(queries)
    assert len(queries) <= 2 * len(computed)  # what is shared is not a query again
    assert torch.equal(keys[among_keys], computed)
    assert torch.equal(queries[among_queries], computed)
    assert segments.cu_computed.diff().tolist() == (lengths - shared).tolist()
    assert (segments.expand is None) == (not shared.any())
    if segments.expand is not None:
        ids = packed.token_ids[segments.computed]
        assert (ids[segments.expand] == packed.token_ids).all()


def test_in_the_order_of_their_tokens_no_beginning_is_computed_twice() -> None:
    rollouts, order = BATCHES["siblings"]
    packed = pack_rows(rollouts, order)
    sequences = [rollout.sequences[0].token_ids for rollout in rollouts]
    beginnings = {ids[: n + 1].tobytes() for ids in sequences for n in range(len(ids))}
    computed = len(packed.token_ids) - int(shared_beginnings(packed).sum())
    twins = len(rollouts) - len({ids.tobytes() for ids in sequences})  # the last token of each is its own
    assert twins > 0
    assert computed == len(beginnings) + twins < 0.6 * len(packed.token_ids)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
ATTENTIONS: dict[str, tuple[Window | None, dict[str, Any]]] = {
    "whole past": (None, {}),
    "window": (Window(7, chunked=False), {}),
    "chunks": (Window(7, chunked=True), {}),
    "caps": (None, {"softcap": 1.5, "scaling": 0.15}),  # both fractions, as of Gemma 2
    "sinks in a window": (Window(7, chunked=False), {"s_aux": SINKS}),
    "caps and sinks": (None, {"softcap": 1.0, "s_aux": SINKS}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["caps", "sinks in a window", "caps and sinks"])
@pytest.mark.parametrize("batch", BATCHES)
def test_capped_scores_and_sinks_are_the_same_by_flex_attention_as_in_blocks(batch: str, name: str) -> None:
    window, options = ATTENTIONS[name]
    packed = pack_rows(*BATCHES[batch])
    segments = segments_of(packed.cu_seqlens, shared_beginnings(packed), torch.device("cpu"))
    q, k, v = (torch.randn(1, heads, len(segments.computed), 32, dtype=torch.float64) for heads in (4, 2, 2))
    in_blocks, _ = packed_attention(torch.nn.Identity(), q, k, v, window, segments=segments, **options)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    k, v = k[torch.from_numpy(segments.source)], v[torch.from_numpy(segments.source)]
    scoring = Scoring(*(options.get("scaling"), window and window.size, options.get("softcap"), options.get("s_aux")))
    by_flex = flex_scored_attention(q, k, v, segments, scoring)
    torch.testing.assert_close(by_flex, in_blocks[0], rtol=0, atol=1e-12)


def test_a_window_that_no_sequence_exceeds_makes_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_rows(*BATCHES["strangers"])
    segments = segments_of(packed.cu_seqlens, shared_beginnings(packed), torch.device("cpu"))
    causal = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def watched(*arguments: Any, is_causal: bool, **options: Any) -> torch.Tensor:
        causal.append(is_causal)
        return sdpa(*arguments, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    q, k, v = (torch.randn(1, heads, len(segments.computed), 32) for heads in (4, 2, 2))
    for window in (Window(64, chunked=False), Window(64, chunked=True), Window(63, chunked=False)):
        packed_attention(torch.nn.Identity(), q, k, v, window, segments=segments)
    first, *others = segments.layout.blocks
    assert first.positions.shape == (2, 64)
    assert causal == [True] * (1 + len(others)) * 2 + [False] + [True] * len(others)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("batch", BATCHES)
def test_on_a_gpu_attention_and_its_gradients_are_those_of_the_cpu(batch: str, name: str) -> None:
    window, options = ATTENTIONS[name]
    packed = pack_rows(*BATCHES[batch])
    shared = shared_beginnings(packed)
    computed = len(packed.token_ids) - int(shared.sum())
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, computed, 64, generator=generator) for heads in (4, 2, 2)]
    pull = torch.randn(1, computed, 4, 64, generator=generator)
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        segments = segments_of(packed.cu_seqlens, shared, torch.device(device))
        q, k, v = (x.to(device, dtype).requires_grad_() for x in states)
        sinks = SINKS.to(device, dtype).requires_grad_() if "s_aux" in options else None
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, window, segments=segments, **options | {"s_aux": sinks})
        out.backward(pull.to(device, dtype))
        results.append([out, *(x.grad for x in (q, k, v, sinks) if x is not None)])
    for exact, half in zip(*results, strict=True):
        assert exact is not None
        assert half is not None
        assert (half.double().cpu() - exact).norm() < 0.02 * exact.norm()


def test_the_gradient_of_a_beginning_that_hundreds_share_is_added_up_in_float32() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(1000, dtype=torch.int64)
    index[-1] = 1
    take_rows(x, index).backward(torch.full((1000, 3), 0.01, dtype=torch.bfloat16))
    assert x.grad is not None
    expected = torch.tensor([999, 1.0])[:, None] * torch.tensor(0.01).bfloat16().float()
    torch.testing.assert_close(x.grad.float(), expected.expand(2, 3), rtol=2**-8, atol=0)


CRITICS = {
    "critic, qwen2": lambda: Qwen2ForSequenceClassification(Qwen2Config(**SMALL, num_labels=1)),
    "critic, llama, attention bias": lambda: LlamaForSequenceClassification(
        LlamaConfig(**SMALL, attention_bias=True, num_labels=1)
    ),
}


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", [*MODELS, *CRITICS])
def test_packed_outputs_and_gradients_are_those_of_each_sequence_alone(name: str, batch: str) -> None:
    """Log-probs of a policy, values of a critic."""
    torch.manual_seed(0)
    make = (MODELS | CRITICS)[name]
    plain, packed_model = make().double(), make().double()
    packed_model.load_state_dict(plain.state_dict())
    packed_model.set_attn_implementation(PACKED)

    def outputs_alone(ids: torch.Tensor) -> torch.Tensor:
        if name in CRITICS:
            return plain.score(plain.model(input_ids=ids[None]).last_hidden_state[0, :-1]).squeeze(-1)
        log_softmax = torch.log_softmax(plain(input_ids=ids[None]).logits[0, :-1] / 0.7, -1)
        return log_softmax.gather(-1, ids[1:, None])[:, 0]

    rollouts, order = BATCHES[batch]
    row = pack_rows(rollouts, order)
    tokens = DeviceTokens.of(row, torch.device("cpu"))
    if name in CRITICS:
        packed = ValueModel(packed_model)(tokens)
    else:
        packed = PolicyModel(packed_model, temperature=0.7)(tokens).logprobs
    weights = torch.linspace(0.5, 1.5, len(packed), dtype=packed.dtype)
    (packed * weights).sum().backward()

    expected = torch.zeros_like(packed)
    for start, (sequence,) in zip(row.cu_seqlens.tolist(), [rollouts[i].sequences for i in order], strict=False):
        alone = outputs_alone(torch.from_numpy(sequence.token_ids).long())
        alone = torch.where(torch.from_numpy(sequence.response_mask)[1:], alone, 0.0)
        expected = expected.index_add(0, start + 1 + torch.arange(len(alone)), alone.to(expected.dtype))
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    (expected * weights).sum().backward()
    for (parameter, value), other in zip(packed_model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            value.grad, other.grad, rtol=1e-9, atol=1e-11, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def test_gradient_checkpointing_changes_neither_logprobs_nor_gradients() -> None:
    grads = []
    for checkpointing in (False, "selective", True):
        torch.manual_seed(0)
        model = MODELS["qwen2, tied"]()
        model.set_attn_implementation(PACKED)
        prepare_transformer(model, gradient_checkpointing=checkpointing)
        assert any(layer.training for layer in model.model.layers) == bool(checkpointing)
        policy = PolicyModel(model, temperature=1.0)
        logprobs = policy(DeviceTokens.of(pack_rows(make_rollouts(), range(10)), torch.device("cpu"))).logprobs
        logprobs.sum().backward()
        grads.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*grads, strict=True))


UNPACKABLE = {
    "alibi in its own attention": (
        lambda: BloomConfig(vocab_size=97, hidden_size=48, n_layer=1, n_head=4),
        "its attention cannot be replaced",
    ),
    "attention classes of its own": (
        lambda: FalconConfig(vocab_size=97, hidden_size=48, num_hidden_layers=1, num_attention_heads=4),
        "its attention cannot be replaced",
    ),
    "masks made in its layers": (
        lambda: DogeConfig(**SMALL),
        "its attention mask has a rule of its own",
    ),
}


def load_and_check(path: str, dtype: str) -> None:
    policy = load_policy(ModelConfig(path=path, dtype=dtype, gradient_checkpointing=True), temperature=1.0)
    cpu = torch.device("cpu")
    check_packed(lambda tokens: policy(tokens).logprobs, cpu, dtype=dtype, key="model.path", path=path)


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_whose_sequences_would_see_each_other_in_a_row_is_refused(name: str, tmp_path: Path) -> None:
    config, reason = UNPACKABLE[name]
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=rf"model\.path=.*model: .* since {reason}\. Use "):
        load_and_check(str(tmp_path / "model"), "float32")


def test_a_model_that_mixes_tokens_in_a_way_of_its_own_is_refused(tmp_path: Path) -> None:
    MODELS["llama, tied"]().save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), dtype="float32"), temperature=1.0)
    policy.transformer.get_input_embeddings().register_forward_hook(lambda _, __, states: states.cumsum(1))
    with pytest.raises(ValueError, match=r"since a sequence is affected by the sequences before it in the row\. Use "):
        check_packed(
            lambda tokens: policy(tokens).logprobs, torch.device("cpu"), dtype="float32", key="model.path", path="m"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_with_learned_positions_and_with_experts_are_packed(dtype: str, tmp_path: Path) -> None:
    for config in (
        GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=4, n_positions=64),
        Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / config.model_type)
        load_and_check(str(tmp_path / config.model_type), dtype)
