"""Layouts of the GPUs that a run has, by the seconds of a step: separate, separate with a lag of 1, and colocated.

Of each kind the fastest that fits. Free are the split of the GPUs, ZeRO's stage, checkpointing and the GPUs of an
engine; a smaller microbatch is tried where nothing fits without, and then an optimizer in host memory. Where nothing
fits on the GPUs of the run at all, whole nodes are tried.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple, TypeVar

from rlhf.check.fit import memory_problems, preemption
from rlhf.check.hours import Scale, step_time
from rlhf.check.memory import (
    GIB,
    GRADIENT_BYTES,
    MASTER_BYTES,
    MOMENTS_BYTES,
    kv_cache,
    memory_of_roles,
    parameters_of,
)
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import count_gpus, counted
from rlhf.check.speed import communicated_bytes
from rlhf.config.base import Section
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import LOW_ADAPTER_RATE, TrainingProgramConfig
from rlhf.config.sections import LoraConfig

C = TypeVar("C", bound=TrainingProgramConfig)
SPLITS = 16  # shares of the GPUs that are tried for the learners
STAGES = (1, 2, 3)  # of ZeRO: from the fewest bytes that are sent to the least memory
SHARES = (0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25)  # of a GPU, for an engine beside a learner's weights
KINDS = {"separate": ("separate", 0), "separate, lag 1": ("separate", 1), "colocated": ("colocated", 0)}
NODES, NODE_GPUS = (1, 2, 4, 8), 8  # that are tried; GPUs of a node, in place of nodes of one GPU
SMALL_MICROBATCH = 4096  # tokens, if a sequence has no more
ADAPTERS = LoraConfig(rank=32, alpha=64)
CHECKPOINTING = {  # as set -> what is tried: from the fastest to the least memory
    False: (False, "selective", True), "selective": ("selective", True), True: (True,),
}  # fmt: skip
BEST, AS_SET = "the best that fits", "this config"  # a row's label, and its text where no key has to change
HOST_BYTES = MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES  # per parameter whose optimizer is in host memory
NAMED = (  # keys that a row has in words
    "cluster.placement", "cluster.learners", "cluster.engines", "cluster.tensor_parallel", "learner.zero_stage",
    "rollout.max_policy_lag",
)  # fmt: skip


class Layout(NamedTuple):
    config: GRPOConfig
    seconds: float


def changed(config: C, **sections: dict[str, Any]) -> C:
    """The config with other values of some keys, not validated."""
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)


def trained(config: GRPOConfig, **values: Any) -> GRPOConfig:
    """The config with other values in the section of each trained model."""
    return changed(config, **{role.section: values for role, _ in config.trained_roles()})


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
            candidate = changed(trained(config, zero_stage=stage), rollout={"gpu_memory_utilization": share})
            before, problem = problem, problem_of(candidate, shape)
            if problem and problem == before:
                break  # no share of the engine changes it
            if problem is None and not preemption(candidate, shape):
                return candidate, None
            if problem is None and preempting is None:
                preempting = candidate
    return (candidate, problem) if preempting is None else (preempting, None)


def problem_of(config: GRPOConfig, shape: ModelShape) -> str | None:
    """The first reason why a config does not fit, or contradicts itself; None if there is no reason."""
    return next(chain(memory_problems(config, memory_of_roles(config, shape), shape), config.contradictions()), None)


def splits(config: GRPOConfig, gpus: int) -> Iterator[GRPOConfig]:
    """The config on so many GPUs, with each number of learners that leaves whole engines."""
    width = config.cluster.tensor_parallel
    shared = config.cluster.placement == "colocated"
    step = 1 if shared else max(1, gpus // SPLITS)
    for learners in range(step, gpus + 1, step):
        engines = learners // width if shared else 1
        one = changed(config, cluster={"learners": learners, "engines": engines})
        free = gpus - count_gpus(one.roles())
        if shared and free == 0 and engines * width == learners:
            yield one
        elif not shared and free >= 0:
            yield changed(one, cluster={"engines": 1 + free // width})


def settings(config: GRPOConfig, *, offload: bool) -> Iterator[GRPOConfig]:
    """The config, and with what saves memory."""
    most = 1 if config.model.lora else config.cluster.gpus_per_node
    width = min(config.cluster.tensor_parallel, most)
    for kind in CHECKPOINTING[config.model.gradient_checkpointing]:
        for each in dict.fromkeys((width, *(w for w in (2, 4, 8) if width < w <= most))):
            model, cluster = {"gradient_checkpointing": kind}, {"tensor_parallel": each}
            yield changed(trained(config, offload_optimizer=offload), model=model, cluster=cluster)


def microbatches(config: GRPOConfig) -> dict[int, None]:
    """The tokens of a microbatch: as set, and less."""
    budget = config.learner.max_tokens_per_microbatch
    return dict.fromkeys((budget, min(budget, max(SMALL_MICROBATCH, config.max_sequence_tokens))))


def fastest(config: GRPOConfig, shape: ModelShape, gpus: int, kind: str, scale: Scale) -> Layout | str:
    """The fastest layout of a kind that fits, or why the most economical one does not."""
    placement, lag = KINDS[kind]
    base = changed(config, cluster={"placement": placement}, rollout={"max_policy_lag": lag})
    found: list[tuple[bool, Layout]] = []
    reason = f"{counted(gpus, 'GPU')} cannot hold whole engines and learners in this way"
    for offload, tokens in product(dict.fromkeys((config.learner.offload_optimizer, True)), microbatches(config)):
        if found:
            break
        one = changed(base, learner={"max_tokens_per_microbatch": tokens})
        for split in (split for setting in settings(one, offload=offload) for split in splits(setting, gpus)):
            if shape.heads % split.cluster.tensor_parallel:  # vLLM would refuse it
                continue
            candidate, problem = with_fewest_bytes(split, shape)
            if problem:
                reason = problem
            elif time := step_time(candidate, shape, scale):
                found.append((bool(preemption(candidate, shape)), Layout(candidate, time.total)))
    return min(found, key=lambda each: (each[0], each[1].seconds))[1] if found else reason


class Search(NamedTuple):
    """The fastest layout of each kind on a number of GPUs, or why none fits."""

    gpus: int
    found: dict[str, Layout | str]

    def best(self, lag: float) -> Layout | None:
        """The fastest layout with at most this lag, or else with a larger one; None if nothing fits."""
        fitting = [layout for layout in self.found.values() if isinstance(layout, Layout)]
        return min(fitting, key=lambda each: (each.config.rollout.max_policy_lag > lag, each.seconds), default=None)


def search(config: GRPOConfig, shape: ModelShape, gpus: int) -> Search:
    """Search the layouts on this number of GPUs."""
    scale = Scale.of(config, shape)
    return Search(gpus, {kind: fastest(config, shape, gpus, kind, scale) for kind in KINDS})


def searches(config: GRPOConfig, shape: ModelShape) -> list[Search]:
    """Search the layouts on the GPUs of the run; as long as nothing fits, also on more nodes."""
    own, per_node = count_gpus(config.roles()), config.cluster.gpus_per_node
    done = [search(config, shape, own)]
    more = [per_node * nodes for nodes in NODES] if per_node > 1 else [2, 4, *(NODE_GPUS * nodes for nodes in NODES)]
    for gpus in (gpus for gpus in more if gpus > own):
        if done[-1].best(0):
            break
        larger = {"gpus_per_node": min(gpus, NODE_GPUS) if per_node == 1 else per_node}
        done.append(search(changed(config, cluster=larger), shape, gpus))
    return done


def with_adapters(config: C) -> C:
    """The config with adapters (`model.lora`) in place of all weights, and a learning rate that suits them."""
    optimizer = config.learner.optimizer
    optimizer = optimizer.model_copy(update={"lr": max(LOW_ADAPTER_RATE, optimizer.lr)})
    return changed(config, model={"lora": ADAPTERS}, learner={"optimizer": optimizer})


def economies_on_cpu(config: GRPOConfig, shape: ModelShape) -> Iterator[GRPOConfig]:
    """The config on CPU with a KV cache for at least one sequence, then variants that take less memory."""
    least = math.ceil(config.max_sequence_tokens * kv_cache(shape, config)[0] / GIB)
    config = changed(config, rollout={"kv_cache_gib": max(config.rollout.kv_cache_gib, least)})
    for base in (config, with_adapters(config)):
        for tokens in microbatches(config):
            for kind in dict.fromkeys((config.model.gradient_checkpointing, True)):
                learner, model = {"max_tokens_per_microbatch": tokens}, {"gradient_checkpointing": kind}
                yield changed(base, learner=learner, model=model)


def layout_rows(config: GRPOConfig, shape: ModelShape, searched: Sequence[Search]) -> Iterator[tuple[str, str]]:
    """Rows of --plan: the kinds of layout with their seconds, the best one with its keys, and ZeRO's stage."""
    for gpus, found in searched:
        for kind, layout in found.items():
            text = f"none: {layout}" if isinstance(layout, str) else _described(config, shape, *layout)
            yield (f"{counted(gpus, 'GPU')}, {kind}", text)
    best = [fastest.config for lag in (math.inf, 0) if (fastest := searched[-1].best(lag))]
    for lag, fitting in {each.rollout.max_policy_lag: each for each in best}.items():
        yield (f"{BEST}, lag {lag}", keys_of(config, fitting))
    yield from _stages(config, shape)


def keys_of(config: Section, layout: Section) -> str:
    """The keys that differ in a layout, as one line to add to the command; `AS_SET` if none differs."""
    return " ".join(f"{key}={value}" for key, value in _differences(config, layout)) or AS_SET


def _described(config: GRPOConfig, shape: ModelShape, layout: GRPOConfig, seconds: float) -> str:
    cluster = layout.cluster
    more = [f"{key}={value}" for key, value in _differences(config, layout) if key not in NAMED]
    width = f" of {cluster.tensor_parallel} GPUs" if cluster.tensor_parallel > 1 else ""
    if layout.learner.offload_optimizer:
        held = sum(parameters_of(role, layout, shape) or 0 for role, _ in layout.trained_roles()) * HOST_BYTES
        more.append(f"{held / GIB:,.0f} GiB of host memory over all nodes")
    learners = f"{counted(cluster.learners, 'learner')} at ZeRO stage {layout.learner.zero_stage}"
    return "; ".join([f"{seconds:,.1f} s: {learners}, {counted(cluster.engines, 'engine')}{width}", *more])


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


def _stages(config: GRPOConfig, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """For this layout, the stage that sends the fewest bytes of those that fit."""
    least, problem = with_fewest_bytes(config, shape)
    if problem or config.cluster.learners == 1:
        return
    for (role, training), (_, other) in zip(config.trained_roles(), least.trained_roles(), strict=True):
        now, best = training.section.zero_stage, other.section.zero_stage
        sent = {stage: communicated_bytes(role, training, config, shape, stage=stage) / 1e9 for stage in (best, now)}
        share = least.rollout.gpu_memory_utilization
        at = "" if share == config.rollout.gpu_memory_utilization else f" with rollout.gpu_memory_utilization={share:g}"
        text = f"stage {best} fits{at} and sends the fewest bytes, {sent[best]:,.1f} GB per {role.name} and step"
        as_set = "" if now == best else f"; stage {now}, as set, sends {sent[now]:,.1f}"
        yield f"ZeRO here, {role.name}", text + as_set
