"""Whether a layout fits: the roles on their GPUs, and a sequence or a group in the KV cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rlhf.check.memory import GIB, RoleMemory, kv_cache, planned_problems, total
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import counted
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import ENGINE


def with_article(name: str) -> str:
    """`a learner`, `an engine`."""
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def on_cpu(estimates: Sequence[RoleMemory]) -> tuple[float, str]:
    """The share of this machine's memory that all roles need, and a clause that says so."""
    need = sum(estimate.role.count * total(estimate.parts) for estimate in estimates) / GIB
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    who = ", ".join(counted(estimate.role.count, estimate.role.name) for estimate in estimates)
    verb = "needs" if sum(estimate.role.count for estimate in estimates) == 1 else "need"
    return need / have, f"{who} {verb} {need:.1f} of {have:.1f} GiB"


def memory_problems(config: GRPOConfig, estimates: Sequence[RoleMemory], shape: ModelShape) -> Iterator[str]:
    """One clause for each part that does not fit by the estimates; on CPU, in the memory of this machine."""
    cluster, (_, kv_tokens), longest = config.cluster, kv_cache(shape, config), config.max_sequence_tokens
    if cluster.device == "cpu":
        need, text = on_cpu(estimates)
        if need > 1:
            yield text
    elif alone := [
        f"{with_article(each.role.name)} needs {total(each.parts) / GIB:.1f} of {cluster.gpu_memory_gib:g} GiB"
        for each in estimates
        if each.role.name != ENGINE and total(each.parts) > cluster.gpu_memory_gib * GIB
    ]:
        yield from alone
    elif cluster.placement == "colocated":
        for problem in planned_problems(config, estimates, shape):
            yield problem.removeprefix("memory: ").partition(". ")[0]  # without its remedy
    if kv_tokens < longest:
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
