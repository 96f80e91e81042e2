"""Looks at the processes of all actors every few seconds: it kills those that are stopped, and measures their memory.

A dead process breaks the calls that wait for it within seconds. A stopped one (by SIGSTOP, or in a frozen container)
does not answer and breaks nothing: calls would wait for `cluster.step_deadline_s`. So a process that LOOKS looks in a
row found stopped is killed, and its actor is then noticed as lost. The driver looks at its own node itself, and at
every other node through a small Ray task there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import ray

from rlhf.check.memory import GIB
from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.node_report import call_on_node, nvidia_smi

PERIOD_S = 5.0
ANSWER_S = 30.0  # for a node; one that is gone is noticed by Ray
GPU_ANSWER_S = 5.0  # for nvidia-smi, which hangs with a broken driver: the rest of the look must still be in time
LOOKS = 2  # in a row; a terminal may stop a whole run for a moment


class Look(NamedTuple):
    """What was seen on one node: stopped processes; bytes of each process with those below it; bytes in use by GPU."""

    stopped: Sequence[int] = ()
    resident: Mapping[int, int] = {}
    gpus: Mapping[str, int] = {}


def look(actors: Sequence[int], kill: Sequence[int] = (), *, others: Sequence[int] = ()) -> Look:
    """Look at these actors of this node and all processes below them; kill those in `kill` that are still stopped.

    Of the processes `others` only the memory is measured.
    """
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
    resident = {pid: sum(map(_resident, family(pid))) for pid in (*actors, *others)}
    return Look([process.pid for process in stopped], resident, _gpu_bytes())


def _resident(process: psutil.Process) -> int:
    try:
        size: int = process.memory_info().rss
    except psutil.Error:  # it has just ended
        return 0
    return size


def _gpu_bytes() -> dict[str, int]:
    """Bytes in use on each GPU of this node, by its number and by its id; empty without GPUs."""
    try:
        rows = [line.removesuffix(" MiB").split(", ") for line in nvidia_smi("index,uuid,memory.used", GPU_ANSWER_S)]
        return {name: int(used) * 2**20 for number, uuid, used in rows for name in (number, uuid)}
    except ValueError:  # a GPU does not report it
        return {}


def memory_metrics(
    groups: Sequence[ActorGroup[Any]], looks: Mapping[str, Look], others: Mapping[str, int]
) -> dict[str, float]:
    """memory/<role>/<rank> and, of actors with GPUs, memory/<role>/<rank>/gpu, in GiB.

    `looks` are by node; `others` are bytes of further processes, by name.
    """
    sizes = dict(others)
    for group in groups:
        role = group.name.replace(" ", "_")
        if "," in role:  # a new engine that has not joined its role yet
            continue
        for rank, location in enumerate(group.locations):
            seen = looks.get(location.node, Look())
            sizes[f"{role}/{rank}"] = seen.resident.get(location.process, 0)
            sizes[f"{role}/{rank}/gpu"] = sum(seen.gpus.get(gpu, 0) for gpu in location.gpu_ids)
    return {f"memory/{name}": size / GIB for name, size in sizes.items() if size}


class Heartbeat:
    """Watches the processes of all actors until it is cancelled."""

    def __init__(self, groups: Sequence[ActorGroup[Any]]) -> None:
        self.memory: dict[str, float] = {}  # metrics of the last look
        self.others: Callable[[], Mapping[str, int]] = dict  # further processes of the driver, of which to measure it
        self._groups = groups
        self._seen: dict[tuple[str, int], int] = {}  # (node, process) -> looks in a row that found it stopped

    async def watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        if not self._groups:  # Ray may not be there yet
            return
        here = ray.get_runtime_context().get_node_id()
        actors: dict[str, list[int]] = {here: []}
        for group in self._groups:
            for location in group.locations:
                actors.setdefault(location.node, []).append(location.process)
        others = dict(self.others())
        answers = await asyncio.gather(
            *(self._look_at(node, pids, [*others.values()] if node == here else []) for node, pids in actors.items())
        )
        looks = dict(zip(actors, answers, strict=True))
        stopped = {(node, process) for node, seen in looks.items() for process in seen.stopped}
        self._seen = {key: self._seen.get(key, 0) + 1 for key in stopped}
        own = {name: looks[here].resident[process] for name, process in others.items()}
        self.memory = memory_metrics(self._groups, looks, {"driver": _resident(psutil.Process()), **own})

    async def _look_at(self, node: str, actors: list[int], others: list[int]) -> Look:
        kill = [process for (where, process), looks in self._seen.items() if where == node and looks == LOOKS]
        for process in kill:
            print(f"heartbeat: process {process} on node {node[:8]} is stopped; it is killed", flush=True)
        if node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(look, actors, kill, others=others)
        try:
            found: Look = await call_on_node(node, look, actors, kill, deadline_s=ANSWER_S)
        except (TimeoutError, ray.exceptions.RayError):
            return Look()
        return found
