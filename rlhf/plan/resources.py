"""What a run asks of the machines, against what there is."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rlhf.config.run import GRPOConfig
from rlhf.plan.text import counted

GPU = "GPU"


def check_resources(config: GRPOConfig, available: Mapping[str, float], *, trains: bool = True) -> None:
    """Refuse a run that asks for more than there is, both numbers named.

    Args:
        available: CPU and GPU counts. trains: False for engines alone.

    Raises:
        ValueError: fewer CPUs or GPUs than the config asks for.
    """
    cluster = config.cluster
    ranks = cluster.learners + config.critics + config.reward_model_copies if trains else 0
    named = counted(cluster.learners, "learner") if trains else "no learner"
    if trains and config.critics:
        named += f", {counted(config.critics, 'critic')}"
    if trains and config.reward_model_copies:
        named += f", {counted(config.reward_model_copies, 'reward model')}"
    cpus = cluster.engines * cluster.cpus_per_engine + ranks * cluster.cpus_per_learner
    have = available.get("CPU", 0.0)
    if cpus > have:
        raise ValueError(
            f"cluster.engines={cluster.engines} and {named} reserve {cpus:g} CPUs "
            f"(cluster.cpus_per_engine={cluster.cpus_per_engine:g}, cluster.cpus_per_learner="
            f"{cluster.cpus_per_learner:g}), but there are {have:g}. Ask for fewer, or lower the reservations."
        )
    if cluster.device == "cuda":
        shared = cluster.placement == "colocated" and trains
        gpus = ranks if shared else ranks + cluster.engines * cluster.tensor_parallel
        have = available.get(GPU, 0.0)
        if gpus > have:
            raise ValueError(
                f"cluster.device=cuda: {cluster.engines} engines x {cluster.tensor_parallel} and {named} ask for "
                f"{gpus} GPUs, but there are {have:g}. Ask for fewer, or put the run on CPU with "
                "`--config configs/cpu.yaml` after your own."
            )


def joins_a_cluster(config: GRPOConfig) -> bool:
    """Whether the run uses a Ray cluster that is up already, by its config or by RAY_ADDRESS, and not this machine."""
    return bool(config.cluster.ray_address or os.environ.get("RAY_ADDRESS"))


def local_resources() -> dict[str, float]:
    """What this machine has, without Ray and without torch."""
    return {"CPU": float(os.cpu_count() or 1), GPU: float(len(visible_gpus()))}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index in range(_count_gpus())]


def _count_gpus() -> int:
    """All GPUs of this machine."""
    proc = Path("/proc/driver/nvidia/gpus")
    if proc.is_dir():
        return len(list(proc.iterdir()))
    if shutil.which("nvidia-smi"):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0
