"""What the pool knows about jobs and workers, and which worker takes which job.

A worker either computes jobs one after the other, or holds many calls of functions that wait (`async def`) at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf.rewards.grade import Grade
from rlhf.rewards.output import OutputPipe
from rlhf.rewards.protocol import QUICK_REWARDS, Channel
from rlhf.rewards.time_limit import Stopwatch

SENT_AHEAD = 32  # a worker gets the next quick jobs when it has at most this many left
MAX_JOBS_PER_MESSAGE = 128  # cheap jobs share system calls


class Batch:
    """The results of many jobs, with one lock for all: a Future per job would cost more than grading an answer."""

    def __init__(self, jobs: int) -> None:
        self._grades: list[Grade | None] = [None] * jobs
        self._error: Exception | None = None
        self._left, self._done = jobs, threading.Event()
        if not jobs:
            self._done.set()

    def set(self, index: int, grade: Grade) -> None:
        """Only the thread of the pool calls this."""
        self._grades[index] = grade
        self._left -= 1
        if self._left == 0:
            self._done.set()

    def fail(self, error: Exception) -> None:
        """End the wait with an exception; only the thread of the pool calls this."""
        self._error = error
        self._done.set()

    def result(self) -> list[Grade]:
        """Wait for the grades of all jobs, in order.

        Raises:
            RuntimeError: the pool was closed, or has broken.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return [grade for grade in self._grades if grade is not None]


class Slot(NamedTuple):
    """The place of one job in a batch, used as its future."""

    batch: Batch
    row: int

    def set_running_or_notify_cancel(self) -> bool:
        return True

    def set_result(self, grade: Grade) -> None:
        self.batch.set(self.row, grade)

    def set_exception(self, error: Exception) -> None:
        self.batch.fail(error)


@dataclass(slots=True)
class Job:
    number: int
    request: dict[str, Any]
    future: Future[Grade] | Slot
    begun: bool = False
    alone: bool = False  # must be sent by itself: some job that was sent together with it took too long

    def begin(self) -> bool:
        """Whether the job still has to be computed; after this it cannot be cancelled."""
        self.begun = self.begun or self.future.set_running_or_notify_cancel()
        return self.begun


@dataclass
class Worker:
    number: int
    channel: Channel
    pid: int = 0
    ready: bool = False
    doomed: str = ""  # why it is being killed
    output: OutputPipe | None = None  # what it prints, if it runs user functions
    jobs: dict[int, Job] = field(default_factory=dict)  # by number; unless `waits`, the first one is running
    waits: bool = False  # all of its jobs are calls that wait, and all are running
    watch: Stopwatch = field(default_factory=Stopwatch)  # since its start, its job's start or its last sign of life

    @property
    def first(self) -> Job:
        return next(iter(self.jobs.values()))

    def is_one_of_several(self) -> bool:
        """Whether it has several jobs, and any of them may be what takes too long."""
        return len(self.jobs) > 1 and (self.waits or self.first.request["name"] in QUICK_REWARDS)


class Queue:
    """Jobs that no worker has taken.

    Args:
        size: how many workers may compute at once, and how many more may hold calls that wait.
        concurrency: for a function that waits, how many of its calls one worker may hold.
    """

    def __init__(self, size: int, concurrency: Mapping[str, int]) -> None:
        self._size, self._concurrency = size, concurrency
        self._computed: deque[Job] = deque()
        self._waiting: dict[str, deque[Job]] = {}

    def set_waiting(self, names: Iterable[str]) -> None:
        """Name the functions that wait; only the workers know this, because they import them."""
        self._waiting = self._waiting or {name: deque() for name in names}

    @property
    def has_waiting_functions(self) -> bool:
        return bool(self._waiting)

    def add(self, job: Job) -> None:
        self._waiting.get(job.request["name"], self._computed).append(job)

    def put_back(self, jobs: Iterable[Job]) -> None:
        for job in reversed(list(jobs)):
            self._waiting.get(job.request["name"], self._computed).appendleft(job)

    def clear(self) -> list[Job]:
        jobs = [job for queue in (self._computed, *self._waiting.values()) for job in queue]
        self._computed.clear()
        self._waiting.clear()
        return jobs

    def assign(self, workers: Iterable[Worker]) -> list[tuple[Worker, list[Job]]]:
        """Give jobs to workers that can take some; the caller sends them."""
        able = [worker for worker in workers if worker.ready and not worker.doomed]
        idle = [worker for worker in able if not worker.jobs]
        computing = [worker for worker in able if worker.jobs and not worker.waits]
        assigned = []
        for worker in computing:  # quick jobs are sent ahead, so that the worker never waits for the next ones
            if _is_quick(worker.first) and len(worker.jobs) <= SENT_AHEAD and self._next_is_quick():
                assigned.append((worker, self._next_computed()))
        for worker in idle[: max(0, self._size - len(computing))]:
            if jobs := self._next_computed():
                worker.waits = False
                assigned.append((worker, jobs))
                idle.remove(worker)
        for worker, jobs in assigned:
            worker.jobs |= {job.number: job for job in jobs}
        return assigned + self._assign_waiting([w for w in able if w.jobs and w.waits], idle)

    def _next_is_quick(self) -> bool:
        return len(self._computed) > 4 * self._size and _is_quick(self._computed[0])

    def _next_computed(self) -> list[Job]:
        share = min(MAX_JOBS_PER_MESSAGE, 1 + len(self._computed) // (2 * self._size))
        jobs: list[Job] = []
        while self._computed and len(jobs) < share and not (jobs and self._computed[0].alone):
            job = self._computed.popleft()
            if job.begin():
                jobs.append(job)
                if job.alone:
                    break
        return jobs

    def _assign_waiting(self, holders: list[Worker], idle: list[Worker]) -> list[tuple[Worker, list[Job]]]:
        """Spread the calls of each function over the workers, at most `concurrency` calls on each of them."""
        assigned: dict[int, tuple[Worker, list[Job]]] = {}
        for name, queue in self._waiting.items():
            candidates = holders + idle[: max(0, self._size - len(holders))]
            held = {w.number: sum(job.request["name"] == name for job in w.jobs.values()) for w in candidates}
            while queue:
                alone = queue[0].alone
                free = [
                    worker
                    for worker in candidates
                    if (not worker.jobs if alone else held[worker.number] < self._concurrency[name])
                    and not (worker.jobs and worker.first.alone)
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


def _is_quick(job: Job) -> bool:
    return job.request["name"] in QUICK_REWARDS and not job.alone
