"""Looks at the processes of all actors every few seconds, and kills those that are stopped.

A dead process breaks the calls that wait for it within seconds. A stopped one (by SIGSTOP, or in a frozen container)
does not answer and breaks nothing: calls would wait for `cluster.step_deadline_s`. So a process that is stopped in
LOOKS looks in a row is killed, and its actor is then noticed as lost. The driver looks at its own node itself, and at
every other node through a small Ray task there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil
import ray

from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.node_report import call_on_node

PERIOD_S = 5.0
ANSWER_S = 30.0  # for a node; one that is gone is noticed by Ray
LOOKS = 2  # in a row; a terminal may stop a whole run for a moment


def stopped_processes(actors: Sequence[int], kill: Sequence[int] = ()) -> list[int]:
    """The stopped ones among these actors of this node and all processes below them; those in `kill` are killed."""
    processes = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    below = defaultdict(list)
    for process in processes.values():
        below[process.info["ppid"]].append(process)

    def family(pid: int) -> list[psutil.Process]:
        return [processes[pid], *(m for child in below[pid] for m in family(child.pid))] if pid in processes else []

    stopped = {p for actor in actors for p in family(actor) if p.info["status"] == psutil.STATUS_STOPPED}
    for process in stopped:
        if process.pid in kill:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return [process.pid for process in stopped]


async def watch(groups: Sequence[ActorGroup[Any]]) -> None:
    """Look at the processes of all actors of these groups, which may grow, until it is cancelled."""
    looks: dict[tuple[str, int], int] = {}  # (node, process) -> looks in a row in which it was stopped
    while True:
        actors: dict[str, list[int]] = {}
        for location in (location for group in groups for location in group.locations):
            actors.setdefault(location.node, []).append(location.process)
        frozen = {key for key, count in looks.items() if count == LOOKS}
        answers = await asyncio.gather(
            *(_look_at(node, pids, [pid for where, pid in frozen if where == node]) for node, pids in actors.items())
        )
        stopped = {(node, pid) for node, pids in zip(actors, answers, strict=True) for pid in pids}
        looks = {key: looks.get(key, 0) + 1 for key in stopped}
        await asyncio.sleep(PERIOD_S)


async def _look_at(node: str, actors: list[int], kill: list[int]) -> list[int]:
    for process in kill:
        print(f"heartbeat: process {process} on node {node[:8]} is stopped; it is killed", flush=True)
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(stopped_processes, actors, kill)
    try:
        return await call_on_node(node, stopped_processes, actors, kill, deadline_s=ANSWER_S)
    except (TimeoutError, ray.exceptions.RayError):
        return []
