"""Killable processes that compute rewards: model text is parsed nowhere else.

    driver                                   keeper (python -m rlhf.rewards.worker)
      caller ── submit(job) ──> Future         loads once, never sees a response
      loop thread <── control socket ──────>   forks, kills and reaps workers
           └──── one socket per worker ─────>  worker: one job after the other, or many calls that wait

The keeper forks a worker in milliseconds, so the replacement of a killed worker has everything loaded. The keeper
adopts orphans (PR_SET_CHILD_SUBREAPER): a process that a worker forked, however detached, becomes the keeper's child
when the worker dies, and is killed too. The keeper dies with the driver, even by SIGKILL, and all workers with it.

Messages are JSON in both directions: unlike with pickle, a hijacked worker cannot make the driver run code.
Deadlines are in CPU seconds of the worker; a second limit is in wall-clock seconds (`time_limit.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf.config.reward import RewardPart
from rlhf.rewards.confinement import Grants
from rlhf.rewards.grade import DIED, TIMEOUT, Grade
from rlhf.rewards.jobs import Batch, Job, Queue, Slot, Worker
from rlhf.rewards.keeper import KeeperProcess
from rlhf.rewards.output import OutputPipe, PrintedLines, to_stderr
from rlhf.rewards.processes import count_below
from rlhf.rewards.protocol import Channel
from rlhf.rewards.sources import changed_sources

POLL_S = 0.02  # how often deadlines are checked while jobs run
MAX_FAILED_STARTS = 5  # in a row; after more, every further start would fail too
START_S = 120.0  # for the processes to load, the modules of the user functions included
MAX_PROCESSES = 64  # that a user function may run at once
RELOAD_EVERY_S = 1.0  # a worker is started again so long after it could not load the reward


class Pool:
    """`workers` processes that compute jobs; a process whose job exceeds a limit is killed and replaced.

    Args:
        spares: further processes that are loaded and wait to replace a killed one.
        cpu_seconds, wall_seconds: limits of one job.
        memory_mb: MiB that a worker may allocate beyond the memory that it starts with.
        user_functions: parts of the reward, all with the same grants, whose functions every worker imports first.
        say: gets the lines that user functions print, in the thread of the pool.

    Attributes:
        unconfined: which of `files` and `network` this kernel cannot forbid the workers.
        keeper: the process that forks the workers; another one after it was killed.
        sources: fingerprints of the code of the user functions; a worker that loads other code grades nothing.

    Raises:
        ValueError: a user function cannot be imported or called as configured; a granted file or variable is missing.
        RuntimeError: the processes did not start within START_S.
    """

    keeper_silent_s, ping_s = 20.0, 1.0  # seconds without an answer before the keeper is replaced; between pings
    reload_s = 30.0  # how long new workers try to load the reward as it was, before the pool gives up

    def __init__(
        self,
        *,
        workers: int,
        spares: int = 1,
        cpu_seconds: float = 2.0,
        wall_seconds: float = 10.0,
        memory_mb: int = 1024,
        user_functions: Sequence[RewardPart] = (),
        say: Callable[[str], None] = to_stderr,
    ) -> None:
        self.size, self.full_size = workers, workers + spares
        self._cpu_seconds, self._wall_seconds = cpu_seconds, wall_seconds
        functions = [part.model_dump() for part in user_functions]
        (grants,) = {Grants.of(part) for part in user_functions} or {Grants()}
        self._environment = grants.environment()
        self._folder = tempfile.mkdtemp(prefix="rlhf-rewards-")
        limits = {"memory_mb": memory_mb, "wall_seconds": wall_seconds, "grants": grants, "folder": self._folder}
        self._hello = {**limits, "user_functions": functions, "path": sys.path}
        self.unconfined: tuple[str, ...] = ()
        self.sources: dict[str, dict[str, str]] = {}
        self._printed = PrintedLines([part.name for part in user_functions], say) if user_functions else None
        self._say = say
        self._cannot_load, self._cannot_load_since = "", 0.0  # why new workers cannot load the reward
        self._postponed: deque[float] = deque()  # when workers are started in place of those that could not
        self._incoming: deque[Job] = deque()
        self._queue = Queue(workers, {part.name: part.concurrency for part in user_functions})
        self._workers: dict[int, Worker] = {}
        self._numbers = self._failed_starts = 0
        self._job_numbers = itertools.count()
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
        self._add(request, future := Future[Grade]())
        self._wake_up()
        return future

    def submit_many(self, requests: Sequence[dict[str, Any]]) -> Batch:
        """Queue many jobs, whose grades are wanted together."""
        batch = Batch(len(requests))
        for index, request in enumerate(requests):
            self._add(request, Slot(batch, index))
        self._wake_up()
        return batch

    def _add(self, request: dict[str, Any], future: Future[Grade] | Slot) -> None:
        if self._closing:
            raise RuntimeError(f"the reward pool is closed{': ' if self._broken else ''}{self._broken}")
        request["number"] = next(self._job_numbers)
        self._incoming.append(Job(request["number"], request, future))

    def _wake_up(self) -> None:
        if not self._woken:
            self._woken = True
            self._wake()

    def close(self) -> None:
        """Kill every process; jobs that have no grade yet raise a RuntimeError."""
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
                    self._queue.add(self._incoming.popleft())
                self._dispatch()
                self.keeper.watch(ping_s=self.ping_s)
                self._start_postponed()
                self._enforce_deadlines()
        except BaseException as error:
            self._broken = str(error)
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._closing = True
            self._shut_down()

    def _start_keeper(self) -> None:
        self.keeper = KeeperProcess(self._hello, self._environment, start_s=START_S)
        self._selector.register(self.keeper.channel.socket, selectors.EVENT_READ, "control")
        for _ in range(self.full_size - len(self._workers)):
            self._start_worker()

    def _start_worker(self) -> None:
        self._numbers += 1
        ours, theirs = socket.socketpair()
        worker = Worker(self._numbers, Channel(ours))
        fds = [theirs.fileno()]
        if self._printed is not None:
            worker.output = OutputPipe(self._printed)
            self._selector.register(worker.output, selectors.EVENT_READ, worker.output)
            fds.append(worker.output.pipe)
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self.keeper.send({"fork": worker.number, "fds": len(fds)}, fds=fds)
        theirs.close()
        if worker.output is not None:
            os.close(worker.output.pipe)

    def _on_event(self, source: Any) -> None:
        if source == "wake":
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(65536)
            self._woken = False  # before the queue is read, so that a later job wakes the loop again
        elif source == "control":
            messages, open_ = self.keeper.channel.receive()
            for message in messages:
                self._on_keeper(message)
            if not open_:
                self._restart_keeper()
        elif isinstance(source, OutputPipe):
            if not source.closed and not source.read() and source.ended:
                self._selector.unregister(source)
        elif source.number in self._workers:
            messages, open_ = source.channel.receive()
            try:
                for message in messages:
                    self._on_worker(source, message)
            except Exception:  # not a message of our code: only this worker ends
                open_ = False
            if not open_ and source.number in self._workers and not source.doomed:
                self._kill(source, DIED)

    def _on_keeper(self, message: dict[str, Any]) -> None:
        self.keeper.answered(silent_s=self.keeper_silent_s)
        if "forked" in message and message["forked"] in self._workers:
            self._workers[message["forked"]].pid = message["pid"]
        elif "gone" in message and message["gone"] in self._workers:
            self._remove(self._workers[message["gone"]])

    def _on_worker(self, worker: Worker, message: dict[str, Any]) -> None:
        if worker.doomed:
            return
        if "ready" in message:
            if worker.ready:
                raise ValueError("ready twice")
            self.sources = self.sources or message["sources"]
            if changed := "; ".join(changed_sources(self.sources, message["sources"])):
                self._postpone(worker, f"{changed} is not what the run began with.")
                return
            self._cannot_load = ""
            worker.ready, worker.watch.cpu = True, float(message["cpu"])
            self.unconfined = tuple(map(str, message["unconfined"]))
            self._expect_waiting_calls(message["waits"])
            if not self._started.done() and len(self.worker_pids()) >= self.size:
                self._started.set_result(None)
        elif "broken" in message:
            self._postpone(worker, str(message["broken"]))
        else:
            for reply in message["replies"]:
                number = int(reply["number"]) if worker.waits else next(iter(worker.jobs))
                self._finish(worker, number, Grade.from_message(reply))
                if reply.get("last"):  # the worker reports that it cannot take another job
                    self._requeue(worker)
                    self._kill(worker, DIED)
            worker.watch.cpu = float(message["cpu"])
            worker.watch.start()  # a message, even without replies, shows that no call blocks the others

    def _expect_waiting_calls(self, names: list[str]) -> None:
        """Start more workers for calls that wait: such calls would keep the first workers from computing."""
        if names and not self._queue.has_waiting_functions:
            self._queue.set_waiting(names)
            self.full_size += self.size
            for _ in range(self.size):
                self._start_worker()

    def _postpone(self, worker: Worker, problem: str) -> None:
        """End a worker that cannot load the reward, to be replaced later; the start of the pool fails."""
        if not self._started.done():
            self._started.set_exception(ValueError(problem))
        if self._started.exception() is not None:
            return
        if not self._cannot_load:
            self._cannot_load_since = time.monotonic()
            self._say(f"{problem} New grading processes try again for {self.reload_s:.0f} s.")
        self._cannot_load = problem
        self._kill(worker, DIED)

    def _start_postponed(self) -> None:
        now = time.monotonic()
        while self._postponed and self._postponed[0] < now:
            if self._cannot_load and now - self._cannot_load_since > self.reload_s:
                raise RuntimeError(
                    f"{self._cannot_load} New grading processes have tried for {self.reload_s:.0f} s. Put the code "
                    "back as it was and continue with --resume, or with other code and reward.accept_changed_code=true."
                )
            self._postponed.popleft()
            self._start_worker()

    def _finish(self, worker: Worker, number: int, grade: Grade) -> None:
        worker.jobs.pop(number).future.set_result(grade)

    def _tell(self, worker: Worker, message: Any) -> None:
        try:
            worker.channel.send(message)
        except OSError:
            self._kill(worker, DIED)

    def _dispatch(self) -> None:
        for worker, jobs in self._queue.assign(self._workers.values()):
            if len(jobs) == len(worker.jobs):  # it had no job before
                worker.watch.start()
            self._tell(worker, {"jobs": [job.request for job in jobs]})

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers.values()):
            elapsed = worker.watch.elapsed()
            if not worker.ready and not worker.doomed and elapsed > START_S:
                self._kill(worker, DIED)
            if not worker.jobs or worker.doomed or elapsed < min(POLL_S, self._wall_seconds):
                continue
            if ":" in worker.first.request["name"] and count_below(worker.pid, MAX_PROCESSES) > MAX_PROCESSES:
                self._kill(worker, DIED, f"over {MAX_PROCESSES} processes")
                continue
            limits = {"cpu_seconds": self._cpu_seconds, "wall_seconds": self._wall_seconds}
            if limit := worker.watch.exceeded(worker.pid, **limits):
                self._kill(worker, TIMEOUT, limit)

    def _kill(self, worker: Worker, why: str, detail: str = "the process died") -> None:
        """Have the keeper kill a worker; the running job, if known, gets the status `why`, others are queued again."""
        if worker.doomed:
            return
        worker.doomed = why
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel.socket)
        if worker.is_one_of_several():
            for job in worker.jobs.values():
                job.alone = True
        elif worker.jobs:
            self._finish(worker, worker.first.number, Grade(None, why, detail=detail))
        self._requeue(worker)
        self.keeper.send({"kill": worker.number})
        if self._cannot_load and not worker.ready:
            self._postponed.append(time.monotonic() + RELOAD_EVERY_S)
            return
        self._failed_starts = 0 if worker.ready else self._failed_starts + 1
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RuntimeError("the grading processes die while they start; their own messages are above")
        self._start_worker()

    def _requeue(self, worker: Worker) -> None:
        """Put the unfinished jobs of a worker back to the front of the queue."""
        self._queue.put_back(worker.jobs.values())
        worker.jobs.clear()

    def _remove(self, worker: Worker) -> None:
        if not worker.doomed:
            self._kill(worker, DIED)
        del self._workers[worker.number]
        self._close(worker)

    def _close(self, worker: Worker) -> None:
        worker.channel.close()
        if worker.output is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(worker.output)
            worker.output.close()

    def _restart_keeper(self) -> None:
        """Start again after something killed the keeper, and with it every worker."""
        if not self._started.done():
            raise RuntimeError("the grading processes ended while loading; their own message is above")
        self._selector.unregister(self.keeper.channel.socket)
        self.keeper.end()
        for worker in list(self._workers.values()):
            worker.doomed = worker.doomed or DIED
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(worker.channel.socket)
            self._requeue(worker)
            self._close(worker)
        self._workers.clear()
        self._postponed.clear()
        self._start_keeper()

    def _shut_down(self) -> None:
        running = [job for worker in self._workers.values() for job in worker.jobs.values()]
        for job in [*self._incoming, *self._queue.clear(), *running]:
            if job.begin():
                job.future.set_exception(RuntimeError(self._broken or "the reward pool was closed"))
        if hasattr(self, "keeper"):
            self.keeper.end()
        for worker in self._workers.values():
            self._close(worker)
        self._workers.clear()
        if self._printed is not None:
            self._printed.end_window()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
