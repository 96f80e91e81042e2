"""What the pool knows about jobs and workers, and which worker takes which job.

A worker either computes the jobs of one message, or holds many calls of functions that wait (`async def`) at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf.rewards.grade import Grade
from rlhf.rewards.output import OutputPipe
from rlhf.rewards.processes import Stopwatch
from rlhf.rewards.protocol import Channel

# Rewards that take microseconds: many of them share a message, and with it the costs of sending and waking up.
QUICK_REWARDS = frozenset(["math", "gsm8k", "multiple_choice", "exact", "f1", "length"])
MAX_JOBS_PER_MESSAGE = 64


@dataclass(slots=True)
class Job:
    number: int
    request: dict[str, Any]
    future: Future[Grade]
    alone: bool = False  # must be sent by itself: some job that was sent together with it took too long

    def begin(self) -> bool:
        """Whether the job still has to be computed; after this it cannot be cancelled."""
        return self.future.running() or self.future.set_running_or_notify_cancel()

    @property
    def is_quick(self) -> bool:
        return self.request["name"] in QUICK_REWARDS and not self.alone


@dataclass
class Worker:
    number: int
    channel: Channel
    pid: int = 0
    ready: bool = False
    doomed: str = ""  # why it is being killed
    output: OutputPipe | None = None  # what it prints, if it runs user functions
    jobs: dict[int, Job] = field(default_factory=dict)  # by number
    waits: bool = False  # its jobs are calls that wait, and all are running
    watch: Stopwatch = field(default_factory=Stopwatch)  # since its start, its jobs' start or its last sign of life

    @property
    def first(self) -> Job:
        return next(iter(self.jobs.values()))


class Queue:
    """Jobs that no worker has taken.

    Args:
        size: how many workers may compute at once, and how many more may hold calls that wait.
        concurrency: for a function that waits, how many of its calls one worker may hold.
    """

    def __init__(self, size: int, concurrency: Mapping[str, int]) -> None:
        self._size, self._concurrency = size, concurrency
        self._computed: deque[Job] = deque()
        self.waiting: dict[str, deque[Job]] = {}  # by function that waits; only the workers know which do

    def add(self, job: Job) -> None:
        self.waiting.get(job.request["name"], self._computed).append(job)

    def put_back(self, jobs: Iterable[Job]) -> None:
        for job in reversed(list(jobs)):
            self.waiting.get(job.request["name"], self._computed).appendleft(job)

    def all_jobs(self) -> list[Job]:
        return [job for queue in (self._computed, *self.waiting.values()) for job in queue]

    def assign(self, workers: Iterable[Worker]) -> list[tuple[Worker, list[Job]]]:
        """Give jobs to workers that can take some; the caller sends them."""
        able = [worker for worker in workers if worker.ready and not worker.doomed]
        idle = [worker for worker in able if not worker.jobs]
        computing = sum(bool(worker.jobs) and not worker.waits for worker in able)
        assigned = []
        for worker in idle[: max(0, self._size - computing)]:
            if jobs := self._next_computed():
                worker.waits, worker.jobs = False, {job.number: job for job in jobs}
                assigned.append((worker, jobs))
                idle.remove(worker)
        return assigned + self._assign_waiting([worker for worker in able if worker.jobs and worker.waits], idle)

    def _next_computed(self) -> list[Job]:
        """Jobs for one message: several quick ones, or any single one."""
        share = min(MAX_JOBS_PER_MESSAGE, 1 + len(self._computed) // (2 * self._size))
        jobs: list[Job] = []
        while self._computed and len(jobs) < share and (not jobs or (jobs[0].is_quick and self._computed[0].is_quick)):
            job = self._computed.popleft()
            if job.begin():
                jobs.append(job)
        return jobs

    def _assign_waiting(self, holders: list[Worker], idle: list[Worker]) -> list[tuple[Worker, list[Job]]]:
        """Spread the calls of each function over the workers, at most `concurrency` calls on each of them."""
        assigned: dict[int, tuple[Worker, list[Job]]] = {}
        for name, queue in self.waiting.items():
            candidates = holders + idle[: max(0, self._size - len(holders))]
            held = {w.number: sum(job.request["name"] == name for job in w.jobs.values()) for w in candidates}
            while queue:
                free = [
                    worker
                    for worker in candidates
                    if not worker.jobs
                    or not (queue[0].alone or worker.first.alone or held[worker.number] >= self._concurrency[name])
                ]
                if not free:
                    break
                job = queue.popleft()
                if not job.begin():
                    continue
                worker = min(free, key=lambda w: held[w.number])
                if not worker.jobs:
                    worker.waits = True
                    holders.append(worker)
                    idle.remove(worker)
                worker.jobs[job.number] = job
                held[worker.number] += 1
                assigned.setdefault(worker.number, (worker, []))[1].append(job)
        return list(assigned.values())
