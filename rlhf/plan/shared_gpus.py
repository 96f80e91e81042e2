"""Whether the processes that take turns on a GPU fit there, with placement=colocated.

    awake    weights of the learners + what the engine may use, or during a transfer its weights and two buckets
    training weights of the learners + what one of them brings back + its work + what a sleeping engine keeps

--plan estimates all of it. At the start the learners measure what is really free, before the engines are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlhf.algo.sizes import BUCKET_BYTES
from rlhf.config.grpo import GRPOConfig
from rlhf.plan.memory import GIB, RoleMemory, engine_memory, kept_while_sampling, memory_of_roles, total
from rlhf.plan.model_shape import ModelShape, shape_at

if TYPE_CHECKING:
    from rlhf.types import GPUMemory

# Assumed. A learner scores the canary while an engine is awake; a sleeping engine keeps CUDA's context and kernels.
CANARY_BYTES = 1 * GIB
ASLEEP_BYTES = 2 * GIB


def awake_problem(config: GRPOConfig, shape: ModelShape | None, *, kept: float, have: float) -> str | None:
    """Why an engine cannot be awake on a GPU on which the learners keep `kept` of `have` bytes."""
    share = config.rollout.gpu_memory_utilization
    needed = share * have
    if shape is not None:
        weights, working, _ = engine_memory(shape, config).parts
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
    """Roles that do not fit while they train.

    Args:
        peaks: by role, the bytes that it adds to `kept`.
    """
    for role, peak in peaks.items():
        needed = kept + peak + ASLEEP_BYTES
        if needed > have:
            yield (
                f"memory: on a shared GPU a {role} that trains needs about {peak / GIB:.1f} GiB, beside "
                f"{kept / GIB:.1f} GiB of weights and {ASLEEP_BYTES / GIB:.0f} GiB of a sleeping engine: "
                f"{needed / GIB:.1f} GiB of {have / GIB:.4g}. Lower learner.max_tokens_per_microbatch, or use more "
                "learners with a higher zero_stage."
            )


def planned_problems(config: GRPOConfig, estimates: Sequence[RoleMemory], shape: ModelShape) -> Iterator[str]:
    """Both problems, from the estimates alone."""
    trained = [estimate for estimate in estimates if estimate.role.training is not None]
    kept = {estimate.role.name: kept_while_sampling(estimate.parts, config) for estimate in trained}
    have = config.cluster.gpu_memory_gib * GIB
    if problem := awake_problem(config, shape, kept=sum(kept.values()), have=have):
        yield problem
    peaks = {estimate.role.name: total(estimate.parts) - kept[estimate.role.name] for estimate in trained}
    yield from training_problems(peaks, kept=sum(kept.values()), have=have)


def check_shared_gpus(config: GRPOConfig, measured: Mapping[str, Sequence[GPUMemory]]) -> list[str]:
    """Compare the memory that is free before the engines start with what all roles will need.

    Args:
        measured: by trained role, what each of its ranks sees of its GPU.

    Returns:
        Warnings from an estimate, since activations are not measured yet.

    Raises:
        ValueError: an engine cannot start with what the learners keep on its GPU.
    """
    shape = shape_at(config.model.path)
    ranks = [rank for role in measured.values() for rank in role]
    fullest = max(ranks, key=lambda rank: rank.total - rank.free)
    kept = fullest.total - fullest.free
    if problem := awake_problem(config, shape, kept=kept, have=fullest.total):
        raise ValueError(problem)
    if shape is None:
        return []
    work = {
        estimate.role.name: total([part for part in estimate.parts if part.use == "work"])
        for estimate in memory_of_roles(config, shape)
    }
    peaks = {role: max(rank.away for rank in measured[role]) + work[role] for role in measured}
    return list(training_problems(peaks, kept=kept, have=fullest.total))
