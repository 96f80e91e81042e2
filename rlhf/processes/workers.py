"""The driver's half: starts a keeper, forks workers, receives their messages, and kills workers over a limit.

To use it, subclass `Workers` as `rlhf.processes` describes. All of it runs in one thread.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from rlhf.processes import objects
from rlhf.processes.channel import Channel
from rlhf.processes.code import changed_sources
from rlhf.processes.confinement import Grants, system_files
from rlhf.processes.forkers import START_S, Forker, KeeperProcess
from rlhf.processes.output import OutputPipe, PrintedLines
from rlhf.processes.outside import Stopwatch, count_below, may_signal, parent_of, remove

TIMEOUT = "timeout"  # the worker exceeded a limit of time
DIED = "died"  # it ended, or exceeded another limit
LOST = "lost"  # the process that forked it has ended, so its work is not to blame

POLL_S = 0.02  # how often limits are checked while work is done
MAX_FAILED_STARTS = 5  # of workers or keepers, in a row; after more, further starts would fail too
MAX_STARTING = 32  # fork commands at a time, so that sending never blocks
RETRY_S = 1.0  # pause before workers are started again after one could not load the code, or not be forked


@dataclass(eq=False)
class Worker:
    """A worker as the driver sees it.

    Attributes:
        forker: the process that forked it.
        below: only of a template: the forker of the workers below it.
        about: the result of `load`.
        doomed: the reason why it is being killed; empty if it is not.
        kind, work: for the subclass: the use of the worker, and its unanswered work.
        watch: running while the limits of time and processes apply.
    """

    number: int
    channel: Channel
    output: OutputPipe
    forker: Forker
    watch: Stopwatch
    is_template: bool = False
    below: Forker | None = None
    pid: int = 0
    ready: bool = False
    about: Any = None
    doomed: str = ""
    kind: Any = None
    work: dict[Any, Any] = field(default_factory=dict)
    born: float = field(default_factory=time.monotonic)


class Workers:
    """Processes that run other people's code; one that exceeds a limit is killed and replaced.

    Args:
        noun: section of the config that names the code, for messages: `reward`.
        work: module with `load` and `serve`.
        hello: argument of `load`, as JSON.
        code: names of the code to load, `module:attribute` or `file.py:attribute`. Its files are readable and
            fingerprinted.
        size: number of workers. The start waits for them, or for the template.
        cpu_seconds, wall_seconds: limits of one piece of work.
        memory_mb: MiB that a worker may allocate after the code is loaded.
        processes: largest number of processes below a worker with other people's code.
        template: fork workers from one process that has loaded the code.
        python, path: another interpreter, and entries for the front of its `sys.path`.
        say: called with each line that the code prints, in the thread of the workers.

    Attributes:
        unconfined: those of `files` and `network` that this kernel cannot forbid the workers.
        keeper: the process that forks the workers; a new one if it was lost.
        sources: fingerprints of the code. A worker that loads other code is ended.

    Raises:
        ValueError: the code cannot be loaded; a granted file or variable is missing.
        RuntimeError: the processes did not start within START_S.
    """

    keeper_silent_s, ping_s = 20.0, 1.0  # seconds without an answer until the keeper is replaced; pause between pings
    reload_s = 30.0  # how long new workers try to start, with the code as it was, before everything is given up
    end_s = 0.0  # time for idle workers to end by themselves when all is closed, before they are killed

    def __init__(
        self,
        noun: str,
        work: str,
        hello: Mapping[str, Any],
        *,
        code: Sequence[str] = (),
        size: int,
        cpu_seconds: float = 2.0,
        wall_seconds: float = 10.0,
        memory_mb: int = 1024,
        processes: int = 64,
        grants: Grants = Grants(),  # noqa: B008 - a constant
        template: bool = False,
        python: str = sys.executable,
        path: Sequence[str] | None = None,
        say: Callable[[str], None],
    ) -> None:
        self.size = self._size_at_start = size
        self._noun, self._code, self._say = noun, code, say
        self._limits, self._processes = {"cpu_seconds": cpu_seconds, "wall_seconds": wall_seconds}, processes
        self._python, self._environment = python, grants.environment(noun)
        for name in ("PYTHONPATH", "PYTHONHOME") if python != sys.executable else ():
            self._environment.pop(name, None)  # they are about this interpreter
        self._folder = tempfile.mkdtemp(prefix=f"rlhf-{noun}s-")
        self._plan: dict[str, Any] = {"work": work, "hello": hello, "code": code, "grants": grants}
        self._plan["objects"] = objects.sent(code)
        self._plan |= {"folder": self._folder, "memory_mb": memory_mb, "template": template}
        self._plan |= {"path": sys.path if path is None else path, "system": system_files()}
        self.unconfined: tuple[str, ...] = ()
        self.sources: dict[str, dict[str, str]] = {}
        self._printed = PrintedLines(noun, code, say)
        self._cannot_start = ""  # why new workers cannot load the code, or not be forked
        self._cannot_start_since = self._fork_after = 0.0
        self._calls: deque[Callable[[], None]] = deque()
        self._adding = threading.Lock()  # a call is added before the last ones are made, or refused
        self._workers: dict[int, Worker] = {}
        self._numbers = self._failed_starts = self._lost_keepers = 0
        self._closing, self._broken = False, ""
        self._started: Future[None] = Future()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"{noun}-workers", daemon=True)
        self._thread.start()
        try:
            self._started.result(timeout=START_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise RuntimeError(
                    f"{noun}: the processes did not load within {START_S:.0f} s. Look at what your modules import."
                ) from None
            raise

    def on_ready(self, worker: Worker, about: Any) -> None:
        """A worker can be given work; `about` is the result of `load`."""

    def on_message(self, worker: Worker, message: Any) -> None:
        """A message of a ready worker. Any exception ends this worker alone."""

    def on_gone(self, worker: Worker, why: str, detail: str) -> None:
        """A worker is being killed or has ended; `why` is TIMEOUT, DIED or LOST. `worker.work` is unanswered."""

    def on_turn(self) -> None:
        """All messages have been read: hand out work."""

    def on_end(self, reason: str) -> None:
        """The workers were closed (empty reason), or cannot go on: fail the work that waits."""

    def max_processes(self, worker: Worker) -> int | None:
        """The largest number of processes below a worker; None without other people's code, which could start some."""
        return self._processes if self._code else None

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the thread of the workers. RuntimeError if they are closed or broken."""
        with self._adding:
            if self._closing:
                raise RuntimeError(f"the {self._noun} processes are closed{': ' if self._broken else ''}{self._broken}")
            first = not self._calls  # else the thread has been woken, and has yet to make the earlier calls
            self._calls.append(partial(function, *arguments))
        if first:
            self._wake()

    def close(self) -> None:
        """Kill every process."""
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def warnings(self) -> list[str]:
        """A message for each access that this kernel cannot forbid the workers."""
        of_workers = f"{self._noun}: this kernel cannot keep {self._noun}s"
        return [f"{of_workers} from your {name} (docs/security.md)." for name in self.unconfined]

    def free(self) -> list[Worker]:
        """Workers that can do work."""
        every = list(self._workers.values())
        return [worker for worker in every if worker.ready and worker.pid and not (worker.doomed or worker.is_template)]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full: the loop is awake anyway
            self._wake_write.send(b"x")

    # --- the methods below run in the thread of the workers ---

    def send(self, worker: Worker, message: Mapping[str, Any]) -> None:
        """Send a message as fast as the worker reads it. The worker may first send replies, which are read here.

        If the worker is gone, its channel reports it.
        """
        worker.channel.queue(message)
        if not worker.doomed:
            self._flush(worker)

    def _flush(self, worker: Worker) -> None:
        events = selectors.EVENT_READ | (0 if worker.channel.flush() else selectors.EVENT_WRITE)
        self._selector.modify(worker.channel.socket, events, partial(self._on_worker, worker))

    def kill(self, worker: Worker, why: str, detail: str = "the process died") -> None:
        """Have a worker killed by the process that forked it; calls `on_gone` at once."""
        if worker.doomed:
            return
        worker.doomed = why
        worker.watch.stop()
        self._selector.unregister(worker.channel.socket)
        worker.forker.send({"kill": worker.number})
        if not worker.ready and why != LOST and detail != self._cannot_start:
            self._failed_starts += 1
        if worker.is_template:
            for other in self._below(worker):  # before the end of each is seen, and taken for its own
                self.kill(other, LOST)
        else:
            self.on_gone(worker, why, detail)

    def _below(self, template: Worker) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.forker is template.below]

    def _run(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: self._wake_read.recv(65536))
        try:
            self._start_keeper()
            while not self._closing:
                self._fork_missing()
                while self._calls:
                    self._calls.popleft()()
                self.on_turn()
                busy = any(worker.watch.running for worker in self._workers.values())
                for key, _ in self._selector.select(POLL_S if busy else 1.0):
                    key.data()
                self._enforce_limits()  # after the replies have been read: this thread may have waited for a core
        except BaseException as error:
            self._broken = str(error)
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            with self._adding:
                self._closing = True
            self._shut_down()

    def _start_keeper(self) -> None:
        self.keeper = KeeperProcess(self._python, self._plan, self._environment)
        on_readable = partial(self._on_forker, self.keeper, None)
        self._selector.register(self.keeper.channel.socket, selectors.EVENT_READ, on_readable)

    def _fork_missing(self) -> None:
        """Fork a worker for each that is missing; later, and not for ever, while new ones cannot load the code."""
        if self._failed_starts > MAX_FAILED_STARTS:
            raise RuntimeError(f"the {self._noun} processes die while they start; their own messages are above")
        live = [worker for worker in self._workers.values() if not worker.doomed]
        forker: Forker | None = self.keeper
        missing = self.size - sum(not worker.is_template for worker in live)
        if self._plan["template"]:
            template = next((worker for worker in live if worker.is_template), None)
            forker = template.below if template else self.keeper
            missing = missing if template else 1
        missing = min(missing, MAX_STARTING - sum(not worker.pid for worker in live))
        if missing <= 0 or forker is None or (self._cannot_start and time.monotonic() < self._fork_after):
            return
        if self._cannot_start and time.monotonic() - self._cannot_start_since > self.reload_s:
            remedy = " Continue with --resume." if self._started.done() else ""
            raise RuntimeError(f"{self._cannot_start} New processes have tried for {self.reload_s:.0f} s.{remedy}")
        for _ in range(missing):
            self._fork(forker, is_template=self._plan["template"] and forker is self.keeper)

    def _fork(self, forker: Forker, *, is_template: bool) -> None:
        self._numbers += 1
        ours, theirs = socket.socketpair()
        output = OutputPipe(self._printed)
        worker = Worker(self._numbers, Channel(ours), output, forker, Stopwatch(**self._limits), is_template)
        self._workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, partial(self._on_worker, worker))
        self._selector.register(output, selectors.EVENT_READ, partial(self._on_output, output))
        forker.send({"fork": worker.number}, fds=[theirs.fileno(), output.pipe])
        theirs.close()
        os.close(output.pipe)

    def _on_forker(self, forker: Forker, template: Worker | None) -> None:
        """Read messages of a keeper or template. A hostile template can only lie about its own workers."""
        if template is not None and template.doomed:
            return
        if not self._handle_messages(forker.channel, partial(self._on_forker_message, forker)):
            if template is None:
                self._replace_keeper()
            else:
                self.kill(template, DIED)

    def _on_forker_message(self, forker: Forker, message: Any) -> None:
        forker.deadline = time.monotonic() + self.keeper_silent_s
        worker = self._workers.get(message.get("forked", message.get("gone")))
        if worker is None or worker.forker is not forker:
            return
        if "gone" in message:
            if error := message.get("cannot_fork"):
                remedy = "Look at the limits of processes (`ulimit -u`, pids.max of the container) and at free memory."
                self._postpone(worker, f"{self._noun}: no process can be forked: {error}. {remedy}")
            elif worker.below is None:
                self._on_worker(worker)  # its last messages
            self._remove(worker, DIED)
        else:
            worker.pid = int(message["pid"])
            self._tell_ready(worker)

    def _on_worker(self, worker: Worker) -> None:
        if worker.doomed:
            return

        def handle(message: Any) -> None:
            if not worker.doomed:
                (self.on_message if worker.ready else self._on_first_message)(worker, message)

        self._flush(worker)
        if not self._handle_messages(worker.channel, handle):
            self.kill(worker, DIED)

    @staticmethod
    def _handle_messages(channel: Channel, handle: Callable[[Any], None]) -> bool:
        """Handle the messages that have arrived. False if the process died, or sent what our code does not send."""
        messages, is_open = channel.receive()
        try:
            for message in messages:
                handle(message)
        except Exception as error:
            channel.problem = f"a message of it raised {type(error).__name__}: {error}"
            return False
        return is_open

    def _on_first_message(self, worker: Worker, message: dict[str, Any]) -> None:
        if "broken" in message:
            self._refuse(worker, str(message["broken"]))
            return
        self.sources = self.sources or message["sources"]
        if changed := "; ".join(changed_sources(self.sources, message["sources"], noun=self._noun)):
            self._refuse(worker, f"{changed} has changed since the run began. Put it back as it was.")
            return
        self._cannot_start, self._failed_starts, self._lost_keepers = "", 0, 0
        self.unconfined = tuple(map(str, message["unconfined"]))
        worker.ready, worker.about = True, message["ready"]
        if worker.is_template:
            worker.below = Forker(worker.channel)
            on_readable = partial(self._on_forker, worker.below, worker)
            self._selector.modify(worker.channel.socket, selectors.EVENT_READ, on_readable)
        self._tell_ready(worker)

    def _tell_ready(self, worker: Worker) -> None:
        """Call `on_ready` once both messages have come, the forker's with the process id and the worker's own."""
        if not (worker.ready and worker.pid):
            return
        if not worker.is_template:
            self.on_ready(worker, worker.about)
        if not self._started.done() and (worker.is_template or len(self.free()) >= self._size_at_start):
            self._started.set_result(None)

    def _on_output(self, output: OutputPipe) -> None:
        if not output.ended and not output.read() and output.ended:
            self._selector.unregister(output)

    def _refuse(self, worker: Worker, problem: str) -> None:
        """End a worker that cannot load the code: the start fails, or later other workers try for `reload_s`."""
        if not self._started.done():
            self._started.set_exception(ValueError(problem))
        if self._started.exception() is None:
            self._postpone(worker, problem)

    def _postpone(self, worker: Worker, problem: str) -> None:
        """End a worker that cannot start; for `reload_s` other workers try."""
        now = time.monotonic()
        if not self._cannot_start:
            self._cannot_start_since = now
            self._say(f"{problem} New processes try again for {self.reload_s:.0f} s.")
        self._cannot_start, self._fork_after = problem, now + RETRY_S
        self.kill(worker, DIED, problem)

    def _enforce_limits(self) -> None:
        if self.keeper.is_silent(ping_s=self.ping_s):
            self.keeper.kill()
            self._replace_keeper("it did not answer")
        for worker in list(self._workers.values()):
            if worker.doomed:
                continue
            if (not worker.ready and time.monotonic() - worker.born > START_S) or (
                worker.below is not None and worker.below.is_silent(ping_s=self.ping_s)
            ):
                self.kill(worker, DIED)
            elif worker.watch.running and worker.watch.elapsed() > min(POLL_S, worker.watch.wall_seconds):
                most = self.max_processes(worker)
                warden = parent_of(worker.pid)  # what the worker has left behind is below it, and reaped when it ends
                if most is not None and warden and count_below(warden, most + 1) > most + 1:
                    self.kill(worker, DIED, f"over {most} processes")
                elif limit := worker.watch.exceeded():
                    self.kill(worker, TIMEOUT, limit)

    def _remove(self, worker: Worker, why: str) -> None:
        """Forget a worker that has ended, and those that were forked from it."""
        self.kill(worker, why)
        del self._workers[worker.number]
        for other in self._below(worker):
            self._remove(other, LOST)
        self._close(worker)

    def _close(self, worker: Worker) -> None:
        worker.channel.socket.close()
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.output)
        worker.output.close()

    def _replace_keeper(self, why: str = "") -> None:
        """Start again after the keeper was lost, and with it every worker; `why` is for messages.

        Raises RuntimeError if it ended by itself while the processes load, or several were lost in a row.
        """
        self._selector.unregister(self.keeper.channel.socket)
        status = self.keeper.end()
        for worker in list(self._workers.values()):
            if worker.number in self._workers:
                self._remove(worker, LOST)
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        why = "; ".join(filter(None, (how, why or self.keeper.channel.problem)))
        lost = f"{self._noun}: the keeper of the processes, process {self.keeper.pid}, {why}."
        self._lost_keepers += 1
        if self._lost_keepers > MAX_FAILED_STARTS or (status >= 0 and not self._started.done()):
            raise RuntimeError(f"{lost} Its own messages, if it had any, are above.")
        self._say(f"warning: {lost} Another one starts, and the processes with it.")
        self._failed_starts = 0
        self._start_keeper()

    def _hang_up(self) -> None:
        """Let idle workers end by themselves, if `end_s` gives them time."""
        idle = [worker for worker in self.free() if not worker.work] if self.end_s else []
        for worker in idle:
            with contextlib.suppress(OSError):
                worker.channel.socket.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + self.end_s
        while time.monotonic() < deadline and any(may_signal(worker.pid) for worker in idle):
            time.sleep(POLL_S)

    def _shut_down(self) -> None:
        while self._calls:
            self._calls.popleft()()
        self.on_end(self._broken)
        if hasattr(self, "keeper"):
            self._hang_up()
            self.keeper.end()
        for worker in self._workers.values():
            self._close(worker)
        self._printed.end_window()
        remove(self._folder)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()
