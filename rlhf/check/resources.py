"""The CPUs and GPUs that a run asks for, and the ones of this machine, read through NVML without torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rlhf.config.cards import CARDS, card_named
from rlhf.config.program import TrainingProgramConfig, with_values
from rlhf.config.roles import Role
from rlhf.config.sections import LearnersConfig

T = TypeVar("T")
C = TypeVar("C", bound=TrainingProgramConfig)

GPU = "GPU"


def quantity(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 minibatches`."""
    plural = f"{noun}es" if noun.endswith(("batch", "pass")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def check_resources(config: TrainingProgramConfig, available: Mapping[str, float], *, trains: bool = True) -> None:
    """Raise a ValueError if a run asks for more CPUs or GPUs than are available; `trains=False`: engines alone."""
    roles, cluster = config.roles(trains=trains), config.cluster
    named = ", ".join(quantity(role.count, role.name) for role in roles)
    cpus, have = sum(role.count * role.cpus for role in roles), available.get("CPU", 0.0)
    if cpus > have:
        raise ValueError(
            f"cluster: {named} reserve {cpus:g} CPUs ({_values(cluster, 'cpus_per_engine', 'cpus_per_learner')}), but "
            f"there are {have:g}. Ask for fewer, or lower the reservations."
        )
    gpus, have = count_gpus(roles), available.get(GPU, 0.0)
    if gpus > have:
        raise ValueError(
            f"cluster.device=cuda: {named} ({_values(cluster, 'learners', 'tensor_parallel')}) ask for {gpus} GPUs, "
            f"but there are {have:g}. Ask for fewer, or run on CPU with `--config configs/cpu.yaml` after your "
            "own."
        )


def _values(cluster: LearnersConfig, *keys: str) -> str:
    """The keys that the program has, with their values."""
    return ", ".join(f"cluster.{key}={getattr(cluster, key):g}" for key in keys if hasattr(cluster, key))


def count_gpus(roles: Sequence[Role]) -> int:
    """GPUs that these roles reserve together."""
    return sum(role.count * role.gpus for role in roles)


def count_nodes(roles: Sequence[Role], gpus_per_node: int) -> int:
    """Nodes that these roles fill one after another; the GPUs of one engine are on one node."""
    used = 0
    for role in roles:
        for _ in range(role.count):
            if 1 < role.gpus <= gpus_per_node < used % gpus_per_node + role.gpus:
                used += gpus_per_node - used % gpus_per_node
            used += role.gpus
    return -(-used // gpus_per_node)


def joins_a_cluster(config: TrainingProgramConfig) -> bool:
    """Whether the run uses a running Ray cluster (cluster.ray_address or RAY_ADDRESS), not just this machine."""
    return bool(config.cluster.ray_address or os.environ.get("RAY_ADDRESS"))


def is_for_this_machine(config: TrainingProgramConfig) -> bool:
    """Whether the run would start here: on CPU, in a Ray cluster, or on GPUs if the config does not name others."""
    if config.cluster.device == "cpu" or joins_a_cluster(config):
        return True
    return bool(visible_gpus()) and not {"gpu", "gpu_memory_gib"} & config.cluster.model_fields_set


def local_resources() -> dict[str, float]:
    """Numbers of CPUs and GPUs of this machine, found without Ray and torch."""
    return {"CPU": float(os.cpu_count() or 1), GPU: float(len(visible_gpus()))}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; without it, all of this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return read_nvml(lambda nvml: [str(index) for index in range(nvml.nvmlDeviceGetCount())])


def read_nvml(read: Callable[[Any], list[T]]) -> list[T]:
    """The result of `read`; an empty list without NVML's package (part of an installation for GPUs) or a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        try:
            return read(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


class Gpu(NamedTuple):
    name: str
    memory_gib: float


def local_gpus() -> list[Gpu]:
    """The GPUs that this process may use."""
    return read_nvml(lambda nvml: [_read_gpu(nvml, name) for name in visible_gpus()])


def _read_gpu(nvml: Any, visible: str) -> Gpu:
    """One GPU; CUDA_VISIBLE_DEVICES has its number or its UUID."""
    by_number = visible.isdigit()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else nvml.nvmlDeviceGetHandleByUUID(visible)
    return Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30)


def with_gpus_here(config: C) -> tuple[C, str]:
    """The config with this machine's GPUs for the keys that it does not set, and a text: GPU memory and its source.

    GPUs are not read if the run joins a Ray cluster, since it may use other machines, or if cluster.gpu names a card
    that this machine does not have.
    """
    cluster, gpus = config.cluster, [] if joins_a_cluster(config) else local_gpus()
    given, here = cluster.model_fields_set, {card_named(gpu.name) for gpu in gpus}
    cards = [name for name in here if name is not None]
    values: dict[str, Any] = {}
    least, source = min((gpu.memory_gib for gpu in gpus), default=0.0), "read here"
    if cluster.gpu is not None and here != {cluster.gpu}:
        gpus, least, source = [], CARDS[cluster.gpu].memory_gib, f"of cluster.gpu={cluster.gpu}"
    if "gpu_memory_gib" in given:
        description = f"{cluster.gpu_memory_gib:g} GiB, from cluster.gpu_memory_gib"
    elif least:
        values["gpu_memory_gib"], description = round(least, 1), f"{least:.1f} GiB, {source}"
    else:
        description = f"{cluster.gpu_memory_gib:g} GiB, assumed: no GPU is read here; set cluster.gpu or gpu_memory_gib"
    if gpus:
        names = ", ".join(f"{count} x {gpu.name}, {gpu.memory_gib:.1f} GiB" for gpu, count in Counter(gpus).items())
        description = f"{description}; this machine: {names}"
        values |= {} if "gpus_per_node" in given else {"gpus_per_node": len(gpus)}
        values |= {"gpu": min(cards, key=lambda name: CARDS[name].tflops)} if cards else {}
    return with_values(config, cluster=values), description
