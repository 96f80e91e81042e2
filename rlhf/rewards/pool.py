"""Killable processes that compute rewards: model text is parsed nowhere else.

    driver                                   keeper (python -m rlhf.rewards.worker)
      caller ── submit(job) ──> Future         loads sympy once, never sees a response
      loop thread <── control socket ──────>   forks, kills and reaps workers
           └──── one socket per worker ─────>  worker: one job after the other

The keeper forks a worker in milliseconds, so the replacement of a killed worker has everything loaded. The keeper
adopts orphans (PR_SET_CHILD_SUBREAPER): a process that a worker forked, however detached, becomes the keeper's child
when the worker dies, and is killed too. The keeper dies with the driver, even by SIGKILL, and all workers with it.

Messages are JSON in both directions: unlike with pickle, a hijacked worker cannot make the driver run code.
Deadlines are in CPU seconds of the worker; a second limit is in wall-clock seconds (`stopwatch.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlhf.rewards.grade import Grade
from rlhf.rewards.stopwatch import Stopwatch
from rlhf.rewards.wire import QUICK_REWARDS, Channel

POLL_S = 0.02  # how often deadlines are checked while jobs run
MAX_JOBS_PER_MESSAGE = 32  # cheap jobs share system calls
MAX_FAILED_STARTS = 5  # in a row; after more, every further start would fail too
START_S = 120.0  # for the processes to load, the modules of the user functions included
MAX_REMEMBERED = 100_000  # results of costly comparisons
CLOSE_S = 5.0  # for the keeper to kill and reap every worker, before it is killed itself


@dataclass
class _Job:
    request: dict[str, Any]
    future: Future[Grade]
    begun: bool = False
    alone: bool = False  # must be sent by itself: it was in a message of which some job took too long


@dataclass
class _Worker:
    number: int
    channel: Channel
    pid: int = 0
    ready: bool = False
    doomed: str = ""  # why it is being killed
    jobs: deque[_Job] = field(default_factory=deque)  # jobs[0] is running
    asked: tuple[str, ...] = ()  # the costly comparison that the running job is about to compute
    watch: Stopwatch = field(default_factory=Stopwatch)  # of the start of the worker, then of the running job


class Pool:
    """`workers` processes that compute jobs; a process whose job exceeds a limit is killed and replaced.

    Args:
        spares: further processes that are loaded and wait to replace a killed one.
        cpu_seconds, wall_seconds: limits of one job.
        memory_mb: MiB that a worker may allocate beyond the memory that it starts with.
        user_functions: `module:function` names that every worker imports before its first job.

    Raises:
        ValueError: a user function cannot be imported.
        RuntimeError: the processes did not start within START_S.
    """

    def __init__(
        self,
        *,
        workers: int,
        spares: int = 1,
        cpu_seconds: float = 2.0,
        wall_seconds: float = 10.0,
        memory_mb: int = 1024,
        user_functions: Sequence[str] = (),
    ) -> None:
        self.size, self.full_size = workers, workers + spares
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        self._hello = {"memory_mb": memory_mb, "user_functions": list(user_functions), "path": sys.path}
        self._cache: OrderedDict[tuple[str, ...], Grade] = OrderedDict()
        self._incoming: deque[_Job] = deque()
        self._pending: deque[_Job] = deque()
        self._workers: dict[int, _Worker] = {}
        self._numbers = self._failed_starts = 0
        self._closing, self._broken, self._woken = False, "", False
        self._started: Future[None] = Future()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()
        try:
            self._started.result(timeout=START_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise RuntimeError(
                    f"reward: the grading processes did not load within {START_S:.0f} s. Look at what the modules of "
                    "the user functions import."
                ) from None
            raise

    def submit(self, request: dict[str, Any]) -> Future[Grade]:
        """Queue one job; a job that fails gives a grade with the status of the failure, not an exception."""
        if self._closing:
            raise RuntimeError(f"the reward pool is closed{': ' if self._broken else ''}{self._broken}")
        job = _Job(request, Future())
        self._incoming.append(job)
        if not self._woken:
            self._woken = True
            self._wake()
        return job.future

    def close(self) -> None:
        """Kill every process; jobs without a result are cancelled."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def worker_pids(self) -> list[int]:
        """Processes that are able to take a job, spares included."""
        return [worker.pid for worker in list(self._workers.values()) if worker.ready and not worker.doomed]

    @property
    def comparisons_remembered(self) -> int:
        return len(self._cache)

    def wait_full(self, seconds: float) -> int:
        """Wait until every killed worker is replaced, or `seconds` have passed; returns how many are ready."""
        deadline = time.monotonic() + seconds
        while len(self.worker_pids()) < self.full_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return len(self.worker_pids())

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # the buffer is full: the loop is awake anyway
            self._wake_write.send(b"x")

    # --- the methods below run in the loop thread ---

    def _run(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        try:
            self._start_keeper()
            while not self._closing:
                busy = any(worker.jobs for worker in self._workers.values())
                for key, _ in self._selector.select(POLL_S if busy else 1.0):
                    self._on_event(key.data)
                while self._incoming:
                    self._pending.append(self._incoming.popleft())
                self._dispatch()
                self._enforce_deadlines()
        except BaseException as error:
            self._broken = str(error)
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._closing = True
            self._shut_down()

    def _start_keeper(self) -> None:
        """Start the process that forks workers; PDEATHSIG ends it with this thread, which lives as long as the pool."""
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "rlhf.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps(self._hello).encode())
        self._keeper.stdin.close()
        self._control = Channel(ours)
        self._selector.register(ours, selectors.EVENT_READ, "control")
        for _ in range(self.full_size):
            self._start_worker()

    def _start_worker(self) -> None:
        self._numbers += 1
        ours, theirs = socket.socketpair()
        worker = _Worker(self._numbers, Channel(ours))
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        with contextlib.suppress(OSError):  # a dead keeper has an event of its own
            self._control.send({"fork": worker.number}, fd=theirs.fileno())
        theirs.close()

    def _on_event(self, source: Any) -> None:
        if source == "wake":
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(65536)
            self._woken = False  # before the queue is read, so that a later job wakes the loop again
        elif source == "control":
            messages, open_ = self._control.receive()
            for message in messages:
                self._on_keeper(message)
            if not open_:
                self._restart_keeper()
        elif source.number in self._workers:
            messages, open_ = source.channel.receive()
            for message in messages:
                try:
                    self._on_worker(source, message)
                except (KeyError, IndexError, TypeError, ValueError):  # not a message that our code sends
                    self._kill(source, "died")
            if not open_ and source.number in self._workers and not source.doomed:
                self._kill(source, "died")

    def _on_keeper(self, message: dict[str, Any]) -> None:
        if "forked" in message and message["forked"] in self._workers:
            self._workers[message["forked"]].pid = message["pid"]
        elif "gone" in message and message["gone"] in self._workers:
            self._remove(self._workers[message["gone"]])

    def _on_worker(self, worker: _Worker, message: dict[str, Any]) -> None:
        if worker.doomed:
            return
        if "ready" in message:
            worker.ready, worker.watch.cpu = True, message["cpu"]
            if not self._started.done() and len(self.worker_pids()) >= self.size:
                self._started.set_result(None)
        elif "broken" in message:
            self._fail_start(ValueError(message["broken"]))
        elif "ask" in message:
            worker.asked = tuple(message["ask"])
            known = self._cache.get(worker.asked)
            self._tell(worker, {"known": None if known is None else [known.value, known.status]})
        else:
            for reply in message["replies"]:
                value = None if reply["value"] is None else float(reply["value"])
                grade = Grade(value, str(reply["status"]), str(reply["extracted"]), str(reply["detail"]))
                self._finish(worker, grade, cpu=float(message["cpu"]))
                if reply.get("last"):  # the worker reports that it cannot take another job
                    self._requeue(worker)
                    self._kill(worker, "died")

    def _finish(self, worker: _Worker, grade: Grade, *, cpu: float) -> None:
        self._remember(worker, grade)
        job = worker.jobs.popleft()
        worker.watch.cpu = cpu
        worker.watch.start()
        job.future.set_result(grade)

    def _remember(self, worker: _Worker, grade: Grade) -> None:
        if worker.asked:
            self._cache[worker.asked] = grade
            if len(self._cache) > MAX_REMEMBERED:
                self._cache.popitem(last=False)
        worker.asked = ()

    def _tell(self, worker: _Worker, message: Any) -> None:
        try:
            worker.channel.send(message)
        except OSError:
            self._kill(worker, "died")

    def _dispatch(self) -> None:
        idle = [w for w in self._workers.values() if w.ready and not w.doomed and not w.jobs]
        running = sum(1 for w in self._workers.values() if w.jobs)
        for worker in idle[: max(0, self.size - running)]:
            share = min(MAX_JOBS_PER_MESSAGE, 1 + len(self._pending) // (2 * self.size))
            requests: list[dict[str, Any]] = []
            while self._pending and len(requests) < share:
                if self._pending[0].alone and requests:
                    break
                job = self._pending.popleft()
                share = 1 if job.alone else share
                if job.begun or job.future.set_running_or_notify_cancel():
                    job.begun = True
                    worker.jobs.append(job)
                    requests.append(job.request)
            if not requests:
                return
            worker.watch.start()
            self._tell(worker, {"jobs": requests})

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers.values()):
            elapsed = worker.watch.elapsed()
            if not worker.ready and not worker.doomed and elapsed > START_S:
                self._kill(worker, "died")
            if not worker.jobs or worker.doomed or elapsed < min(POLL_S, self._wall_seconds):
                continue
            limits = {"cpu_seconds": self._cpu_seconds, "wall_seconds": self._wall_seconds}
            if limit := worker.watch.exceeded(worker.pid, **limits):
                self._kill(worker, "timeout", limit)

    def _kill(self, worker: _Worker, why: str, detail: str = "the process died") -> None:
        """Have the keeper kill a worker; the running job gets the status `why`, the jobs behind it are queued again."""
        if worker.doomed:
            return
        worker.doomed = why
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel.socket)
        if _is_one_of_several(worker):
            for job in worker.jobs:
                job.alone = True
        elif worker.jobs:
            extracted = worker.asked[-2] if len(worker.asked) >= 2 else ""
            self._finish(worker, Grade(None, why, extracted, detail), cpu=0.0)
        self._requeue(worker)
        self._failed_starts = 0 if worker.ready else self._failed_starts + 1
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RuntimeError("the grading processes die while they start; their own messages are above")
        with contextlib.suppress(OSError):
            self._control.send({"kill": worker.number})
        self._start_worker()

    def _requeue(self, worker: _Worker) -> None:
        """Put the unfinished jobs of a worker back to the front of the queue."""
        self._pending.extendleft(reversed(worker.jobs))
        worker.jobs.clear()

    def _remove(self, worker: _Worker) -> None:
        if not worker.doomed:
            self._kill(worker, "died")
        del self._workers[worker.number]
        worker.channel.close()

    def _restart_keeper(self) -> None:
        """Start again after something killed the keeper, and with it every worker."""
        if not self._started.done():
            raise RuntimeError("the grading processes ended while loading; their own message is above")
        self._selector.unregister(self._control.socket)
        self._control.close()
        self._keeper.wait()
        for worker in list(self._workers.values()):
            worker.doomed = worker.doomed or "died"
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.channel.socket)
            self._requeue(worker)
            worker.channel.close()
        self._workers.clear()
        self._start_keeper()

    def _fail_start(self, error: Exception) -> None:
        if not self._started.done():
            self._started.set_exception(error)

    def _shut_down(self) -> None:
        for job in [*self._incoming, *self._pending, *(j for w in self._workers.values() for j in w.jobs)]:
            if job.begun or not job.future.cancel():
                job.future.set_result(Grade(None, "died", "", "the pool was closed"))
        if hasattr(self, "_keeper"):
            self._control.close()  # tells the keeper to kill every worker
            try:
                self._keeper.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._keeper.pid, signal.SIGKILL)
                self._keeper.wait()
        for worker in self._workers.values():
            worker.channel.close()
        self._workers.clear()
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()


def _is_one_of_several(worker: _Worker) -> bool:
    """Whether any of its jobs may be the running one, since quick jobs are answered together."""
    return len(worker.jobs) > 1 and not worker.asked and worker.jobs[0].request["name"] in QUICK_REWARDS


def default_workers() -> int:
    """One worker per core that this process may use, at most 8: each grades thousands of answers per second."""
    return max(1, min(8, len(os.sched_getaffinity(0))))
