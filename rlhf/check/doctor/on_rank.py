"""The doctor's measurements inside a learner; `TrainedRank.apply` calls these functions there.

Kernels are compared with plain code in float32: the largest relative error of outputs and gradients.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.algo import logprobs
from rlhf.algo.packing import pack
from rlhf.config.sections import ScheduleConfig
from rlhf.learner import packed_attention
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer
from rlhf.learner.update import policy_microbatch
from rlhf.log.reductions import StepMetrics, merge_metrics

if TYPE_CHECKING:
    from rlhf.learner.policy import Learner
    from rlhf.learner.rank import TrainedRank
    from rlhf.types import Denominators, PolicyTargets

# Relative error that rounding explains. Measured on CPU: 0.002 to 0.01 in bfloat16, below 1e-6 in float32.
TOLERANCE = {"bfloat16": 0.03, "float32": 1e-4}
PROMPT, RESPONSES = 96, (40, 150, 1, 3, 7, 5, 300)  # tokens; the prompt begins all but the last sequence
HEAD_TOKENS = 128

# Tiny models: one dense, and one for each kind of mixer without attention. Their weights are so large that each part of
# the model matters, and so small that rounding does not.
TINY_SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1,
}  # fmt: skip
TINY_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},  # norms, also of queries and keys, rotary positions, a gated MLP
    "qwen3_5_text": {  # gated delta rule
        "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "initializer_range": 0.02,
    },
    "bamba": {  # Mamba 2
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 32, "mamba_chunk_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},  # short convolution
}  # fmt: skip


# --- kernels against float32 ---


def attention_error(rank: TrainedRank, heads: int, kv_heads: int, width: int, dtype: str) -> float:
    """Packed attention of sequences that share their beginnings, forward and backward; the worst relative error."""
    tokens = DeviceTokens.of(_packed_row(vocabulary=1000), rank.device)
    assert tokens.segments.expand is not None
    computed, source = len(tokens.segments.computed), torch.from_numpy(tokens.segments.source).to(rank.device)
    generator = torch.Generator().manual_seed(0)
    shapes = [(computed, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    *inputs, seed = (torch.randn(s, generator=generator).to(rank.device, getattr(torch, dtype)) for s in shapes)

    def packed(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
        out, _ = packed_attention.packed_attention(torch.nn.Module(), q, k, v, None, segments=tokens.segments)
        return out[0]

    def plain(*qkv: Tensor) -> Tensor:
        outs, bounds = [], tokens.segments.bounds
        for start, end, shared in zip(bounds[:-1], bounds[1:], tokens.segments.shared, strict=True):
            q, k, v = (x[source[start:end]].transpose(0, 1)[None] for x in qkv)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            outs.append(out[0].transpose(0, 1)[int(shared) :])
        return torch.cat(outs)

    exact = _output_and_gradients(plain, [x.float() for x in inputs], seed)
    return _worst_error(_output_and_gradients(packed, inputs, seed), exact)


def head_error(rank: TrainedRank, vocabulary: int, hidden: int, dtype: str) -> float:
    """The relative error of the fused head's log-probs and gradients, compared with whole logits in float32."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (HEAD_TOKENS,), generator=generator).to(rank.device)
    scale, chosen = hidden**-0.5, getattr(torch, dtype)
    states = torch.randn(HEAD_TOKENS, hidden, generator=generator).to(rank.device, chosen)
    weight = (torch.randn(vocabulary, hidden, generator=generator) * scale).to(rank.device, chosen)
    mask = torch.arange(HEAD_TOKENS, device=rank.device) > 0
    bounds = torch.tensor([0, HEAD_TOKENS], device=rank.device)

    def fused(states: Tensor, weight: Tensor) -> Tensor:
        return logprobs.token_logprobs(states, weight, ids, mask, bounds).logprobs[1:]

    def whole(states: Tensor, weight: Tensor) -> Tensor:
        return torch.log_softmax(states[:-1] @ weight.T, -1).gather(1, ids[1:, None])[:, 0]

    seed = torch.randn(HEAD_TOKENS - 1, generator=generator).to(rank.device)
    inputs = [states, weight]
    exact = _output_and_gradients(whole, [x.float() for x in inputs], seed)
    return _worst_error(_output_and_gradients(fused, inputs, seed), exact)


def model_error(rank: TrainedRank, model_type: str, dtype: str) -> float:
    """A tiny model's packed log-probs and their gradient against one sequence at a time in float32 on CPU."""
    row = _packed_row(vocabulary=128)
    sequences = np.split(row.token_ids, row.cu_seqlens[1:-1])
    cpu = torch.device("cpu")
    packed, single = _tiny_model(model_type, dtype, rank.device), _tiny_model(model_type, "float32", cpu)
    single.load_state_dict({name: tensor.float().cpu() for name, tensor in packed.state_dict().items()})
    own = packed(DeviceTokens.of(row, rank.device)).logprobs
    plain = torch.cat([single(DeviceTokens.of(pack([ids]), cpu)).logprobs for ids in sequences])
    for row_logprobs in (own, plain):
        row_logprobs.sum().backward()
    gradients = [
        torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
        for model in (packed, single)
    ]
    middle = plain.mean()  # the level of any distribution over the vocabulary; the model's part is around it
    return _worst_error([own.cpu() - middle, gradients[0]], [plain - middle, gradients[1]])


def _tiny_model(model_type: str, dtype: str, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **TINY_SIZES | TINY_MODELS[model_type], pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=packed_attention.PACKED
        )
    prepare_transformer(transformer, gradient_checkpointing=False)
    return PolicyModel(transformer.to(device), temperature=1.0)


def _packed_row(*, vocabulary: int) -> Any:
    """Sequences that begin with one prompt, and one that does not."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocabulary, PROMPT)
    *alike, other = (rng.integers(0, vocabulary, length) for length in RESPONSES)
    return pack([*(np.concatenate([prompt, ids]).astype(np.int32) for ids in alike), other.astype(np.int32)])


def _output_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """The output of a function, and its gradients for an incoming gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, seed.to(out.dtype))]


def _worst_error(values: Iterable[Tensor], exact: Iterable[Tensor]) -> float:
    """The largest relative error of pairs of tensors; not finite if a value is not."""
    errors = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(values, exact, strict=True)]
    return float(torch.stack(errors).max().detach())


# --- updates ---


def tensor_hashes(rank: TrainedRank) -> dict[str, int]:
    """A hash of the bits of each tensor of the model; a collective at ZeRO-3."""
    tensors = rank.each_whole(rank.published.items())
    return {name: int(torch.hash_tensor(tensor.detach()).item()) for name, tensor in tensors}


def old_logprobs(rank: Learner) -> tuple[np.ndarray]:
    """Log-probs of the step's tokens before an update, even if the run itself does not compute them."""
    return (rank.run_passes(lambda tokens: rank.deepspeed(tokens).logprobs),)


@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """The report of one rank about an update."""

    metrics: StepMetrics
    moved: tuple[str, ...]  # names of the tensors that changed
    tensors: int  # number of all tensors
    peak_bytes: int  # the most memory that torch held on the GPU; on CPU, the largest size of the process


def update(rank: Learner, targets: PolicyTargets, lr: float) -> UpdateReport:
    """One pass of optimizer steps at a fixed learning rate, outside of the run's schedule."""

    def loss(tokens: DeviceTokens, own: PolicyTargets, denominators: Denominators) -> tuple[Tensor, StepMetrics]:
        return policy_microbatch(rank.deepspeed, tokens, own, denominators, rank.config)

    before, training, done = tensor_hashes(rank), rank.training, rank.updates_done
    optimizer = training.section.optimizer.model_copy(update={"lr": lr})
    section = training.section.model_copy(update={"optimizer": optimizer, "schedule": ScheduleConfig()})
    rank.training, rank.updates_done = dataclasses.replace(training, section=section), 0
    if rank.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(rank.device)
    try:
        metrics = merge_metrics([update.metrics for update in rank.run_updates(targets, loss)])
    finally:
        rank.training, rank.updates_done = training, done
    after = tensor_hashes(rank)
    moved = tuple(name for name in after if after[name] != before[name])
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if rank.device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(rank.device)
    return UpdateReport(metrics, moved, len(after), peak_bytes)


def free_bytes(rank: TrainedRank) -> int:
    """Free memory of the rank's GPU; on CPU, of its node."""
    if rank.device.type == "cuda":
        return torch.cuda.mem_get_info(rank.device)[0]
    return psutil.virtual_memory().available
