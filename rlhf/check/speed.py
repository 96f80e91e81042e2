"""Estimates of the seconds of a training step on GPUs: operations and bytes of each part, over the rates of a card.

Kernels on an H100 reach these rates; for another card they are scaled by the data sheets (`config/cards.py`).

Matrix products, attention and memory traffic of an update are counted as in `benchmarks/roofline.py`, but by formula,
so that a plan needs no torch. A decoding step reads weights and KV cache once. Communication between learners, and
within an engine of several GPUs, is counted in bytes. Not included: shared beginnings of prompts, waiting, weight
transfers, evaluations and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf.algo.sizes import MLP_TILE
from rlhf.check.memory import (
    BYTES,
    MASTER_BYTES,
    MOMENTS_BYTES,
    kv_cache,
    layer_activation_bytes,
    role_parameters,
    shared_kv_heads,
)
from rlhf.check.model_shape import ModelShape, shape_at
from rlhf.check.resources import local_resources
from rlhf.config.cards import CARDS, Card, card_with_memory
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import Role, Training

GEMM = 680e12  # FLOP/s that large products reach on an H100, of 989
FLASH = {"forward": 380e12, "backward": 320e12}  # FLOP/s of flash attention 2
BANDWIDTH = 2.8e12  # bytes/s that kernels reach, of 3.35
# Bytes that elementwise kernels move / bytes that a layer keeps for its backward pass: with activations kept, and with
# activations computed again. Of the account in docs/performance.md, models of 1.5 to 32 B.
PASSES, PASSES_RECOMPUTED = 2.5, 3.3
RECOMPUTED = 0.71  # of a layer's forward products under full checkpointing: the last one is not needed again
HEAD_PASSES = 7 * 4  # bytes per logit: its tile is written, read and read again in forward and backward
SAMPLER_PASSES = 6 * 4  # the same of a sampled token's logits
DECODE_FLOOR_S, DECODE_SEQUENCE_S = 4e-3, 1e-5  # assumed: scheduler and launches of a decoding step, and per sequence
ALL_REDUCE_FLOOR_S = 15e-6  # assumed: the least of an all-reduce between the GPUs of an engine, two per layer
# Assumed, bytes/s of a GPU: NVLink of an H100 within a node, a network card of 400 Gbit/s per GPU, page-locked host
# memory.
NVLINK, NETWORK, PCIE = 300e9, 40e9, 25e9
H100 = CARDS["H100"]
FORWARD_SHARE = 1 / 3  # of forward and backward together: a backward pass costs two forward passes
# Seconds per parameter of clipping, torch's fused AdamW and the copy to bfloat16 in host memory, one thread; 1.7 to 3.8
# nanoseconds were measured on three processors.
HOST_ADAM_S = 3.8e-9


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a rollout."""

    prompt: int
    response: int

    @classmethod
    def of(cls, config: GRPOConfig) -> Lengths:
        plan = config.plan
        return cls(plan.prompt_tokens or config.data.max_prompt_tokens, plan.response_tokens or config.rollout.longest)

    @property
    def sequence(self) -> int:
        return self.prompt + self.response


def card_name(config: TrainingProgramConfig) -> str:
    """The card of `cluster.gpu`, or the usual one with that memory."""
    return config.cluster.gpu or card_with_memory(config.cluster.gpu_memory_gib)


def relative_rates(config: TrainingProgramConfig) -> Card:
    """The rates of the configured card, each over that of an H100."""
    ratios = [of_card / of_h100 for of_card, of_h100 in zip(CARDS[card_name(config)], H100, strict=True)]
    peak = config.cluster.peak_tflops
    return Card(*ratios) if peak is None else Card(*ratios)._replace(tflops=peak / H100.tflops)


def card_description(config: TrainingProgramConfig) -> str:
    """The card whose rates are used, with its data sheet and the reason for this choice."""
    cluster, name = config.cluster, card_name(config)
    card = CARDS[name]
    tflops = f"{card.tflops:g} TFLOP/s" if cluster.peak_tflops is None else f"{cluster.peak_tflops:g} TFLOP/s as set"
    why = "" if cluster.gpu else f"; assumed from its {cluster.gpu_memory_gib:g} GiB: set cluster.gpu"
    rates = f"{tflops}, {card.bandwidth:,.0f} GB/s{why}"
    return f"an account, at best, of one {name} by its data sheet, not measured ({rates})"


def compute_s(shape: ModelShape, config: TrainingProgramConfig, lengths: Lengths | None = None) -> float:
    """Seconds per token of forward and backward on one learner; only tokens of `lengths.response` have logits."""
    if lengths is None:
        assert isinstance(config, GRPOConfig)
        lengths = Lengths.of(config)
    checkpointing, frozen = config.model.gradient_checkpointing, bool(config.model.lora)
    again = checkpointing in (True, "tiled")
    passes = PASSES_RECOMPUTED if checkpointing else PASSES
    pairs = 2 * shape.attention_layers * shape.heads * shape.head_dim * lengths.sequence  # causal: half of them
    products = 2 * shape.active_parameters * (1 + RECOMPUTED * again + (1 if frozen else 2))
    attention = pairs * ((1 + again) / FLASH["forward"] + 2.5 / FLASH["backward"])
    kept = shape.layers * layer_activation_bytes(shape, b=BYTES[config.model.dtype])
    logits = lengths.response / lengths.sequence * shape.vocabulary
    products += logits * shape.hidden * (6 if frozen else 8)
    moved = passes * kept + logits * HEAD_PASSES + (_tiling_bytes(shape, config) if checkpointing == "tiled" else 0.0)
    rates, learners = relative_rates(config), config.cluster.sequence_parallel
    exchanging = exchanged_bytes(shape, config) / link_bytes_per_second(config, learners)
    return (products / GEMM + attention) / rates.tflops + moved / BANDWIDTH / rates.bandwidth + exchanging


def _tiling_bytes(shape: ModelShape, config: TrainingProgramConfig) -> float:
    """Bytes per token that tiles of dense MLPs move: cuts and joins, and after the first tile sums of the gradients.

    Four passes over the states of each layer, and three over an MLP's 3 H I weights for each further tile of a row.
    """
    tokens, b = config.learner.max_tokens_per_microbatch, BYTES[config.model.dtype]
    layers = shape.layers - shape.sparse_layers
    sums = (math.ceil(tokens / MLP_TILE[config.cluster.device]) - 1) / tokens
    weights = 0 if config.model.lora else 3 * shape.hidden * shape.intermediate
    return b * layers * (4 * shape.hidden + 3 * sums * weights)


def exchanged_bytes(shape: ModelShape, config: TrainingProgramConfig) -> float:
    """Bytes that a learner sends in an update, per token of its own, to the others with which it shares a sequence.

    A pass exchanges q, k and v, then the output: b (n + k') (d + d') per layer, with d' of the values, of which 1 / S
    stays here. A backward pass sends as much as a forward pass, and so does one that computes a layer again.
    """
    learners, passes = config.cluster.sequence_parallel, 3 if config.model.gradient_checkpointing else 2
    heads = shape.heads + shared_kv_heads(shape, learners)
    per_pass = shape.attention_layers * BYTES[config.model.dtype] * shape.key_value_dim * heads
    return passes * per_pass * (learners - 1) / learners


def decode_tokens_per_second(shape: ModelShape, config: GRPOConfig) -> float:
    """Sampled tokens per second of one full engine; the time includes prompts."""
    step, batch = decode_step_s(shape, config)
    lengths = Lengths.of(config)
    prefill = prefill_s(shape, config, lengths.prompt / config.rollout.samples_per_prompt)
    return lengths.response / (lengths.response * step / batch + prefill)


def prefill_s(shape: ModelShape, config: GRPOConfig, tokens: float) -> float:
    """Seconds in which one engine computes the keys and values of `tokens` that are given."""
    return (
        2 * shape.active_parameters * tokens / (GEMM * config.cluster.tensor_parallel * relative_rates(config).tflops)
    )


def decode_step_s(shape: ModelShape, config: GRPOConfig, batch: int | None = None) -> tuple[float, int]:
    """Seconds of one decoding step, and how many sequences it has; by default as many as there are at once."""
    cluster, lengths, rates = config.cluster, Lengths.of(config), relative_rates(config)
    gemm, bandwidth = GEMM * rates.tflops, BANDWIDTH * rates.bandwidth
    per_token, held = kv_cache(shape, config)
    begun = config.rollouts_per_step * (1 + config.rollout.max_policy_lag)
    if cluster.placement == "colocated":  # `rollout.buffer.groups_at_engines`
        cached = cluster.engines * held // config.max_sequence_tokens
        begun = min(begun, max(config.rollouts_per_step, cached))
    waiting = -(-begun // cluster.engines)
    fits = max(1, held // lengths.sequence)
    batch = batch or min(config.rollout.max_concurrent_sequences, waiting, fits)
    gpus, b = cluster.tensor_parallel, BYTES[config.model.dtype]
    head = shape.vocabulary * shape.hidden
    read = shape.parameters - shape.embedding_parameters * bool(shape.head_parameters)
    if shape.experts:  # a small batch reads only the experts that it needs
        read = min(read, batch * (shape.active_parameters + head))
    weights = max(read * b / gpus / bandwidth, 2 * (shape.active_parameters + head) * batch / gpus / gemm)
    cache = batch * (lengths.prompt + lengths.response / 2) * per_token / bandwidth
    sampler = batch * shape.vocabulary * SAMPLER_PASSES / bandwidth
    reduced = batch * shape.hidden * b * 2 * (gpus - 1) / gpus  # bytes that a GPU sends
    between = 2 * shape.layers * (ALL_REDUCE_FLOOR_S + reduced / (NVLINK * rates.link)) * (gpus > 1)
    return weights + cache + sampler + between + DECODE_FLOOR_S + batch * DECODE_SEQUENCE_S, batch


def tail_s(shape: ModelShape, config: GRPOConfig) -> float:
    """Seconds from the mean response's end to the longest one's, which is then alone.

    With a lag, responses of later steps take the places of those that end. The engine is half full, assumed: between
    the last response alone and a full batch (benchmarks/simulator.py).
    """
    longest = config.rollout.longest - Lengths.of(config).response
    return max(0, longest) * decode_step_s(shape, config, _half_batch(shape, config))[0]


def interrupted_s(shape: ModelShape, config: GRPOConfig) -> float:
    """Seconds per step of computing again what a sleep interrupts: half a batch of mean sequences, assumed."""
    if config.cluster.placement != "colocated" or not config.rollout.max_policy_lag:
        return 0.0
    return prefill_s(shape, config, _half_batch(shape, config) * Lengths.of(config).sequence)


def _half_batch(shape: ModelShape, config: GRPOConfig) -> int:
    """Half of an engine's sequences; one without a lag."""
    return max(1, decode_step_s(shape, config)[1] // 2) if config.rollout.max_policy_lag else 1


# --- communication between learners ---


def communicated_bytes(
    role: Role, training: Training, config: TrainingProgramConfig, policy: ModelShape, microbatches: int
) -> float:
    """Bytes that one rank sends per training step, for gradients and weights; 0 if the model's shape is not known.

    With P parameters, an all-reduce sends 2 P (n - 1) / n numbers, a gather or a reduce-scatter half of that. DeepSpeed
    reduces once per update at stage 1 and after every microbatch at stages 2 (all-reduce) and 3 (reduce-scatter).
    Stages 1 and 2 gather the weights after an update, stage 3 in each forward and backward pass.
    `microbatches` is their number per update.
    """
    stage = training.section.zero_stage
    count, n = role_parameters(role, config, policy), role.count
    if count is None or n == 1:
        return 0.0
    b = BYTES[config.model.dtype]
    updates = training.updates_per_step
    forwards = forward_passes(config) if isinstance(config, GRPOConfig) else 0
    gradient, weights = count * (BYTES[training.section.reduce_dtype] if b == 2 else b), count * b
    if stage == 3:
        frozen = b * policy.parameters if config.model.lora else 0
        passes = forwards * microbatches * training.minibatches_per_epoch
        halves = updates * microbatches * (2 * (weights + frozen) + gradient) + passes * (weights + frozen)
    else:
        halves = 2 * gradient * updates * (microbatches if stage == 2 else 1) + (weights * updates if stage else 0)
    return halves * (n - 1) / n


def microbatches_per_update(config: GRPOConfig, training: Training) -> int:
    """Of each learner, at the mean lengths."""
    rollouts = -(-config.rollouts_per_step // training.minibatches_per_epoch)
    tokens = rollouts * Lengths.of(config).sequence
    return max(1, -(-tokens // (config.learner.max_tokens_per_microbatch * config.cluster.learners)))


def forward_passes(config: GRPOConfig) -> int:
    """Forward passes of a step: old log-probs, reference, teacher; with a critic at least one, for its values."""
    teacher = config.algo.teacher
    passes = config.needs_old_logprobs_pass + config.needs_reference
    if teacher is not None and teacher.computed:
        passes += config.learner.epochs_per_step if teacher.in_loss else 1
    return max(passes, len(config.trained_roles()) - 1)


def link_bytes_per_second(config: TrainingProgramConfig, group: int | None = None) -> float:
    """Bytes/s between learners: the slower link if they are on several nodes, or groups of that many neighbors are."""
    learners, per_node = config.cluster.learners, config.cluster.gpus_per_node
    on_one_node = learners <= per_node or (group is not None and per_node % group == 0)
    return NVLINK * relative_rates(config).link if on_one_node else NETWORK


def host_optimizer_s(config: TrainingProgramConfig) -> float:
    """Seconds per training step of the slowest optimizer in host memory; 0 if there is none.

    Transfers over PCIe are not counted. The number of threads assumes nodes like this machine.
    """
    cluster, trained = config.cluster, config.trained_roles()
    ranks = sum(role.count for role, _ in trained)
    on_node = min(ranks, cluster.gpus_per_node) if cluster.device == "cuda" else ranks
    threads = cluster.threads_per_learner or max(1, int(local_resources()["CPU"]) // on_node)
    seconds = [0.0]
    for role, training in trained:
        count = role_parameters(role, config, shape_at(config.model.path))
        if training.section.offload_optimizer and count is not None:
            seconds.append(training.updates_per_step * count / role.count * HOST_ADAM_S / threads)
    return max(seconds)


def swap_s(shape: ModelShape, config: GRPOConfig) -> float:
    """Seconds for swapping engines and learners on shared GPUs: their state moves to host memory and back."""
    cluster = config.cluster
    if cluster.placement != "colocated":
        return 0.0
    moved = 0.0
    if cluster.offload_while_sampling:
        for role, training in config.trained_roles():
            count = role_parameters(role, config, shape) or 0
            if not training.section.offload_optimizer:
                moved += (MASTER_BYTES + MOMENTS_BYTES) * count / role.count
        if config.needs_reference and not config.model.lora and config.learner.zero_stage < 3:
            moved += BYTES[config.model.dtype] * shape.parameters
    if config.engine_sleep_level == 1:
        moved += BYTES[config.model.dtype] * shape.parameters / cluster.tensor_parallel
    return 2 * moved / PCIE
