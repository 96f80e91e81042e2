"""A layout of the roles over GPUs, as an example: Ray decides at the start which nodes it takes.

Certain are the GPUs of one engine, which share a node, and on shared GPUs which learners an engine sits with.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config.roles import ENGINE, REWARD_MODEL, Role
from rlhf.config.sections import ClusterConfig

FREE = "-"
SHORT = {REWARD_MODEL: "reward"}  # names that do not fit a cell
CELL = 10  # characters; eight of them and the node's name fit in 100 columns
CELLS_A_LINE = 8


def place(roles: Sequence[Role], cluster: ClusterConfig) -> list[list[str]]:
    """[node][GPU] -> what is there, nodes filled in the order of the roles; colocated engines share their GPUs."""
    per_node = cluster.gpus_per_node
    gpus: list[str] = []
    for role in roles:
        label = SHORT.get(role.name, role.name)
        for number in range(role.count):
            if role.name == ENGINE and not role.gpus:
                for gpu in range(number * cluster.tensor_parallel, (number + 1) * cluster.tensor_parallel):
                    gpus[gpu] = f"L{gpu} + E{number}"
                continue
            if 1 < role.gpus <= per_node < len(gpus) % per_node + role.gpus:
                gpus += [FREE] * (per_node - len(gpus) % per_node)
            gpus += [f"{label} {number}"] * role.gpus
    gpus += [FREE] * (-len(gpus) % per_node)
    return [gpus[start : start + per_node] for start in range(0, len(gpus), per_node)]


def draw(nodes: list[list[str]]) -> list[str]:
    """One line for each node (more, where a node has more GPUs than fit), a header above."""
    lines = []
    for number, gpus in enumerate(nodes):
        for start in range(0, len(gpus), CELLS_A_LINE):
            cells = range(start, min(start + CELLS_A_LINE, len(gpus)))
            if number == 0 or len(gpus) > CELLS_A_LINE:
                lines.append(_row("", [f"GPU {i}" for i in cells]))
            lines.append(_row(f"node {number}" if start == 0 else "", [gpus[i] for i in cells]))
    return lines


def _row(name: str, cells: list[str]) -> str:
    return (f"  {name:<9} " + " ".join(f"{cell:<{CELL}}" for cell in cells)).rstrip()
