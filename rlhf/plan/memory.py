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

from dataclasses import dataclass

from rlhf.config import roles
from rlhf.config.roles import Role
from rlhf.config.run import GRPOConfig
from rlhf.config.sections import TrainedConfig
from rlhf.plan.model import ModelShape, shape_at

GIB = 2**30
BYTES = {"bfloat16": 2, "float32": 4}
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4

# DeepSpeed's defaults, elements
REDUCE_BUCKET = 500_000_000
ZERO3_MAX_LIVE_PARAMETERS = 1_000_000_000

# tiles of logits in rlhf/algo/logprobs.py, tokens x vocabulary; a test compares them
HEAD_TILE = {"cuda": (2048, 16384), "cpu": (1024, 2048)}
WHOLE_TOKENS = 4  # as in rlhf/algo/packing.py; a test compares them

# Assumed, on GPU: CUDA context, NCCL and fragmentation of a learner; profile run, CUDA graphs and sampler of an engine.
GPU_OVERHEAD = {"learner": 2 * GIB, "engine": 3 * GIB}
# Measured, on CPU: resident memory of the processes around a model of 1 M parameters, KV cache not counted.
CPU_OVERHEAD = {"learner": 1 * GIB, "engine": 2 * GIB}


@dataclass(frozen=True)
class Part:
    """One row of the estimate: name, bytes, and how they are computed."""

    name: str
    size: float
    how: str


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
        estimates.append(RoleMemory(role, () if shape is None else _parts_of(role, shape, config)))
    return estimates


def _parts_of(role: Role, shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    match role.name:
        case roles.LEARNER:
            return learner_memory(shape, config)
        case roles.CRITIC:
            assert role.training is not None
            return critic_memory(shape, config, role.training.section)
        case roles.REWARD_MODEL:
            return reward_model_memory(shape, config)
        case roles.ENGINE:
            return engine_memory(shape, config).parts
    raise AssertionError(role.name)


def checkpoint_bytes(config: GRPOConfig, policy: ModelShape | None) -> int | None:
    """One checkpoint: float32 weights and moments of all trained models, float32 weights of a changing reference.

    Args:
        policy: the shape of model.path.

    Returns:
        None if the shape of a trained model is not known.
    """
    size = 0
    for role in config.roles():
        if role.training is None:
            continue
        shape = policy if role.model == config.model.path else shape_at(role.model)
        if shape is None:
            return None
        is_policy = role.name == roles.LEARNER
        count = shape.parameters if is_policy else scalar_parameters(shape)
        size += (MASTER_BYTES + MOMENTS_BYTES) * count + MASTER_BYTES * count * (is_policy and config.reference_moves)
    return size


def total(parts: tuple[Part, ...]) -> float:
    return sum(part.size for part in parts)


def learner_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one learner at the peak of an update."""
    return (*learner_state(shape, config), *learner_work(shape, config))


def learner_state(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """What a learner holds between updates: weights, optimizer, reference."""
    parts = _trained_state(config.learner, config, shape.parameters)
    if config.needs_reference:
        b, dtype = BYTES[config.model.dtype], config.model.dtype
        sharded = config.cluster.learners if config.learner.zero_stage == 3 else 1
        how = _share(shape.parameters, b, sharded)
        parts.append(Part(f"reference, {dtype}", b * shape.parameters / sharded, how))
    return tuple(parts)


def critic_memory(shape: ModelShape, config: GRPOConfig, section: TrainedConfig) -> tuple[Part, ...]:
    """The parts of one rank of the critic at the peak of an update; its head gives one number per token, not logits.

    Args:
        shape: the critic's model.
        section: the critic's section of the config.
    """
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
    b, count = BYTES[dtype], scalar_parameters(shape)
    layer = layer_activation_bytes(shape, b=b)
    return (
        Part(f"weights, {dtype}", float(b * count), _share(count, b, 1)),
        Part("activations of one layer", float(tokens * layer), f"{tokens:,} tokens x {_kib(layer)}"),
        _overhead(config),
    )


def scalar_parameters(shape: ModelShape) -> int:
    """Parameters if a head of one number, without bias, replaces the language model's head."""
    head = 0 if shape.tied_embeddings else shape.embedding_parameters
    return shape.parameters - head + shape.hidden


def _trained_state(learner: TrainedConfig, config: GRPOConfig, count: int) -> list[Part]:
    """Weights and optimizer state of one rank of a trained model with `count` parameters."""
    dtype = config.model.dtype
    stage, ranks, b = learner.zero_stage, config.cluster.learners, BYTES[dtype]
    sharded, by = (ranks if stage == 3 else 1), (ranks if stage >= 1 else 1)
    has_master = not (stage == 0 and dtype == "float32")
    master = MASTER_BYTES * has_master
    parts = [Part(f"weights, {dtype}", b * count / sharded, _share(count, b, sharded))]
    if learner.offload_optimizer:
        parts.append(Part("optimizer", 0.0, f"in host memory: {_share(count, master + MOMENTS_BYTES + 4, by)}"))
    else:
        if has_master:
            parts.append(Part("master weights, float32", master * count / by, _share(count, master, by)))
        parts.append(Part("Adam's two moments, float32", MOMENTS_BYTES * count / by, _share(count, MOMENTS_BYTES, by)))
    return parts


def learner_work(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """What an update adds: gradients, their buffers, activations, and the buffers of the head."""
    work = _trained_work(config.learner, config, shape.parameters)
    return (*work, _activations(shape, config), _head(shape, config), _overhead(config))


def _trained_work(learner: TrainedConfig, config: GRPOConfig, count: int) -> list[Part]:
    """Gradients and their buffers."""
    stage, ranks, b = learner.zero_stage, config.cluster.learners, BYTES[config.model.dtype]
    parts = []
    by = ranks if stage >= 2 else 1
    bucket = b * min(REDUCE_BUCKET, count) if stage >= 1 else 0
    if learner.offload_optimizer:
        parts.append(Part("gradients", b * count / by, f"{_share(count, b, by)}, then in host memory"))
        parts.append(Part("reduction buffer", float(bucket), _bucket(count, b)))
    elif stage == 0:
        parts.append(Part("gradients", b * count, _share(count, b, 1)))
        if b != GRADIENT_BYTES:
            parts.append(Part("gradients of the step, float32", GRADIENT_BYTES * count, _share(count, 4, 1)))
    else:
        parts.append(Part("gradients, float32", GRADIENT_BYTES * count / by, _share(count, GRADIENT_BYTES, by)))
        copy = GRADIENT_BYTES * count / ranks
        how = f"{_share(count, GRADIENT_BYTES, ranks)} + {_bucket(count, b)}"
        parts.append(Part("gradients, added and reduced", copy + bucket, how))
    if stage == 3:
        live = min(ZERO3_MAX_LIVE_PARAMETERS, count)
        parts.append(Part("gathered weights", b * live, _share(live, b, 1)))
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
    buffers = b + 3 * 4  # the product, and float32 logits, scratch and gradient
    states = tokens * shape.hidden * (2 * b + 8)  # chosen states, the norm's output, float32 gradients, added up
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
    per_token = 2 * (shape.attention_layers or shape.layers) * kv_heads * shape.head_dim * b
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


def _share(count: int, size: int, by: int) -> str:
    return f"{count / 1e9:.3f} B x {size} bytes" + (f" / {by}" if by > 1 else "")


def _bucket(count: int, b: int) -> str:
    return f"bucket of {min(REDUCE_BUCKET, count) / 1e9:.2f} B x {b}"


def _kib(size: float) -> str:
    return f"{size / 1024:.1f} KiB"
