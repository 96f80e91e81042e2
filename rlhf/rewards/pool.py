"""Killable processes that compute rewards (`rlhf.processes`). Model text is parsed only there.

A worker holds up to `capacity` jobs of one name. Built-in rewards take microseconds, so many of them share a message. A
function that computes has a worker to itself. Many calls of an `async def` function run at once in one worker. The
configured number of workers may compute, and as many more may hold asynchronous calls.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlhf.config.printing import to_stderr
from rlhf.config.reward import GRANTS, RewardConfig, RewardPart
from rlhf.processes.confinement import Grants
from rlhf.processes.workers import DIED, LOST, Worker, Workers
from rlhf.rewards.grade import Grade

QUICK_REWARDS = frozenset(["math", "gsm8k", "multiple_choice", "exact", "f1", "length"])
MAX_QUICK_JOBS = 64  # per message
PARTS = 8  # jobs of a worker that exceeded a limit are retried in so many parts


@dataclass(slots=True, eq=False)
class Job:
    number: int
    request: dict[str, Any]
    future: Future[Grade]
    together: int = sys.maxsize  # largest number of jobs in its worker; lower after one of them took too long

    @property
    def name(self) -> str:
        return str(self.request["name"])

    def begin(self) -> bool:
        """True if the job still has to be computed. From then on it cannot be cancelled."""
        return self.future.running() or self.future.set_running_or_notify_cancel()


def grants_of(part: RewardPart) -> Grants:
    return Grants(**{name: getattr(part, name) for name in GRANTS})


def default_workers() -> int:
    """One worker per core that this process may use, at most 8: each grades thousands of answers per second."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def shared_out(config: RewardConfig, workers: int) -> RewardConfig:
    """The config of one of several workers of a node: `reward.workers` is divided among them, at least 1 for each."""
    share = max(1, (config.workers or default_workers()) // workers)
    return config.model_copy(update={"workers": share})


def _runs_code(worker: Worker) -> bool:
    return any(job.name == "code" for job in worker.work.values())


class Pool(Workers):
    """Processes that compute jobs. A process whose job exceeds a limit is killed and replaced.

    Args:
        workers: number of processes that may compute at the same time.
        user_functions: parts of the reward with the same grants; every worker imports their functions.
        limits: `cpu_seconds` and `memory_mb` of `Workers`.
    """

    def __init__(
        self,
        *,
        workers: int,
        user_functions: Sequence[RewardPart] = (),
        wall_seconds: float = 10.0,
        say: Callable[[str], None] = to_stderr,
        **limits: Any,
    ) -> None:
        self._computing = workers
        self._concurrency = {part.name: part.concurrency for part in user_functions}
        self._waits: frozenset[str] = frozenset()  # names of `async def` functions, as the workers report
        self.groups: frozenset[str] = frozenset()  # names of functions in TRL's signature
        self._queues: dict[str, deque[Job]] = {}  # by name
        self._numbers_of_jobs = itertools.count()
        (grants,) = {grants_of(part) for part in user_functions} or {Grants()}
        super().__init__(
            "reward",
            "rlhf.rewards.worker",
            {"user_functions": [part.model_dump() for part in user_functions], "wall_seconds": wall_seconds},
            code=[part.name for part in user_functions],
            size=workers,
            wall_seconds=wall_seconds,
            grants=grants,
            say=say,
            **limits,
        )

    def submit(self, request: dict[str, Any]) -> Future[Grade]:
        """Queue one job. A failed job gives a grade with the status of the failure, not an exception."""
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[dict[str, Any]]) -> list[Future[Grade]]:
        """Queue jobs. Futures without a grade raise RuntimeError when the pool is closed or breaks."""
        jobs = [Job(next(self._numbers_of_jobs), request, Future()) for request in requests]
        self.call_soon(self._add, jobs)
        return [job.future for job in jobs]

    # --- the methods below run in the thread of the workers ---

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._queues.setdefault(job.name, deque()).append(job)

    def on_ready(self, worker: Worker, about: Any) -> None:
        self._waits, self.groups = frozenset(about["waits"]), frozenset(about["groups"])
        self.size = self._computing * (2 if self._waits else 1)

    def max_processes(self, worker: Worker) -> int | None:
        return self._processes if _runs_code(worker) else super().max_processes(worker)

    def on_message(self, worker: Worker, message: Any) -> None:
        if "died" in message:
            self.kill(worker, DIED, str(message["died"]))
            return
        for reply in message["replies"]:
            grade = Grade.from_message(reply)
            worker.work.pop(reply["number"]).future.set_result(grade)
        if not worker.work:
            worker.watch.stop()
        elif worker.kind or _runs_code(worker):  # a sign of life: no call blocks the others, or a test begins
            worker.watch.start(worker.pid)

    def on_gone(self, worker: Worker, why: str, detail: str) -> None:
        """A worker's only job gets the status `why`. Several jobs are tried again in smaller and smaller parts.

        Retried one by one, 200 calls of half a minute would take 50 minutes on two workers because one of them hangs.
        """
        jobs = list(worker.work.values())
        worker.work.clear()
        if why != LOST and len(jobs) == 1:
            jobs.pop().future.set_result(Grade(None, why, detail=detail))
        for job in reversed(jobs):
            if why != LOST:
                job.together = max(1, len(jobs) // PARTS)
            self._queues[job.name].appendleft(job)

    def on_turn(self) -> None:
        """Assign jobs to workers, the oldest first."""
        workers = self.free()
        for queue in sorted(filter(None, self._queues.values()), key=lambda queue: queue[0].number):
            while queue and (worker := self._worker_for(queue[0], workers)):
                self._hand_out(queue, worker)

    def _worker_for(self, job: Job, workers: Sequence[Worker]) -> Worker | None:
        """The worker with the fewest jobs that can take this one. No worker mixes calls that wait with other jobs."""
        waits = job.name in self._waits
        kind = [worker for worker in workers if worker.kind is waits]
        able = [worker for worker in kind if not worker.work]
        able += [worker for worker in workers if worker.kind is None] if len(kind) < self._computing else []
        if waits:
            able += [worker for worker in kind if worker.work and self._room(worker, job) > 0]
        return min(able, key=lambda worker: len(worker.work), default=None)

    def _room(self, worker: Worker, job: Job) -> int:
        """How many more jobs of this job's name a worker can hold, this one included."""
        name, jobs = job.name, worker.work.values()
        capacity = MAX_QUICK_JOBS if name in QUICK_REWARDS else self._concurrency[name] if name in self._waits else 1
        together = min([job.together, *(held.together for held in jobs)])
        return min(capacity - sum(held.name == name for held in jobs), together - len(jobs))

    def _hand_out(self, queue: deque[Job], worker: Worker) -> None:
        share = min(self._room(worker, queue[0]), 1 + len(queue) // (2 * self._computing))
        jobs: list[Job] = []
        while queue and len(jobs) < min(share, queue[0].together - len(worker.work)):
            job = queue.popleft()
            if job.begin():
                jobs.append(job)
                share = min(share, job.together - len(worker.work))
        if jobs:
            worker.kind = jobs[0].name in self._waits
            worker.work |= {job.number: job for job in jobs}
            if not worker.watch.running:
                worker.watch.start(worker.pid)
            self.send(worker, {"jobs": [{**job.request, "number": job.number} for job in jobs]})

    def on_end(self, reason: str) -> None:
        running = [job for worker in self._workers.values() for job in worker.work.values()]
        for job in itertools.chain(running, *self._queues.values()):
            if job.begin():
                job.future.set_exception(RuntimeError(reason or "the reward processes were closed"))
