"""Looks every few seconds whether a process of an actor has been stopped, and kills it: its death is then noticed.

A dead process breaks the calls that wait for it within seconds. A stopped one (SIGSTOP, a frozen container) breaks
none: whoever waits for it would do so until `cluster.step_deadline_s`. Processes of the driver's own node are looked
at directly, those of other nodes by a small Ray task there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.cluster.actors import ActorGroup

PERIOD_S = 5.0
ANSWER_S = 30.0  # for a node; one that is gone is noticed by Ray
LOOKS = 2  # in a row; a terminal may stop a whole run for a moment


def stopped_processes(actors: Sequence[int], kill: Sequence[int] = ()) -> list[int]:
    """The stopped processes of these actors of this node, those below them too; and kill some that were found before.

    Args:
        actors: the ids of their processes.
    """
    processes = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    family = set(actors) & processes.keys()
    while children := {pid for pid, process in processes.items() if process.info["ppid"] in family} - family:
        family |= children
    stopped = [pid for pid in sorted(family) if processes[pid].info["status"] == psutil.STATUS_STOPPED]
    for pid in stopped:
        if pid in kill:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[pid].kill()
    return stopped


class Heartbeat:
    """Watches the processes of all actors until it is cancelled."""

    def __init__(self, groups: Sequence[ActorGroup]) -> None:
        self._groups = groups
        self._seen: dict[tuple[str, int], int] = {}  # (node, process) -> looks in a row that found it stopped

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._look()

    async def _look(self) -> None:
        actors: dict[str, list[int]] = defaultdict(list)
        for group in self._groups:
            for location in group.locations:
                actors[location.node].append(location.process)
        answers = await asyncio.gather(*(self._look_at(node, processes) for node, processes in actors.items()))
        stopped = {(node, process) for node, found in zip(actors, answers, strict=True) for process in found}
        self._seen = {key: self._seen.get(key, 0) + 1 for key in stopped}

    async def _look_at(self, node: str, actors: list[int]) -> list[int]:
        kill = [process for (where, process), looks in self._seen.items() if where == node and looks == LOOKS]
        for process in kill:
            print(f"heartbeat: process {process} on node {node[:8]} is stopped; it is killed", flush=True)
        if node == ray.get_runtime_context().get_node_id():
            return stopped_processes(actors, kill)
        there: Any = ray.remote(stopped_processes).options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        )
        try:
            found: list[int] = await asyncio.wait_for(
                asyncio.wrap_future(there.remote(actors, kill).future()), ANSWER_S
            )
        except (TimeoutError, ray.exceptions.RayError):
            return []
        return found
