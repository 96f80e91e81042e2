"""The CPUs and GPUs that a run asks for, compared with those that exist."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Role
from rlhf.plan.text import counted

GPU = "GPU"
LISTING_S = 30.0  # for nvidia-smi, which may have to wake the driver first


def check_resources(config: GRPOConfig, available: Mapping[str, float], *, trains: bool = True) -> None:
    """Refuse a run that asks for more CPUs or GPUs than exist; the message names both numbers.

    Args:
        available: numbers of CPUs and GPUs.
        trains: False if only engines run.

    Raises:
        ValueError: fewer CPUs or GPUs than the config asks for.
    """
    roles, cluster = config.roles(trains=trains), config.cluster
    named = ", ".join(counted(role.count, role.name) for role in roles)
    cpus, have = sum(role.count * role.cpus for role in roles), available.get("CPU", 0.0)
    if cpus > have:
        raise ValueError(
            f"cluster: {named} reserve {cpus:g} CPUs (cluster.cpus_per_engine={cluster.cpus_per_engine:g}, "
            f"cluster.cpus_per_learner={cluster.cpus_per_learner:g}), but there are {have:g}. Ask for fewer, or lower "
            "the reservations."
        )
    gpus, have = count_gpus(roles), available.get(GPU, 0.0)
    if gpus > have:
        raise ValueError(
            f"cluster.device=cuda: {named} (cluster.tensor_parallel={cluster.tensor_parallel}) ask for {gpus} GPUs, "
            f"but there are {have:g}. Ask for fewer, or put the run on CPU with `--config configs/cpu.yaml` after your "
            "own."
        )


def count_gpus(roles: Sequence[Role]) -> int:
    """GPUs that these roles reserve together."""
    return sum(role.count * role.gpus for role in roles)


def joins_a_cluster(config: GRPOConfig) -> bool:
    """Whether the run uses a running Ray cluster (cluster.ray_address or RAY_ADDRESS), not just this machine."""
    return bool(config.cluster.ray_address or os.environ.get("RAY_ADDRESS"))


def local_resources() -> dict[str, float]:
    """Numbers of CPUs and GPUs of this machine, found without Ray and torch."""
    return {"CPU": float(os.cpu_count() or 1), GPU: float(len(visible_gpus()))}


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    return [str(index) for index in range(_count_gpus())]


def _count_gpus() -> int:
    """All GPUs of this machine."""
    proc = Path("/proc/driver/nvidia/gpus")
    if proc.is_dir():
        return len(list(proc.iterdir()))
    if shutil.which("nvidia-smi"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a broken driver offers no GPU
            command = ["nvidia-smi", "-L"]
            listing = subprocess.run(command, capture_output=True, text=True, timeout=LISTING_S, check=False)
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0
