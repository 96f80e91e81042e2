"""Which GPU holds what: nodes are filled in order, and an engine never goes across two of them."""

from __future__ import annotations

from rlhf.config.sections import ClusterConfig

FREE = "-"
CELL = 10  # characters; eight of them and the node's name fit in 100 columns
CELLS_A_LINE = 8


def place(cluster: ClusterConfig, *, critics: int = 0, reward_models: int = 0) -> list[list[str]]:
    """[node][GPU] -> what sits there, in the order of the run: learners first; colocated engines share their GPUs."""
    per_node = cluster.gpus_per_node
    gpus = [f"learner {rank}" for rank in range(cluster.learners)]
    gpus += [f"critic {rank}" for rank in range(critics)]
    gpus += [f"reward {copy}" for copy in range(reward_models)]
    for engine in range(cluster.engines):
        width = cluster.tensor_parallel
        if cluster.placement == "colocated":
            for gpu in range(engine * width, (engine + 1) * width):
                gpus[gpu] = f"L{gpu} + E{engine}"
            continue
        if width <= per_node and len(gpus) % per_node + width > per_node:
            gpus += [FREE] * (per_node - len(gpus) % per_node)
        gpus += [f"engine {engine}"] * width
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
