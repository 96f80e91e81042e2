"""Memory of learner, critic, reward model and engine, by part, estimated from model shape and config, in bytes.

P parameters, n learners, b bytes per weight (2 in bfloat16, 4 in float32). ZeRO divides by n:

    stage   weights   gradients (float32)   master weights and moments (4 + 8 bytes)
    0       b P       see below             12 P
    1       b P       4 P                   12 P / n
    2       b P       4 P / n               12 P / n
    3       b P / n   4 P / n               12 P / n

Stage 0 keeps gradients in the model's dtype and copies them to float32 for the step. It has no master weights for a
float32 model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf.algo.sizes import HEAD_TILE, REDUCE_BUCKET, WHOLE_TOKENS
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import LEARNER, Role
from rlhf.config.sections import TrainedConfig
from rlhf.plan.model_shape import ModelShape, shape_at

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4

REDUCE_BUFFERS = 2 * REDUCE_BUCKET  # elements in two buckets; on CPU one bucket has this size, DeepSpeed's default
ZERO3_MAX_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's default

# Assumed, on GPU: CUDA context, NCCL and fragmentation of a learner; profile run, CUDA graphs and sampler of an engine.
GPU_OVERHEAD = {"learner": 2 * GIB, "engine": 3 * GIB}
# Measured, on CPU: resident memory of the processes around a model of 1 M parameters, KV cache not counted.
CPU_OVERHEAD = {"learner": 1 * GIB, "engine": 2 * GIB}


Use = Literal["work", "state", "movable"]


@dataclass(frozen=True)
class Part:
    """One row of the estimate: name, bytes, and how they are computed.

    Attributes:
        use: `state` and `movable` are held between updates; `movable` can be in host memory while engines sample.
    """

    name: str
    size: float
    how: str
    use: Use = "work"


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an engine (on CPU: the engine's processes)."""

    parts: tuple[Part, ...]
    kv_bytes_per_token: int
    kv_tokens: int


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one actor of a role; no parts if its model is not known."""

    role: Role
    parts: tuple[Part, ...]


def memory_of_roles(config: GRPOConfig, policy: ModelShape) -> list[RoleMemory]:
    """The memory of every role of the run; `policy` is the shape of model.path."""
    estimates = []
    for role in config.roles():
        shape = policy if role.model == config.model.path else shape_at(role.model)
        estimates.append(RoleMemory(role, () if shape is None else _estimator(role)(shape, config)))
    return estimates


def _estimator(role: Role) -> Callable[[ModelShape, GRPOConfig], tuple[Part, ...]]:
    module, name = role.memory.split(":")
    estimator: Callable[[ModelShape, GRPOConfig], tuple[Part, ...]] = getattr(importlib.import_module(module), name)
    return estimator


def checkpoint_bytes(config: TrainingProgramConfig, policy: ModelShape | None) -> int | None:
    """One checkpoint: float32 weights and moments of all trained models, float32 weights of a changing reference.

    Args:
        policy: the shape of model.path.

    Returns:
        None if the shape of a trained model is not known.
    """
    size = 0
    for role, _ in config.trained_roles():
        shape = policy if role.model == config.model.path else shape_at(role.model)
        if shape is None:
            return None
        count = scalar_parameters(shape) if role.scalar else shape.parameters
        moves = config.reference_moves and role.name == LEARNER
        size += (MASTER_BYTES + MOMENTS_BYTES) * count + MASTER_BYTES * count * moves
    return size


def total(parts: Sequence[Part]) -> float:
    return sum(part.size for part in parts)


def kept_while_sampling(parts: Sequence[Part], config: GRPOConfig) -> float:
    """What a trained role holds on its GPU while engines on the same GPU sample."""
    uses = ("state",) if config.cluster.offload_while_sampling else ("state", "movable")
    return total([part for part in parts if part.use in uses])


def learner_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one learner at the peak of an update."""
    return (*learner_state(shape, config), *learner_work(shape, config))


def learner_state(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """What a learner holds between updates: weights, optimizer, reference."""
    parts = _trained_state(config.learner, config, shape.parameters)
    if config.needs_reference:
        dtype, ranks = config.model.dtype, config.cluster.learners if config.learner.zero_stage == 3 else 1
        use: Use = "state" if ranks > 1 else "movable"  # a share at ZeRO-3 stays
        parts.append(replace(_divided(f"reference, {dtype}", shape.parameters, BYTES[dtype], ranks), use=use))
    return tuple(parts)


def critic_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one rank of the critic at the peak of an update; its head gives one number per token, not logits.

    Args:
        shape: the critic's model.
    """
    section: TrainedConfig = config.critic  # type: ignore[attr-defined]  # of PPO alone
    count = scalar_parameters(shape)
    head = config.learner.max_tokens_per_microbatch * shape.hidden * 2 * 4
    return (
        *_trained_state(section, config, count),
        *_trained_work(section, config, count),
        _activations(shape, config),
        Part("head: states in float32, gradient", float(head), "one number per token"),
        _overhead(config),
    )


def reward_model_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """One copy of the reward model: its weights, and the activations of one layer, since there is no backward pass."""
    assert config.reward_model is not None
    dtype, tokens = config.reward_model.dtype, config.reward_model.max_tokens_per_batch
    layer = layer_activation_bytes(shape, b=BYTES[dtype])
    return (
        _divided(f"weights, {dtype}", scalar_parameters(shape), BYTES[dtype]),
        Part("activations of one layer", float(tokens * layer), f"{tokens:,} tokens x {_kib(layer)}"),
        _overhead(config),
    )


def scalar_parameters(shape: ModelShape) -> int:
    """Parameters if a head of one number, without bias, replaces the language model's head."""
    return shape.parameters - shape.head_parameters + shape.hidden


def _trained_state(learner: TrainedConfig, config: GRPOConfig, count: int) -> list[Part]:
    """Weights and optimizer state of one rank of a trained model with `count` parameters."""
    dtype = config.model.dtype
    stage, ranks, b = learner.zero_stage, config.cluster.learners, BYTES[dtype]
    by = ranks if stage >= 1 else 1
    weights = replace(_divided(f"weights, {dtype}", count, b, ranks if stage == 3 else 1), use="state")
    if learner.offload_optimizer:
        host = _share(count, MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES, by)
        return [weights, Part("optimizer", 0.0, f"in host memory: {host}")]
    optimizer = [_divided("Adam's two moments, float32", count, MOMENTS_BYTES, by)]
    if not (stage == 0 and dtype == "float32"):
        optimizer.insert(0, _divided("master weights, float32", count, MASTER_BYTES, by))
    return [weights, *(replace(part, use="movable") for part in optimizer)]


def learner_work(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """What an update adds: gradients, their buffers, activations, and the buffers of the head."""
    work = _trained_work(config.learner, config, shape.parameters)
    return (*work, _activations(shape, config), _head(shape, config), _overhead(config))


def _trained_work(learner: TrainedConfig, config: GRPOConfig, count: int) -> list[Part]:
    """Gradients and their buffers."""
    stage, ranks, b = learner.zero_stage, config.cluster.learners, BYTES[config.model.dtype]
    parts: list[Part] = []
    by = ranks if stage >= 2 else 1
    # DeepSpeed's buffers have full size for any model; on CPU the unfilled part takes no memory. ZeRO-1's are float32.
    elements = REDUCE_BUFFERS if config.cluster.device == "cuda" else min(REDUCE_BUFFERS, count)
    width = GRADIENT_BYTES if stage == 1 else b
    size = width * elements if stage >= 1 else 0
    bucket = Part("reduction buffer", float(size), f"bucket of {elements / 1e9:.2f} B x {width}")
    if learner.offload_optimizer:
        parts.append(Part("gradients", b * count / by, f"{_share(count, b, by)}, then in host memory"))
        parts.append(bucket)
    elif stage == 0:
        parts.append(_divided("gradients", count, b))
        if b != GRADIENT_BYTES:
            parts.append(_divided("gradients of the step, float32", count, GRADIENT_BYTES))
    else:
        parts.append(_divided("gradients, float32", count, GRADIENT_BYTES, by))
        copy = GRADIENT_BYTES * count / ranks
        how = f"{_share(count, GRADIENT_BYTES, ranks)} + {bucket.how}"
        parts.append(Part("gradients, added and reduced", copy + bucket.size, how))
    if stage == 3:
        parts.append(_divided("gathered weights", min(ZERO3_MAX_LIVE_PARAMETERS, count), b))
    return parts


def _overhead(config: GRPOConfig) -> Part:
    if config.cluster.device == "cuda":
        return Part("CUDA, NCCL, fragmentation", GPU_OVERHEAD["learner"], "assumed")
    return Part("process", CPU_OVERHEAD["learner"], "assumed")


def layer_activation_bytes(shape: ModelShape, *, b: int) -> int:
    """Bytes that one layer keeps per token for its backward pass.

    A norm keeps its input in float32 and the normalized values: (4 + b) H, twice. The projections keep their inputs:
    2 b H. Attention keeps q, k, v and its output: b (2 n d + 2 k d), q and k once more before their norms if they have
    any. The gated MLP keeps gate, its activation, up and the product: 4 b I, for each expert that is active.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (4 + b) * shape.hidden + shape.qk_norm * (4 + b) * (queries + keys)
    mlp = 4 * b * shape.intermediate
    if shape.sparse_layers:
        mlp = max(
            mlp if shape.sparse_layers < shape.layers else 0,
            shape.active_experts * (4 * b * shape.expert_intermediate + 2 * b * shape.hidden),
        )
    return norms + 2 * b * shape.hidden + b * (2 * queries + 2 * keys) + mlp


def _activations(shape: ModelShape, config: GRPOConfig) -> Part:
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    # Attention keeps keys and values once more for each sequence that begins with them.
    repeated = (WHOLE_TOKENS - 1) * 2 * b * shape.kv_heads * shape.head_dim
    layer = layer_activation_bytes(shape, b=b) + repeated
    if config.model.gradient_checkpointing:
        inputs = b * shape.hidden * shape.layers
        how = f"{tokens:,} tokens x ({_kib(inputs)} + {_kib(layer)})"
        return Part("activations, checkpointed", float(tokens * (inputs + layer)), how)
    how = f"{tokens:,} tokens x {shape.layers} layers x {_kib(layer)}"
    return Part("activations", float(tokens * shape.layers * layer), how)


def _head(shape: ModelShape, config: GRPOConfig) -> Part:
    """Tiles of logits, gradient of the states, gradient of the head's weight (never the tokens x vocabulary matrix)."""
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    tile_tokens, tile_vocabulary = HEAD_TILE[config.cluster.device]
    rows, columns = min(tile_tokens, tokens), min(tile_vocabulary, shape.vocabulary)
    # On GPU float32 products and their gradient; on CPU the product, and float32 logits, scratch and gradient.
    buffers = b + 4 * (1 if config.cluster.device == "cuda" else 3)
    states = tokens * shape.hidden * (2 * b + 8)  # chosen states, the norm's output, float32 gradients, added up
    states += rows * shape.hidden * 4  # a tile's share of the gradients
    weight = shape.embedding_parameters * b + columns * shape.hidden * 4
    return Part(
        "head: tiles of logits, gradients",
        float(rows * columns * buffers + states + weight),
        f"{rows:,} x {columns:,} logits at a time",
    )


def engine_memory(shape: ModelShape, config: GRPOConfig) -> EngineMemory:
    """Weights, working memory, and the KV cache in the remaining memory."""
    cluster, rollout, dtype = config.cluster, config.rollout, config.model.dtype
    b, parallel = BYTES[dtype], cluster.tensor_parallel
    kv_heads = max(1, -(-shape.kv_heads // parallel))  # fewer heads than GPUs: each GPU holds one
    numbers = shape.latent_dim or 2 * kv_heads * shape.head_dim  # a latent is whole on each GPU
    per_token = shape.layers_with_attention * numbers * b
    weights = b * shape.parameters / parallel
    parts = [Part(f"weights, {dtype}", weights, _share(shape.parameters, b, parallel))]
    if cluster.device == "cuda":
        parts.append(Part("working memory, CUDA graphs", GPU_OVERHEAD["engine"], "assumed"))
        room = rollout.gpu_memory_utilization * cluster.gpu_memory_gib * GIB - total(tuple(parts))
        how = f"rest of {rollout.gpu_memory_utilization:g} x {cluster.gpu_memory_gib:g} GiB"
    else:
        parts.append(Part("processes", CPU_OVERHEAD["engine"], "assumed"))
        room, how = float(rollout.kv_cache_gib * GIB), "rollout.kv_cache_gib"
    tokens = max(0, int(room // per_token))
    parts.append(Part("KV cache", max(0.0, room), how))
    return EngineMemory(tuple(parts), per_token, tokens)


def engine_parts(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one GPU of an engine."""
    return engine_memory(shape, config).parts


def _divided(name: str, count: int, size: int, by: int = 1) -> Part:
    """`count` numbers of `size` bytes, divided among `by` ranks."""
    return Part(name, size * count / by, _share(count, size, by))


def _share(count: int, size: int, by: int) -> str:
    return f"{count / 1e9:.3f} B x {size} bytes" + (f" / {by}" if by > 1 else "")


def _kib(size: float) -> str:
    return f"{size / 1024:.1f} KiB"
