"""Killable processes that compute rewards: model text is parsed nowhere else.

    driver                                   keeper (python -m rlhf.rewards.worker)
      caller ── submit(job) ──> Future         loads once, never sees a response
      loop thread <── control socket ──────>   forks, kills and reaps workers
           └──── one socket per worker ─────>  worker: one job after the other, or many calls that wait

The keeper forks a worker in milliseconds, so the replacement of a killed worker has everything loaded. The keeper
adopts orphans (PR_SET_CHILD_SUBREAPER): a process that a worker forked, however detached, becomes the keeper's child
when the worker dies, and is killed too. The keeper dies with the driver, even by SIGKILL, and all workers with it.

Messages are JSON in both directions: unlike with pickle, a hijacked worker cannot make the driver run code.
Deadlines are in CPU seconds of the worker; a second limit is in wall-clock seconds (`processes.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf.config.reward import RewardPart
from rlhf.rewards.confinement import Grants
from rlhf.rewards.grade import DIED, TIMEOUT, Grade
from rlhf.rewards.jobs import Job, Queue, Worker
from rlhf.rewards.output import OutputPipe, PrintedLines, to_stderr
from rlhf.rewards.processes import count_below
from rlhf.rewards.protocol import Channel
from rlhf.rewards.sources import changed_sources

POLL_S = 0.02  # how often deadlines are checked while jobs run
MAX_FAILED_STARTS = 5  # in a row; after more, every further start would fail too
CLOSE_S = 5.0  # for the keeper to kill and reap every worker, before it is killed itself
START_S = 120.0  # for the processes to load, the modules of the user functions included
MAX_PROCESSES = 64  # that a user function may run at once
RELOAD_EVERY_S = 1.0  # workers are started again so long after one could not load the reward


class KeeperProcess:
    """A running keeper (`worker.py`); it ends with the thread that starts it.

    Args:
        hello: what its workers need to know.
        environment: its variables, which the workers inherit.
    """

    def __init__(self, hello: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlhf.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(json.dumps(hello).encode())
        self.pid, self.channel = self._process.pid, Channel(ours)
        self._pinged = time.monotonic()
        self.deadline = self._pinged + START_S  # of its next sign of life

    def send(self, command: Mapping[str, Any], *, fds: Sequence[int] = ()) -> None:
        """Send a command; that the keeper has ended is an event of its channel."""
        with contextlib.suppress(OSError):
            self.channel.send(command, fds=fds)

    def watch(self, *, ping_s: float) -> None:
        """Ping it every `ping_s`, and kill it when it has not answered in time."""
        now = time.monotonic()
        if now > self.deadline:
            self.deadline = now + START_S
            self._kill()
        elif now - self._pinged > ping_s:
            self._pinged = now
            self.send({"ping": True})

    def end(self) -> None:
        """Have it kill every worker, and wait until it has ended; after CLOSE_S it is killed."""
        self.channel.socket.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


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
        self._limits = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds}
        functions = [part.model_dump() for part in user_functions]
        (grants,) = {Grants.of(part) for part in user_functions} or {Grants()}
        self._environment = grants.environment()
        self._folder = tempfile.mkdtemp(prefix="rlhf-rewards-")
        self._hello = {**self._limits, "memory_mb": memory_mb, "grants": grants, "folder": self._folder}
        self._hello |= {"user_functions": functions, "path": sys.path}
        self.unconfined: tuple[str, ...] = ()
        self.sources: dict[str, dict[str, str]] = {}
        self._printed = PrintedLines([part.name for part in user_functions], say) if user_functions else None
        self._say = say
        self._cannot_load = ""  # why new workers cannot load the reward
        self._cannot_load_since = self._start_after = 0.0
        self._incoming: deque[Job] = deque()
        self._queue = Queue(workers, {part.name: part.concurrency for part in user_functions})
        self._workers: dict[int, Worker] = {}
        self._numbers = self._failed_starts = 0
        self._job_numbers = itertools.count()
        self._closing, self._broken = False, ""
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
        return self.submit_many([request])[0]

    def submit_many(self, requests: Sequence[dict[str, Any]]) -> list[Future[Grade]]:
        """Queue jobs; the futures raise RuntimeError if the pool is closed, or has broken, before they have a grade."""
        if self._closing:
            raise RuntimeError(f"the reward pool is closed{': ' if self._broken else ''}{self._broken}")
        jobs = [Job(next(self._job_numbers), request, Future()) for request in requests]
        self._incoming.extend(jobs)
        self._wake()
        return [job.future for job in jobs]

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
        return [
            worker.pid for worker in list(self._workers.values()) if worker.ready and worker.pid and not worker.doomed
        ]

    def wait_full(self, seconds: float) -> int:
        """Wait until every killed worker is replaced, or `seconds` have passed; returns how many are ready."""
        deadline = time.monotonic() + seconds
        while len(self.worker_pids()) < self.full_size and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return len(self.worker_pids())

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full: the loop is awake anyway
            self._wake_write.send(b"x")

    # --- the methods below run in the loop thread ---

    def _run(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        try:
            self._start_keeper()
            while not self._closing:
                self._start_workers()
                while self._incoming:
                    self._queue.add(self._incoming.popleft())
                self._dispatch()
                busy = any(worker.jobs for worker in self._workers.values())
                for key, _ in self._selector.select(POLL_S if busy else 1.0):
                    self._on_event(key.data)
                self._enforce_deadlines()  # after the replies have been read: this thread may have waited for a core
                self.keeper.watch(ping_s=self.ping_s)
        except BaseException as error:
            self._broken = str(error)
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._closing = True
            self._shut_down()

    def _start_keeper(self) -> None:
        self.keeper = KeeperProcess(self._hello, self._environment)
        self._selector.register(self.keeper.channel.socket, selectors.EVENT_READ, "control")

    def _start_workers(self) -> None:
        """Start a worker for each that is missing; later, and not for ever, while new ones cannot load the reward."""
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RuntimeError("the grading processes die while they start; their own messages are above")
        missing, now = self.full_size - sum(not worker.doomed for worker in self._workers.values()), time.monotonic()
        if missing and self._cannot_load:
            if now < self._start_after:
                return
            if now - self._cannot_load_since > self.reload_s:
                raise RuntimeError(
                    f"{self._cannot_load} New grading processes have tried for {self.reload_s:.0f} s. Put the code "
                    "back as it was and continue with --resume, or with other code and reward.accept_changed_code=true."
                )
        for _ in range(missing):
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
            self._wake_read.recv(65536)
        elif source == "control":
            messages, is_open = self.keeper.channel.receive()
            for message in messages:
                self.keeper.deadline = time.monotonic() + self.keeper_silent_s
                if worker := self._workers.get(message.get("forked")):
                    worker.pid = int(message["pid"])  # not from the worker, which others' code may have taken over
                elif worker := self._workers.get(message.get("gone")):
                    self._remove(worker)
            if not is_open:
                self._restart_keeper()
        elif isinstance(source, OutputPipe):
            if not source.ended and not source.read() and source.ended:
                self._selector.unregister(source)
        elif not source.doomed:
            messages, is_open = source.channel.receive()
            try:
                for message in messages:
                    self._on_worker(source, message)
            except Exception:  # not a message of our code: only this worker ends
                is_open = False
            if not is_open:
                self._kill(source, DIED)

    def _on_worker(self, worker: Worker, message: dict[str, Any]) -> None:
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
            if message["waits"] and not self._queue.waiting:
                self._queue.waiting = {name: deque() for name in message["waits"]}
                self.full_size += self.size  # calls that wait would keep the first workers from computing
            if not self._started.done() and sum(each.ready for each in self._workers.values()) >= self.size:
                self._started.set_result(None)
        elif "broken" in message:
            self._postpone(worker, str(message["broken"]))
        else:
            for reply in message["replies"]:
                grade = Grade.from_message(reply)
                worker.jobs.pop(reply["number"]).future.set_result(grade)
            worker.watch.cpu = float(message["cpu"])
            worker.watch.start()  # a message, even without replies, shows that no call blocks the others
            if message["last"]:  # the worker cannot take another job
                self._requeue(worker)
                self._kill(worker, DIED)

    def _postpone(self, worker: Worker, problem: str) -> None:
        """End a worker that cannot load the reward, to be replaced later; the start of the pool fails."""
        if not self._started.done():
            self._started.set_exception(ValueError(problem))
        if self._started.exception() is not None:
            return
        now = time.monotonic()
        if not self._cannot_load:
            self._cannot_load_since = now
            self._say(f"{problem} New grading processes try again for {self.reload_s:.0f} s.")
        self._cannot_load, self._start_after = problem, now + RELOAD_EVERY_S
        self._kill(worker, DIED)

    def _dispatch(self) -> None:
        for worker, jobs in self._queue.assign(self._workers.values()):
            if len(jobs) == len(worker.jobs):  # it had no job before
                worker.watch.start()
            try:
                worker.channel.send({"jobs": [{**job.request, "number": job.number} for job in jobs]})
            except OSError:
                self._kill(worker, DIED)

    def _enforce_deadlines(self) -> None:
        for worker in list(self._workers.values()):
            elapsed = worker.watch.elapsed()
            if not worker.ready and not worker.doomed and elapsed > START_S:
                self._kill(worker, DIED)
            if (
                not worker.jobs
                or worker.doomed
                or not worker.pid
                or elapsed < min(POLL_S, self._limits["wall_seconds"])
            ):
                continue
            if ":" in worker.first.request["name"] and count_below(worker.pid, MAX_PROCESSES) > MAX_PROCESSES:
                self._kill(worker, DIED, f"over {MAX_PROCESSES} processes")
            elif limit := worker.watch.exceeded(worker.pid, **self._limits):
                self._kill(worker, TIMEOUT, limit)

    def _kill(self, worker: Worker, why: str, detail: str = "the process died") -> None:
        """Have the keeper kill a worker. Its only job gets the status `why`; several are tried again one by one."""
        if worker.doomed:
            return
        worker.doomed = why
        self._selector.unregister(worker.channel.socket)
        if len(worker.jobs) == 1:
            _, job = worker.jobs.popitem()
            job.future.set_result(Grade(None, why, detail=detail))
        for job in worker.jobs.values():
            job.alone = True
        self._requeue(worker)
        self.keeper.send({"kill": worker.number})
        if worker.ready:
            self._failed_starts = 0
        elif not self._cannot_load:
            self._failed_starts += 1

    def _requeue(self, worker: Worker) -> None:
        """Put the unfinished jobs of a worker back to the front of the queue."""
        self._queue.put_back(worker.jobs.values())
        worker.jobs.clear()

    def _remove(self, worker: Worker) -> None:
        self._kill(worker, DIED)
        del self._workers[worker.number]
        self._close(worker)

    def _close(self, worker: Worker) -> None:
        worker.channel.socket.close()
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
            self._requeue(worker)
            self._remove(worker)
        self._failed_starts = 0
        self._start_keeper()

    def _shut_down(self) -> None:
        running = [job for worker in self._workers.values() for job in worker.jobs.values()]
        for job in [*self._incoming, *self._queue.all_jobs(), *running]:
            if job.begin():
                job.future.set_exception(RuntimeError(self._broken or "the reward pool was closed"))
        if hasattr(self, "keeper"):
            self.keeper.end()
        for worker in self._workers.values():
            self._close(worker)
        if self._printed is not None:
            self._printed.end_window()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
