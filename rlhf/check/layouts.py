"""Layouts of the GPUs that a run has, by the seconds of a step: separate and colocated, each without a lag and with 1.

The search finds the fastest layout of each kind that fits. It varies the split of the GPUs, ZeRO's stage, checkpointing
and the GPUs of an engine. If nothing fits, it tries a smaller microbatch, then learners that share long sequences, then
an optimizer in host memory, then more nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple, TypeVar

from rlhf.check.examination import sharing_problems
from rlhf.check.hours import Scale, step_time
from rlhf.check.memory import GIB, kv_cache, memory_of_roles, memory_problems, preemption
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import count_gpus, quantity
from rlhf.config.base import Section
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import LOW_ADAPTER_RATE, TrainingProgramConfig, with_values
from rlhf.config.sections import LoraConfig

C = TypeVar("C", bound=TrainingProgramConfig)
SPLITS = 16  # shares of the GPUs that are tried for the learners
STAGES = (1, 2, 3)  # of ZeRO: from the fewest bytes that are sent to the least memory
SHARES = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25)  # of a GPU, for an engine next to a learner's weights
KINDS = {
    "separate": ("separate", 0), "separate, lag 1": ("separate", 1),
    "colocated": ("colocated", 0), "colocated, lag 1": ("colocated", 1),
}  # fmt: skip
NODES, NODE_GPUS = (1, 2, 4, 8), 8  # numbers of nodes to try; GPUs per node, if the config has one GPU per node
SMALL_MICROBATCH = 4096  # tokens, if a sequence has no more
SHARED = (2, 4, 8)  # learners that share a sequence
ADAPTERS = LoraConfig(rank=32, alpha=64)
CHECKPOINTING = {  # configured value -> values to try, from the fastest to the least memory
    False: (False, "selective", True), "selective": ("selective", True), True: (True,),
    "tiled": ("tiled",),
}  # fmt: skip
AS_SET = "this config"  # in place of keys where none has to change


class Layout(NamedTuple):
    config: GRPOConfig
    seconds: float


def with_trained_values(config: C, **values: Any) -> C:
    """A copy of the config with some keys replaced in the section of each trained model."""
    return with_values(config, **{role.section: values for role, _ in config.trained_roles()})


def with_fewest_bytes(config: GRPOConfig, shape: ModelShape) -> tuple[GRPOConfig, str | None]:
    """The config at the first of ZeRO's stages that fits (on shared GPUs, with an engine's share that fits).

    A config whose KV cache holds a whole group is preferred to one whose sequences would be preempted.

    Returns:
        The config, and None if it fits; else the last one that was tried, and why it does not fit.
    """
    most = config.rollout.gpu_memory_utilization
    shared = config.cluster.placement == "colocated"
    preempting = None
    for stage in STAGES if config.cluster.learners > 1 else (config.learner.zero_stage,):
        problem: str | None = None
        for share in dict.fromkeys((most, *(share for share in SHARES if shared or most < share == SHARES[0]))):
            staged = with_trained_values(config, zero_stage=stage)
            candidate = with_values(staged, rollout={"gpu_memory_utilization": share})
            before, problem = problem, first_problem(candidate, shape)
            if problem and problem == before:
                break  # no share of the engine changes it
            if problem is None and not preemption(candidate, shape):
                return candidate, None
            if problem is None and preempting is None:
                preempting = candidate
    return (candidate, problem) if preempting is None else (preempting, None)


def first_problem(config: TrainingProgramConfig, shape: ModelShape) -> str | None:
    """The first reason why a config does not fit, or contradicts itself; None if there is no reason."""
    return next(chain(memory_problems(config, memory_of_roles(config, shape), shape), config.contradictions()), None)


def gpu_splits(config: GRPOConfig, gpus: int) -> Iterator[GRPOConfig]:
    """The config on `gpus` GPUs, with each number of learners that leaves whole engines."""
    width = config.cluster.tensor_parallel
    shared = config.cluster.placement == "colocated"
    step = 1 if shared else max(1, gpus // SPLITS)
    for learners in range(step, gpus + 1, step):
        engines = learners // width if shared else 1
        candidate = with_values(config, cluster={"learners": learners, "engines": engines})
        free = gpus - count_gpus(candidate.roles())
        if shared and free == 0 and engines * width == learners:
            yield candidate
        elif not shared and free >= 0:
            yield with_values(candidate, cluster={"engines": 1 + free // width})


def memory_savings(config: GRPOConfig, *, offload: bool) -> Iterator[GRPOConfig]:
    """The config with each kind of checkpointing and wider engines, from the fastest to the least memory."""
    most = 1 if config.model.lora else config.cluster.gpus_per_node
    width = min(config.cluster.tensor_parallel, most)
    for kind in CHECKPOINTING[config.model.gradient_checkpointing]:
        for each in dict.fromkeys((width, *(w for w in (2, 4, 8) if width < w <= most))):
            model, cluster = {"gradient_checkpointing": kind}, {"tensor_parallel": each}
            yield with_values(with_trained_values(config, offload_optimizer=offload), model=model, cluster=cluster)


def fastest_layout(config: GRPOConfig, shape: ModelShape, gpus: int, kind: str, scale: Scale) -> Layout | str:
    """The fastest layout of a kind that fits, or why the most economical one does not."""
    placement, lag = KINDS[kind]
    base = with_values(config, cluster={"placement": placement}, rollout={"max_policy_lag": lag})
    fitting: list[tuple[bool, Layout]] = []  # whether the layout preempts sequences
    reason = f"{quantity(gpus, 'GPU')} cannot hold whole engines and learners in this way"
    given = config.learner.max_tokens_per_microbatch, config.cluster.sequence_parallel
    budgets = [given, *smaller_budgets(config, gpus)]
    for offload, (tokens, shared) in product(dict.fromkeys((config.learner.offload_optimizer, True)), budgets):
        if fitting:
            break
        cluster = {"sequence_parallel": shared}
        budgeted = with_values(base, learner={"max_tokens_per_microbatch": tokens}, cluster=cluster)
        savings = memory_savings(budgeted, offload=offload)
        for split in (split for saving in savings for split in gpu_splits(saving, gpus)):
            # vLLM would refuse it, or the config
            if shape.heads % split.cluster.tensor_parallel or split.cluster.learners % shared:
                continue
            candidate, problem = with_fewest_bytes(split, shape)
            if problem:
                reason = problem
            elif time := step_time(candidate, shape, scale):
                fitting.append((bool(preemption(candidate, shape)), Layout(candidate, time.total)))
    return min(fitting, key=lambda each: (each[0], each[1].seconds))[1] if fitting else reason


def smaller_budgets(
    config: TrainingProgramConfig, learners: int, *, least: int = SMALL_MICROBATCH
) -> Iterator[tuple[int, int]]:
    """Smaller token budgets, with the number of learners that then share a sequence, down to the least memory."""
    budget, shared = config.learner.max_tokens_per_microbatch, config.cluster.sequence_parallel
    longest = config.sequences_per_example * config.max_sequence_tokens
    wider = [each for each in SHARED if shared < each <= learners and longest > SMALL_MICROBATCH]
    trials = {each: with_values(config, cluster={"sequence_parallel": each}) for each in wider}
    for each in (shared, *(each for each, trial in trials.items() if not any(sharing_problems(trial)))):
        if (tokens := max(least, -(-longest // each))) < budget or each > shared:
            yield tokens, each


class Search(NamedTuple):
    """The fastest layout of each kind on a number of GPUs, or why none fits."""

    gpus: int
    layouts: dict[str, Layout | str]

    def best(self, lag: float) -> Layout | None:
        """The fastest layout with at most this lag, or else with a larger one; None if nothing fits."""
        fitting = [layout for layout in self.layouts.values() if isinstance(layout, Layout)]
        return min(fitting, key=lambda each: (each.config.rollout.max_policy_lag > lag, each.seconds), default=None)


def search_layouts(config: GRPOConfig, shape: ModelShape, gpus: int) -> Search:
    """The fastest layout of each kind on `gpus` GPUs, or why none fits."""
    scale = Scale.of(config, shape)
    return Search(gpus, {kind: fastest_layout(config, shape, gpus, kind, scale) for kind in KINDS})


def search_until_fit(config: GRPOConfig, shape: ModelShape) -> list[Search]:
    """Search the layouts on the GPUs of the run and, until one fits, on more nodes."""
    own, per_node = count_gpus(config.roles()), config.cluster.gpus_per_node
    done = [search_layouts(config, shape, own)]
    more = [per_node * nodes for nodes in NODES] if per_node > 1 else [2, 4, *(NODE_GPUS * nodes for nodes in NODES)]
    for gpus in (gpus for gpus in more if gpus > own):
        if done[-1].best(0):
            break
        larger = {"gpus_per_node": min(gpus, NODE_GPUS) if per_node == 1 else per_node}
        done.append(search_layouts(with_values(config, cluster=larger), shape, gpus))
    return done


def with_adapters(config: C) -> C:
    """The config with adapters (`model.lora`) in place of all weights, and a learning rate that suits them."""
    optimizer = config.learner.optimizer
    optimizer = optimizer.model_copy(update={"lr": max(LOW_ADAPTER_RATE, optimizer.lr)})
    return with_values(config, model={"lora": ADAPTERS}, learner={"optimizer": optimizer})


def economies(config: C, shape: ModelShape) -> Iterator[C]:
    """The config with one more saving of memory at a time, where layouts are not searched: on CPU, without engines.

    On CPU all of them have a KV cache for at least one sequence.
    """
    if isinstance(config, GRPOConfig) and config.cluster.device == "cpu":
        least = math.ceil(config.max_sequence_tokens * kv_cache(shape, config)[0] / GIB)
        yield (config := with_values(config, rollout={"kv_cache_gib": max(config.rollout.kv_cache_gib, least)}))
    most_recomputed = CHECKPOINTING[config.model.gradient_checkpointing][-1]
    yield (config := with_values(config, model={"gradient_checkpointing": most_recomputed}))
    if config.cluster.device == "cuda":
        stage = 3 if config.cluster.learners > 1 else config.learner.zero_stage
        yield (config := with_trained_values(config, zero_stage=stage))
        yield (config := with_trained_values(config, offload_optimizer=stage > 0))
    for tokens, shared in smaller_budgets(config, config.cluster.learners, least=1):
        if config.cluster.learners % shared == 0:
            values = {"max_tokens_per_microbatch": tokens}
            yield (config := with_values(config, learner=values, cluster={"sequence_parallel": shared}))
    if config.model.lora is None and not config.scalar_learner:
        yield with_adapters(config)


def changed_keys(config: Section, layout: Section) -> str:
    """The keys that differ in a layout, as one line to add to the command; `AS_SET` if none differs."""
    return " ".join(f"{key}={value}" for key, value in _differences(config, layout)) or AS_SET


def _differences(old: Section, new: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys whose values differ, with their new values as a command line takes them."""
    for name in type(new).model_fields:
        before, after, key = getattr(old, name), getattr(new, name), f"{prefix}{name}"
        if isinstance(before, Section) and isinstance(after, Section):
            yield from _differences(before, after, f"{key}.")
        elif isinstance(after, Section) and before is None:
            given = (each for each in type(after).model_fields if each in after.model_fields_set)
            yield from ((f"{key}.{each}", getattr(after, each)) for each in given)
        elif before != after:
            yield key, str(after).lower() if isinstance(after, bool) else after
