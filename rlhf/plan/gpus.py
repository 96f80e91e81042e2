"""The GPUs of this machine, read through NVML, without torch; and the config as these GPUs complete it for --plan."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from rlhf.config.grpo import GRPOConfig
from rlhf.plan.memory import GIB
from rlhf.plan.resources import joins_a_cluster, visible_gpus, with_nvml


class Gpu(NamedTuple):
    name: str
    memory_gib: float


def gpus_here() -> list[Gpu]:
    """The GPUs that this process may use."""
    return with_nvml(lambda nvml: [_read(nvml, name) for name in visible_gpus()])


def _read(nvml: Any, visible: str) -> Gpu:
    """One GPU, which CUDA_VISIBLE_DEVICES names by its number or by its UUID."""
    by_number = visible.isdigit()
    handle = nvml.nvmlDeviceGetHandleByIndex(int(visible)) if by_number else nvml.nvmlDeviceGetHandleByUUID(visible)
    return Gpu(nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle).total / GIB)


def with_gpus_here(config: GRPOConfig) -> tuple[GRPOConfig, str]:
    """The config, with this machine's GPUs for the keys that it does not set; and a text: their memory and its source.

    A run that joins a Ray cluster may use other machines: then nothing is read.
    """
    cluster, gpus = config.cluster, [] if joins_a_cluster(config) else gpus_here()
    if "gpu_memory_gib" in cluster.model_fields_set:
        told = f"{cluster.gpu_memory_gib:g} GiB, from cluster.gpu_memory_gib"
    elif gpus:
        told = f"{min(gpu.memory_gib for gpu in gpus):.1f} GiB, read here"
    else:
        told = f"{cluster.gpu_memory_gib:g} GiB, assumed: no GPU is read here; set cluster.gpu_memory_gib"
    if not gpus:
        return config, told
    here = {"gpu_memory_gib": round(min(gpu.memory_gib for gpu in gpus), 1), "gpus_per_node": len(gpus)}
    update = {name: value for name, value in here.items() if name not in cluster.model_fields_set}
    names = ", ".join(f"{count} x {gpu.name}, {gpu.memory_gib:.1f} GiB" for gpu, count in Counter(gpus).items())
    return config.model_copy(update={"cluster": cluster.model_copy(update=update)}), f"{told}; this machine: {names}"
