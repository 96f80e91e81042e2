"""An example of how roles lie on GPUs; at the start Ray chooses the nodes.

Two things are certain: the GPUs of one engine are on one node, and colocated engines and critics share the
GPUs of the learners that are shown with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.config.roles import CRITIC, ENGINE, REWARD_MODEL, Role
from rlhf.config.sections import ClusterConfig

FREE = "-"
SHORT_NAMES = {REWARD_MODEL: "reward"}  # names that are too long for a cell
CELL_WIDTH = 10  # characters; the usual eight cells and the node's name fit in 100 columns


def example_layout(roles: Sequence[Role], cluster: ClusterConfig) -> list[list[str]]:
    """[node][GPU]: name and number of the actor there; nodes are filled in the order of the roles."""
    per_node = cluster.gpus_per_node
    gpus: list[str] = []
    for role in roles:
        label = SHORT_NAMES.get(role.name, role.name)
        for number in range(role.count):
            if role.name in (CRITIC, ENGINE) and not role.gpus:
                each = cluster.learners // role.count
                for gpu in range(number * each, (number + 1) * each):
                    gpus[gpu] = f"{gpus[gpu].replace('learner ', 'L')} + {role.name[0].upper()}{number}"
                continue
            if 1 < role.gpus <= per_node < len(gpus) % per_node + role.gpus:
                gpus += [FREE] * (per_node - len(gpus) % per_node)
            gpus += [f"{label} {number}"] * role.gpus
    gpus += [FREE] * (-len(gpus) % per_node)
    return [gpus[start : start + per_node] for start in range(0, len(gpus), per_node)]


def draw(nodes: list[list[str]]) -> list[str]:
    """A header, and one line per node."""
    header = _row("", [f"GPU {i}" for i in range(len(nodes[0]))])
    return [header, *(_row(f"node {number}", gpus) for number, gpus in enumerate(nodes))]


def _row(name: str, cells: list[str]) -> str:
    return (f"  {name:<9} " + " ".join(f"{cell:<{CELL_WIDTH}}" for cell in cells)).rstrip()
