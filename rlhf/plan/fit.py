"""What of a layout does not fit: the roles on their GPUs, the KV cache, and the keys that would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import ENGINE, LEARNER
from rlhf.plan.memory import GIB, RoleMemory, kv_cache, learner_memory, planned_problems, total
from rlhf.plan.model_shape import ModelShape
from rlhf.plan.resources import counted


def memory_warnings(
    config: GRPOConfig, estimates: Sequence[RoleMemory], shape: ModelShape, host_gib: float
) -> Iterator[str]:
    """Warnings from the estimate: roles that do not fit, on CPU in `host_gib`, and a KV cache that is too small."""
    cluster, rollout = config.cluster, config.rollout
    (_, kv_tokens), longest = kv_cache(shape, config), config.max_sequence_tokens
    per_group = rollout.samples_per_prompt * longest
    keys = "rollout.kv_cache_gib"
    if cluster.device == "cuda":
        keys = "rollout.gpu_memory_utilization or cluster.tensor_parallel"
    if kv_tokens < longest:
        yield (
            f"KV cache: an engine holds {kv_tokens:,} tokens, not even one sequence of {longest:,} "
            f"({config.sequence_keys}). Raise {keys}, or shorten sequences."
        )
    elif kv_tokens < per_group:
        yield (
            f"KV cache: an engine holds {kv_tokens:,} tokens, less than one group at full length "
            f"(rollout.samples_per_prompt={rollout.samples_per_prompt} x {longest:,} = {per_group:,}): sequences will "
            f"be preempted and computed again. Raise {keys}, or shorten sequences."
        )
    if cluster.device == "cpu":
        need = sum(estimate.role.count * total(estimate.parts) for estimate in estimates) / GIB
        if need > host_gib:
            yield (
                f"memory: {', '.join(counted(e.role.count, e.role.name) for e in estimates)} need about {need:.1f} "
                f"GiB, this machine has {host_gib:.1f}. Use a smaller model, learner.max_tokens_per_microbatch or "
                "rollout.kv_cache_gib."
            )
        return
    have = cluster.gpu_memory_gib
    for estimate in estimates:
        role, need = estimate.role, total(estimate.parts) / GIB
        if role.name != ENGINE and need > have:
            remedy = f"Use a smaller {role.section}.path, or fewer tokens at once."
            if role.name == LEARNER:
                remedy = _learner_remedy(config, shape)
            yield (
                f"memory: a {role.name} needs about {need:.1f} GiB, a GPU has cluster.gpu_memory_gib={have:g}. {remedy}"
            )
    if cluster.placement == "colocated":
        yield from planned_problems(config, estimates, shape)


def _learner_remedy(config: GRPOConfig, shape: ModelShape) -> str:
    """The keys that can still lower a learner's memory; selective checkpointing, the faster one, if it is enough."""
    learner, longest, checkpointing = config.learner, config.max_sequence_tokens, config.model.gradient_checkpointing
    model = config.model.model_copy(update={"gradient_checkpointing": "selective"})
    needed = total(learner_memory(shape, config.model_copy(update={"model": model})))
    selective = not checkpointing and needed <= config.cluster.gpu_memory_gib * GIB
    remedies = {
        "model.gradient_checkpointing=selective": selective,
        "model.gradient_checkpointing=true": checkpointing is not True and not selective,
        f"learner.max_tokens_per_microbatch down to {longest}": learner.max_tokens_per_microbatch > longest,
        "learner.zero_stage=3": learner.zero_stage < 3,
        "learner.offload_optimizer=true": not learner.offload_optimizer,
        "more cluster.learners": True,
    }
    return f"Try {', '.join(remedy for remedy, helps in remedies.items() if helps)}."
