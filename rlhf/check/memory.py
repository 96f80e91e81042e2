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

import functools
import math
import os
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rlhf.algo.layer_names import is_adapted
from rlhf.algo.sizes import BUCKET_BYTES, HEAD_TILE, MLP_TILE, REDUCE_BUCKET, WHOLE_TOKENS
from rlhf.check.model_shape import ModelShape, shape_at
from rlhf.check.resources import quantity
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import ENGINE, LEARNER, Role
from rlhf.config.sections import LoraConfig, TrainedConfig
from rlhf.config.supervised import SupervisedConfig

if TYPE_CHECKING:
    from rlhf.types import GPUMemory

GIB = 2**30
TEACHER_TILES = 6  # float32 tiles at a time: both logits, both log-probs, the difference, the gradient
BYTES = {"bfloat16": 2, "float32": 4}
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4

REDUCE_BUFFERS = 2 * REDUCE_BUCKET  # elements in two buckets; on CPU one bucket has this size, DeepSpeed's default
FLATTENED = 500_000_000  # elements that DeepSpeed's ZeRO-1 in bfloat16 flattens at once, and then the next tensor
ZERO3_MAX_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's default

# Assumed, on GPU: CUDA context, NCCL and fragmentation of a learner; profile run, CUDA graphs and sampler of an engine.
# Measured, on CPU: resident memory of the processes around a model of 1 M parameters, KV cache not counted.
OVERHEAD = {
    "cuda": {"learner": ("CUDA, NCCL and others, assumed", 2 * GIB), "engine": ("CUDA graphs, work, assumed", 3 * GIB)},
    "cpu": {"learner": ("process", 1 * GIB), "engine": ("processes", 2 * GIB)},
}
# Assumed, on GPUs that roles share: a learner scores the canary while an engine is awake; a sleeping engine keeps
# CUDA's context and kernels.
CANARY_BYTES = 1 * GIB
ASLEEP_BYTES = 2 * GIB

HEAD = "head: tiles of logits, gradients"
# Bytes per token of a whole row, on each learner that holds a part of it: ids, positions, masks, indices, log-probs,
# targets and terms of the loss; 25 columns of 8 bytes, assumed.
ROW_COLUMNS = 200
# Of these a learner keeps those of all its rows of a step: ids, positions and three indices of 8 bytes, log-probs of 4,
# two masks. Rows that no other learner shares have one index and one mask less.
KEPT_COLUMNS = 46

# `state` and `movable` are held between updates; `movable` can be in host memory while engines sample
Use = Literal["work", "state", "movable"]


@dataclass(frozen=True)
class Part:
    """One row of the estimate, in bytes."""

    name: str
    size: float
    use: Use = "work"


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one actor of a role (one GPU of an engine); no parts if the size of its model is not known."""

    role: Role
    shape: ModelShape | None
    parts: tuple[Part, ...]


def memory_of_roles(config: TrainingProgramConfig, policy: ModelShape) -> list[RoleMemory]:
    """The memory of every role of the run; `policy` is the shape of model.path."""
    estimates = []
    for role in config.roles():
        shape = _role_shape(role, config, policy)
        parts = () if shape is None else pkgutil.resolve_name(role.memory)(shape, config)
        estimates.append(RoleMemory(role, shape, parts))
    return estimates


def _role_shape(role: Role, config: TrainingProgramConfig, policy: ModelShape | None) -> ModelShape | None:
    return policy if role.model == config.model.path else shape_at(role.model)


def checkpoint_bytes(config: TrainingProgramConfig, policy: ModelShape | None) -> int | None:
    """One checkpoint: float32 weights and moments of all trained models, float32 weights of a changing reference.

    None if the shape of a trained model is not known; `policy` is that of model.path.
    """
    size = 0
    for role, _ in config.trained_roles():
        if (count := role_parameters(role, config, policy)) is None:
            return None
        moves = config.reference_moves and role.name == LEARNER
        size += (MASTER_BYTES + MOMENTS_BYTES) * count + MASTER_BYTES * count * moves
    return size


def role_parameters(role: Role, config: TrainingProgramConfig, policy: ModelShape | None) -> int | None:
    """Trained parameters of a role; None if the shape of its model is not known."""
    if (shape := _role_shape(role, config, policy)) is None:
        return None
    return scalar_parameters(shape) if role.scalar else trained_parameters(shape, config.model.lora)


def total(parts: Sequence[Part]) -> float:
    return sum(part.size for part in parts)


def learner_memory(shape: ModelShape, config: TrainingProgramConfig) -> tuple[Part, ...]:
    """The parts of one learner at the peak of an update."""
    if config.scalar_learner:
        return _rank_memory(config.learner, shape, config, scalar_parameters(shape), [], _scalar_head(shape, config))
    lora, compares, others = config.model.lora, False, []
    if isinstance(config, GRPOConfig):
        others = _kept_models(shape, config)
        compares = (teacher := config.algo.teacher) is not None and teacher.in_loss
    count, kept = trained_parameters(shape, lora), 0 if lora is None else shape.parameters
    return _rank_memory(config.learner, shape, config, count, others, _head(shape, config, compares), frozen=kept)


def _kept_models(shape: ModelShape, config: GRPOConfig) -> list[Part]:
    """The reference, teachers and recorded experts that a learner keeps."""
    has_reference = config.needs_reference and not config.model.lora  # with adapters it is the model itself
    kept_models: dict[str, ModelShape | None] = {"reference": shape} if has_reference else {}
    kept_models |= {key: shape_at(path) for key, path in config.further_models.items()}
    dtype, ranks = config.model.dtype, config.cluster.learners if config.learner.zero_stage == 3 else 1
    use: Use = "state" if ranks > 1 else "movable"  # a share at ZeRO-3 stays
    parts = [
        Part(f"{name}, not counted: size not known", 0.0)
        if kept is None
        else _divided(f"{name}, {dtype}", kept.parameters, BYTES[dtype], ranks, use=use)
        for name, kept in kept_models.items()
    ]
    if config.learner.replays_experts:
        tokens = -(-config.rollouts_per_step * config.max_sequence_tokens // config.cluster.learners)
        held, epochs = 2 * shape.layers * shape.active_experts, config.learner.epochs_per_step
        parts.append(Part("recorded experts, int16", float(tokens * held * epochs)))
    return parts


def critic_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one rank of the critic at the peak of an update."""
    section: TrainedConfig = config.critic  # type: ignore[attr-defined]  # of PPO alone
    return _rank_memory(section, shape, config, scalar_parameters(shape), [], _scalar_head(shape, config))


def _scalar_head(shape: ModelShape, config: TrainingProgramConfig) -> Part:
    states = config.learner.max_tokens_per_microbatch * shape.hidden * 2 * 4
    return Part("head: states in float32, gradient", float(states))


def reward_model_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """One copy of the reward model: its weights, and the activations of one layer, since there is no backward pass."""
    assert config.reward_model is not None
    dtype, tokens = config.reward_model.dtype, config.reward_model.max_tokens_per_batch
    layer = layer_activation_bytes(shape, b=BYTES[dtype])
    return (
        _divided(f"weights, {dtype}", scalar_parameters(shape), BYTES[dtype]),
        Part("activations of one layer", float(tokens * layer)),
        _overhead("learner", config),
    )


def scalar_parameters(shape: ModelShape) -> int:
    """Parameters if a head of one number, without bias, replaces the language model's head."""
    return shape.parameters - shape.head_parameters + shape.hidden


@functools.cache  # a search of layouts asks for the same count thousands of times
def trained_parameters(shape: ModelShape, lora: LoraConfig | None) -> int:
    """All parameters; with adapters r (in + out) of each layer that has one, named and sized as in usual families."""
    if lora is None:
        return shape.parameters
    hidden, mlp = shape.hidden, shape.intermediate
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = {
        "self_attn.q_proj": hidden + queries, "self_attn.k_proj": hidden + keys, "self_attn.v_proj": hidden + keys,
        "self_attn.o_proj": queries + hidden, "mlp.gate_proj": hidden + mlp, "mlp.up_proj": hidden + mlp,
        "mlp.down_proj": mlp + hidden,
    }  # fmt: skip
    adapted = (
        size
        for layer in range(shape.layers)
        for name, size in ends.items()
        if is_adapted(f"model.layers.{layer}.{name}", targets=lora.targets, exclude=lora.exclude)
    )
    return lora.rank * sum(adapted)


def _rank_memory(
    section: TrainedConfig,
    shape: ModelShape,
    config: TrainingProgramConfig,
    count: int,
    reference: list[Part],
    head: Part,
    *,
    frozen: int = 0,
) -> tuple[Part, ...]:
    """Memory of one rank with `count` trained parameters: state, gradients and their buffers, activations."""
    dtype, stage, ranks = config.model.dtype, section.zero_stage, config.cluster.learners
    b, offload = BYTES[dtype], section.offload_optimizer
    by = ranks if stage >= 1 else 1
    state = [_divided(f"weights, {dtype}", count, b, ranks if stage == 3 else 1, use="state")]
    if frozen:
        state = [
            _divided(f"frozen weights, {dtype}", frozen, b, ranks if stage == 3 else 1, use="state"),
            replace(state[0], name=f"adapter, {dtype}"),
        ]
    if offload:
        state.append(Part("optimizer, in host memory", 0.0))
    else:
        if stage or dtype != "float32":
            state.append(_divided("master weights, float32", count, MASTER_BYTES, by, use="movable"))
        state.append(_divided("Adam's two moments, float32", count, MOMENTS_BYTES, by, use="movable"))
    by = ranks if stage >= 2 else 1
    bucket = _reduction_buffers(section, shape, config, count)
    if offload:
        work = [_divided("gradients", count, b, by), Part("reduction buffer", bucket)]
    elif stage == 0:
        work = [_divided("gradients", count, b)]
        if b != GRADIENT_BYTES:
            work.append(_divided("gradients of the step, float32", count, GRADIENT_BYTES))
    else:
        added = Part("gradients, added and reduced", GRADIENT_BYTES * count / ranks + bucket)
        work = [_divided("gradients, float32", count, GRADIENT_BYTES, by), added]
    if stage == 3:
        work.append(_divided("gathered weights", min(ZERO3_MAX_LIVE_PARAMETERS, count + frozen), b))
    activations = _activations(shape, config)
    if config.model.lora is None:
        # At the end of backward no activations are left, but the embedding's gradient, and if tied the head's too.
        ends = b * shape.embedding_parameters * (1 if shape.head_parameters or head.name != HEAD else 2)
        if ends > activations.size + head.size:
            work.append(Part("embedding gradients", ends - activations.size - head.size))
    rows = [*_exchanges(shape, config), _columns(config)]
    return (*state, *reference, *work, activations, *rows, head, _overhead("learner", config))


def _reduction_buffers(section: TrainedConfig, shape: ModelShape, config: TrainingProgramConfig, count: int) -> float:
    """Bytes of DeepSpeed's buffers between learners: of full size for any model; on CPU the unfilled part is not used.

    A bucket, or a tensor that is larger than one, is flattened before it is sent, and cast if another type is sent.
    ZeRO-1 in bfloat16 has no buckets: it flattens what it accumulated in float32, in parts.
    """
    b, stage, alone = BYTES[config.model.dtype], section.zero_stage, config.cluster.learners == 1
    flat, largest = b == 2 and stage == 1, 0 if config.model.lora else shape.embedding_parameters
    if stage == 0 or (alone and not flat):
        return 0.0
    elements = 0 if flat else REDUCE_BUFFERS
    largest = min(count, FLATTENED + largest if flat else max(REDUCE_BUFFERS // 2, largest))
    if config.cluster.device == "cpu":
        elements = min(elements, count)
    width = GRADIENT_BYTES if flat else b
    sent = width if alone else BYTES[section.reduce_dtype] if b == 2 else b
    copies = width + (sent if sent != width else 0)
    return float(width * elements + copies * largest)


def _overhead(kind: str, config: TrainingProgramConfig) -> Part:
    return Part(*OVERHEAD[config.cluster.device][kind])


def layer_activation_bytes(shape: ModelShape, *, b: int, of_mlp: float = 1.0) -> float:
    """Bytes that one layer keeps per token for its backward pass.

    A norm keeps its input in float32 and the normalized values: (4 + b) H, twice. The projections keep their inputs:
    2 b H. Attention keeps q, k, v and its output: b (n + k) (d + d'), d' of the values, and q and k once more before
    their norms if they have any. The gated MLP keeps gate, its activation, up and the product: 4 b I, for each expert
    that is active. A tiled MLP keeps them for a share of the tokens, `of_mlp`.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 2 * (4 + b) * shape.hidden + shape.qk_norm * (4 + b) * (queries + keys)
    mlp = of_mlp * 4 * b * shape.intermediate
    if shape.sparse_layers:
        mlp = max(
            mlp if shape.sparse_layers < shape.layers else 0,
            shape.active_experts * (4 * b * shape.expert_intermediate + 2 * b * shape.hidden),
        )
    return norms + 2 * b * shape.hidden + b * (shape.heads + shape.kv_heads) * shape.key_value_dim + mlp


def selective_bytes(shape: ModelShape, *, b: int) -> int:
    """Bytes that one layer keeps per token under selective checkpointing: its input, and the outputs of its products.

    The products are attention (with 4 bytes per head for its backward pass), q, k, v, the output projection and the
    MLP's gate, up and down: b ((n + k) (d + d') + 3 H + 2 I) + 4 n. Each active expert has its own gate, up and down.
    """
    attention = (shape.heads + shape.kv_heads) * shape.key_value_dim
    mlp = 2 * shape.intermediate + shape.hidden
    if shape.sparse_layers:
        experts = shape.active_experts * (2 * shape.expert_intermediate + shape.hidden)
        mlp = max(mlp if shape.sparse_layers < shape.layers else 0, experts)
    return b * (attention + 2 * shape.hidden + mlp) + 4 * shape.heads


def adapter_product_bytes(shape: ModelShape, rank: int, *, b: int) -> int:
    """Bytes per token of the outputs of adapters, on all seven linear layers of a layer: A x, and B A x."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return b * (queries + 2 * keys + 2 * shape.hidden + 2 * shape.intermediate + 7 * rank)


def shared_kv_heads(shape: ModelShape, learners: int) -> int:
    """Heads of keys, and of values, once they are repeated for the learners that share a sequence."""
    return math.lcm(shape.kv_heads, learners)


def _exchanges(shape: ModelShape, config: TrainingProgramConfig) -> list[Part]:
    """What sharing a row adds to a learner's activations (`learner/sequence_parallel.py`); nothing if it has it alone.

    Of each token and layer the exchanged output and repeated keys and values are kept, b (n d' + (k' - k) (d + d'))
    bytes; q, k and v exist twice more while they are exchanged, 2 b (n d + k' (d + d')). An upper bound: where the MLP
    has the peak of a layer, as on CPU, the buffers of the exchange are free by then.
    """
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    learners = config.cluster.sequence_parallel
    if learners == 1:
        return []
    keys = shared_kv_heads(shape, learners)
    kept = b * (shape.heads * shape.value_dim + (keys - shape.kv_heads) * shape.key_value_dim)
    layers = 1 if config.model.gradient_checkpointing else shape.layers
    moved = 2 * b * (shape.heads * shape.head_dim + keys * shape.key_value_dim)
    return [Part("exchanges around attention", float(tokens * (layers * kept + moved)))]


def _columns(config: TrainingProgramConfig) -> Part:
    """The columns of a whole row, and of all rows that a learner keeps for a step, which its parts do not divide."""
    if isinstance(config, GRPOConfig):
        sequences = config.rollouts_per_step * config.learner.epochs_per_step
    else:
        assert isinstance(config, SupervisedConfig)
        sequences = config.examples_per_update * config.sequences_per_example
    kept = sequences * config.max_sequence_tokens // config.cluster.data_shards
    return Part("columns of whole rows", float(config.row_tokens * ROW_COLUMNS + kept * KEPT_COLUMNS))


def _activations(shape: ModelShape, config: TrainingProgramConfig) -> Part:
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    # Attention keeps keys and values once more for each sequence that begins with them.
    keys = shared_kv_heads(shape, config.cluster.sequence_parallel)
    repeated = (WHOLE_TOKENS - 1) * b * keys * shape.key_value_dim
    tiled = config.model.gradient_checkpointing == "tiled"
    of_mlp = min(1.0, MLP_TILE[config.cluster.device] / tokens) if tiled else 1.0
    layer = layer_activation_bytes(shape, b=b, of_mlp=of_mlp) + repeated
    if config.model.gradient_checkpointing == "selective":
        kept = selective_bytes(shape, b=b)
        if config.model.lora is not None:
            kept += adapter_product_bytes(shape, config.model.lora.rank, b=b)
        return Part("activations, selective", float(tokens * (shape.layers * kept + layer)))
    if config.model.gradient_checkpointing:
        return Part(
            f"activations, {'tiled' if tiled else 'checkpointed'}",
            float(tokens * (b * shape.hidden * shape.layers + layer)),
        )
    return Part("activations", float(tokens * shape.layers * layer))


def _head(shape: ModelShape, config: TrainingProgramConfig, compares: bool = False) -> Part:
    """Tiles of logits, gradient of the states, gradient of the head's weight (never the tokens x vocabulary matrix).

    `compares`: the loss has a teacher's logits too.
    """
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    tile_tokens, tile_vocabulary = HEAD_TILE[config.cluster.device]
    rows, columns = min(tile_tokens, tokens), min(tile_vocabulary, shape.vocabulary)
    # On GPU float32 products and their gradient; on CPU the product, and float32 logits, scratch and gradient.
    buffers = b + 4 * (1 if config.cluster.device == "cuda" else 3)
    if compares:  # a teacher's tiles too, and the steps between them
        buffers += b + 4 * TEACHER_TILES
    states = tokens * shape.hidden * (2 * b + 8)  # chosen states, the norm's output, float32 gradients, added up
    states += rows * shape.hidden * 4  # a tile's share of the gradients
    weight = 0 if config.model.lora else shape.embedding_parameters * b + columns * shape.hidden * 4
    return Part(HEAD, float(rows * columns * buffers + states + weight))


def engine_memory(shape: ModelShape, config: GRPOConfig) -> tuple[Part, ...]:
    """The parts of one GPU of an engine (on CPU: of its processes); the KV cache is last, in the remaining memory."""
    cluster, rollout, dtype = config.cluster, config.rollout, config.model.dtype
    weights = _divided(f"weights, {dtype}", shape.parameters, BYTES[dtype], cluster.tensor_parallel)
    if (lora := config.model.lora) is not None:
        slot = _divided("", trained_parameters(shape, lora.model_copy(update={"rank": lora.slot_rank})), BYTES[dtype])
        weights = Part(f"weights and adapter, {dtype}", weights.size + slot.size)
    parts = (weights, _overhead("engine", config))
    room = float(rollout.kv_cache_gib * GIB)
    if cluster.device == "cuda":
        room = rollout.gpu_memory_utilization * cluster.gpu_memory_gib * GIB - total(parts)
    return (*parts, Part("KV cache", max(0.0, room)))


def kv_cache(shape: ModelShape, config: GRPOConfig) -> tuple[int, int]:
    """Bytes of the KV cache per token on one GPU, and the tokens that it holds."""
    heads = max(1, -(-shape.kv_heads // config.cluster.tensor_parallel))  # fewer heads than GPUs: each GPU holds one
    numbers = shape.latent_dim or heads * shape.key_value_dim  # a latent is whole on each GPU
    per_token = shape.attention_layers * numbers * BYTES[config.model.dtype]
    return per_token, int(engine_memory(shape, config)[-1].size // per_token)


def _divided(name: str, count: int, size: int, by: int = 1, *, use: Use = "work") -> Part:
    """`count` numbers of `size` bytes, divided among `by` ranks."""
    return Part(name, size * count / by, use)


# --- GPUs that roles share: placement=colocated ---
#
#     engine awake  weights of the learners + memory of the engine (during a transfer: its weights and two buckets)
#     training      weights of the learners + moved state of one learner + its work + memory of a sleeping engine
#
# --plan estimates all terms. At the start the learners measure the free memory before the engines are built.


def awake_problem(config: GRPOConfig, shape: ModelShape | None, *, kept: float, have: float) -> str | None:
    """Why an engine cannot be awake on a GPU on which the learners keep `kept` of `have` bytes."""
    share = config.rollout.gpu_memory_utilization
    needed = share * have
    if shape is not None:
        weights, working, _ = engine_memory(shape, config)
        largest = shape.embedding_parameters * weights.size / shape.parameters * config.cluster.tensor_parallel
        needed = max(needed, weights.size + working.size + 2 * max(BUCKET_BYTES, largest))
    kept += CANARY_BYTES
    if kept + needed <= have:
        return None
    return (
        f"memory: on a shared GPU the engine's rollout.gpu_memory_utilization={share:g} x {have / GIB:.4g} GiB plus "
        f"{kept / GIB:.1f} GiB of the learner's state are {(kept + needed) / GIB:.1f} GiB. Lower it to "
        f"{max(0.0, int(100 * (1 - kept / have)) / 100):.2f} or less."
    )


def training_problems(peaks: Mapping[str, float], *, kept: float, have: float) -> Iterator[str]:
    """A problem for each role that does not fit while it trains; it needs `kept` and its entry of `peaks`."""
    for role, peak in peaks.items():
        needed = kept + peak + ASLEEP_BYTES
        if needed > have:
            yield (
                f"memory: on a shared GPU a {role} that trains needs about {peak / GIB:.1f} GiB, next to "
                f"{kept / GIB:.1f} GiB of weights and {ASLEEP_BYTES / GIB:.0f} GiB of a sleeping engine: "
                f"{needed / GIB:.1f} GiB of {have / GIB:.4g}. Lower learner.max_tokens_per_microbatch, or use more "
                "learners with a higher zero_stage."
            )


def planned_problems(config: GRPOConfig, estimates: Sequence[RoleMemory], shape: ModelShape) -> Iterator[str]:
    """`awake_problem` and `training_problems`, from the estimates alone."""
    stays = ("state",) if config.cluster.offload_while_sampling else ("state", "movable")
    kept, peaks = 0.0, {}
    for estimate in estimates:
        if estimate.role.training is not None:
            held = total([part for part in estimate.parts if part.use in stays])
            kept += held
            peaks[estimate.role.name] = total(estimate.parts) - held
    have = config.cluster.gpu_memory_gib * GIB
    if problem := awake_problem(config, shape, kept=kept, have=have):
        yield problem
    yield from training_problems(peaks, kept=kept, have=have)


def check_shared_gpus(config: GRPOConfig, measured: Mapping[str, Sequence[GPUMemory]]) -> list[str]:
    """Compare the memory that the ranks of each trained role measured before the engines start with all needs.

    Returns warnings from an estimate, since activations are not measured yet. ValueError if an engine does not fit next
    to the memory that the learners keep on its GPU.
    """
    shape = shape_at(config.model.path)
    ranks = [rank for role in measured.values() for rank in role]
    fullest = max(ranks, key=lambda rank: rank.total - rank.free)
    kept = fullest.total - fullest.free
    if problem := awake_problem(config, shape, kept=kept, have=fullest.total):
        raise ValueError(problem)
    if shape is None:
        return []
    peaks = {
        estimate.role.name: max(rank.away for rank in measured[estimate.role.name])
        + total([part for part in estimate.parts if part.use == "work"])
        for estimate in memory_of_roles(config, shape)
        if estimate.role.name in measured
    }
    return list(training_problems(peaks, kept=kept, have=fullest.total))


# --- what fits ---


def with_article(name: str) -> str:
    """`a learner`, `an engine`."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def memory_share_on_cpu(estimates: Sequence[RoleMemory]) -> tuple[float, str]:
    """The share of this machine's memory that all roles need, and a clause with the numbers."""
    need = sum(estimate.role.count * total(estimate.parts) for estimate in estimates) / GIB
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    who = ", ".join(quantity(estimate.role.count, estimate.role.name) for estimate in estimates)
    verb = "needs" if sum(estimate.role.count for estimate in estimates) == 1 else "need"
    return need / have, f"{who} {verb} {need:.1f} of {have:.1f} GiB"


def memory_problems(config: TrainingProgramConfig, estimates: Sequence[RoleMemory], shape: ModelShape) -> Iterator[str]:
    """A clause for each role that does not fit by the estimates; on CPU, for all roles on this machine."""
    cluster, longest = config.cluster, config.max_sequence_tokens
    if cluster.device == "cpu":
        need, text = memory_share_on_cpu(estimates)
        if need > 1:
            yield text
    elif alone := [
        f"{with_article(each.role.name)} needs {total(each.parts) / GIB:.1f} of {cluster.gpu_memory_gib:g} GiB"
        for each in estimates
        if each.role.name != ENGINE and total(each.parts) > cluster.gpu_memory_gib * GIB
    ]:
        yield from alone
    elif isinstance(config, GRPOConfig) and config.cluster.placement == "colocated":
        for problem in planned_problems(config, estimates, shape):
            yield problem.removeprefix("memory: ").partition(". ")[0]  # without its remedy
    if isinstance(config, GRPOConfig) and (kv_tokens := kv_cache(shape, config)[1]) < longest:
        yield f"the KV cache of an engine holds {kv_tokens:,} tokens, not even one sequence of {longest:,}"


def preemption(config: GRPOConfig, shape: ModelShape) -> str:
    """A warning if the KV cache holds less than one group; else an empty string."""
    samples, longest = config.rollout.samples_per_prompt, config.max_sequence_tokens
    _, kv_tokens = kv_cache(shape, config)
    per_group = samples * longest
    if kv_tokens >= per_group:
        return ""
    keys = "rollout.gpu_memory_utilization or cluster.tensor_parallel"
    if config.cluster.device == "cpu":
        keys = "rollout.kv_cache_gib"
    return (
        f"KV cache: an engine holds {kv_tokens:,} tokens, less than one group at full length "
        f"(rollout.samples_per_prompt={samples} x {longest:,} = {per_group:,}): sequences will be preempted and "
        f"computed again. Raise {keys}, or shorten sequences."
    )
