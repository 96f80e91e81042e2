"""Layouts of the GPUs that a run has, by the seconds of a step: separate, separate with a lag of 1, and colocated.

Of each kind the fastest that fits. Free are the split of the GPUs, ZeRO's stage, checkpointing and the GPUs of an
engine; an optimizer in host memory is tried where nothing fits without. Where nothing fits on the GPUs of the run at
all, one and two whole nodes are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rlhf.config.grpo import GRPOConfig
from rlhf.plan.fit import memory_warnings
from rlhf.plan.hours import Scale, step_time
from rlhf.plan.memory import GIB, GRADIENT_BYTES, MASTER_BYTES, MOMENTS_BYTES, memory_of_roles, parameters_of
from rlhf.plan.model_shape import ModelShape
from rlhf.plan.resources import count_gpus, counted
from rlhf.plan.speed import communicated_bytes

SPLITS = 16  # shares of the GPUs that are tried for the learners
STAGES = (1, 2, 3)  # of ZeRO: from the fewest bytes that are sent to the least memory
SHARES = (0.75, 0.65, 0.55, 0.45, 0.35, 0.25)  # of a GPU, for an engine beside a learner's weights
KINDS = {"separate": ("separate", 0), "separate, lag 1": ("separate", 1), "colocated": ("colocated", 0)}
NODES = (1, 2)
HOST_BYTES = MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES  # per parameter whose optimizer is in host memory
NAMED = (  # keys that a row has in words
    "cluster.placement", "cluster.learners", "cluster.engines", "cluster.tensor_parallel", "learner.zero_stage",
    "rollout.max_policy_lag",
)  # fmt: skip


class Layout(NamedTuple):
    config: GRPOConfig
    seconds: float


def changed(config: GRPOConfig, **sections: dict[str, Any]) -> GRPOConfig:
    """The config with other values of some keys, not validated."""
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)


def trained(config: GRPOConfig, **values: Any) -> GRPOConfig:
    """The config with other values in the section of each trained model."""
    return changed(config, **{role.section: values for role, _ in config.trained_roles()})


def with_fewest_bytes(config: GRPOConfig, shape: ModelShape) -> tuple[GRPOConfig, str | None]:
    """The config at the first of ZeRO's stages that fits (on shared GPUs, with an engine's share that fits).

    The text is why not even the last one fits, or what contradicts it.
    """
    most = config.rollout.gpu_memory_utilization
    shared = config.cluster.placement == "colocated"
    for stage in STAGES if config.cluster.learners > 1 else (config.learner.zero_stage,):
        for share in (most, *(share for share in SHARES if shared and share < most)):
            candidate = changed(trained(config, zero_stage=stage), rollout={"gpu_memory_utilization": share})
            warnings = memory_warnings(candidate, memory_of_roles(candidate, shape), shape, 0.0)
            problem = next(candidate.contradictions(), None) or next(warnings, None)
            if problem is None:
                return candidate, None
    return candidate, problem


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
    kinds = {False: (False, "selective", True), "selective": ("selective", True), True: (True,)}
    width, most = config.cluster.tensor_parallel, 1 if config.model.lora else config.cluster.gpus_per_node
    for kind in kinds[config.model.gradient_checkpointing]:
        for each in dict.fromkeys((width, *(w for w in (2, 4, 8) if width < w <= most))):
            model, cluster = {"gradient_checkpointing": kind}, {"tensor_parallel": each}
            yield changed(trained(config, offload_optimizer=offload), model=model, cluster=cluster)


def fastest(config: GRPOConfig, shape: ModelShape, gpus: int, kind: str, scale: Scale) -> Layout | str:
    """The fastest layout of a kind that fits, or why the most economical one does not."""
    placement, lag = KINDS[kind]
    base = changed(config, cluster={"placement": placement}, rollout={"max_policy_lag": lag})
    found: list[Layout] = []
    reason = f"{counted(gpus, 'GPU')} cannot hold whole engines and learners in this way"
    for offload in dict.fromkeys((config.learner.offload_optimizer, True)):
        if found:
            break
        for split in (split for setting in settings(base, offload=offload) for split in splits(setting, gpus)):
            if shape.heads % split.cluster.tensor_parallel:  # vLLM would refuse it
                continue
            candidate, problem = with_fewest_bytes(split, shape)
            if problem:
                reason = problem
            elif time := step_time(candidate, shape, scale):
                found.append(Layout(candidate, time.total))
    return min(found, key=lambda layout: layout.seconds, default=reason)


def layout_rows(config: GRPOConfig, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Rows of --plan: the kinds of layout with their seconds, the best one with its keys, and ZeRO's stage."""
    scale, own = Scale.of(config, shape), count_gpus(config.roles())
    per_node = config.cluster.gpus_per_node
    for gpus in (own, *(per_node * nodes for nodes in NODES if per_node * nodes > own)):
        found = {kind: fastest(config, shape, gpus, kind, scale) for kind in KINDS}
        for kind, layout in found.items():
            text = f"none: {layout}" if isinstance(layout, str) else _described(config, shape, *layout)
            yield (f"{counted(gpus, 'GPU')}, {kind}", text)
        fitting = sorted((each for each in found.values() if isinstance(each, Layout)), key=lambda each: each.seconds)
        for best in fitting[:1] + [each for each in fitting if not each.config.rollout.max_policy_lag][:1]:
            keys = " ".join(f"{key}={value}" for key, value in _differences(config, best.config)) or "this config"
            lag = best.config.rollout.max_policy_lag
            yield (f"the best that fits, lag {lag}", keys)
            if not lag:
                break
        if fitting:
            break
    yield from _stages(config, shape)


def _described(config: GRPOConfig, shape: ModelShape, layout: GRPOConfig, seconds: float) -> str:
    cluster = layout.cluster
    more = [f"{key}={value}" for key, value in _differences(config, layout) if key not in NAMED]
    width = f" of {cluster.tensor_parallel} GPUs" if cluster.tensor_parallel > 1 else ""
    if layout.learner.offload_optimizer:
        held = sum(parameters_of(role, layout, shape) or 0 for role, _ in layout.trained_roles()) * HOST_BYTES
        more.append(f"{held / GIB:,.0f} GiB of host memory over all nodes")
    learners = f"{counted(cluster.learners, 'learner')} at ZeRO stage {layout.learner.zero_stage}"
    return "; ".join([f"{seconds:,.1f} s: {learners}, {counted(cluster.engines, 'engine')}{width}", *more])


def _differences(config: GRPOConfig, layout: GRPOConfig) -> Iterator[tuple[str, Any]]:
    """Keys whose values differ, with those of the layout as on a command line."""
    sections = ["cluster", "rollout", "model", *(role.section for role, _ in config.trained_roles())]
    for section in sections:
        for key in type(getattr(layout, section)).model_fields:
            old, new = (getattr(getattr(each, section), key) for each in (config, layout))
            if old != new:
                yield f"{section}.{key}", str(new).lower() if isinstance(new, bool) else new


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
