"""The processes of the pool: the keeper, which forks, kills and reaps workers, and the loop of a worker.

Started as `python -m rlhf.rewards.worker FD`, where FD is the keeper's end of the control socket. The keeper has one
thread, so forking it is safe, and never reads a response, so no response can take it over.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, NoReturn

from rlhf.rewards.confinement import Grants
from rlhf.rewards.grade import DIED, Grade
from rlhf.rewards.output import WorkerStdout, redirect_output, running
from rlhf.rewards.processes import adopt_orphans, children_of, die_with_parent, kill_children
from rlhf.rewards.protocol import Channel, encoded
from rlhf.rewards.sources import loaded_sources

BEAT_S = 0.2  # how often a worker tells the driver that no call blocks the others
RETRY_S = 0.1  # between attempts to kill processes that do not die at once
RECURSION_LIMIT = 3000  # enough for every answer within the limits of the parser; that many C frames fit the stack


def main() -> None:
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    sys.setrecursionlimit(RECURSION_LIMIT)
    hello = json.load(sys.stdin)
    sys.path[:] = hello["path"]
    import rlhf.rewards.registry  # noqa: F401  # loaded once, before workers are forked

    gc.collect()
    gc.freeze()  # the memory stays shared with the workers: the garbage collector does not write to it
    Keeper(control, hello).run()


class Keeper:
    """Forks, kills and reaps workers; processes that a worker leaves behind become children of the keeper."""

    def __init__(self, control: Channel, hello: dict[str, Any]) -> None:
        self._control, self._hello = control, hello
        self._fds: list[int] = []  # of the fork commands, in the order of the commands
        self._numbers: dict[int, int] = {}  # process -> number of the worker
        self._orphans = False  # some processes that a worker left behind are not dead yet
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        try:
            while True:
                waits_for: list[Any] = [self._control.socket, self._wake_read]
                select.select(waits_for, [], [], RETRY_S if self._orphans else None)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                commands, is_open = self._control.receive(fds=self._fds)
                for command in commands:
                    self._execute(command)
                if not is_open:
                    self._end()
                self._reap_workers()
        except OSError:
            self._end()

    def _execute(self, command: dict[str, Any]) -> None:
        if "fork" in command:
            count = command["fds"]
            fds, self._fds = self._fds[:count], self._fds[count:]
            self._fork(command["fork"], fds)
        elif "ping" in command:
            self._control.send({"pong": True})
        else:
            for pid in [pid for pid, number in self._numbers.items() if number == command["kill"]]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _fork(self, number: int, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.socket.close()
            for other in (self._wake_read, self._wake_write, *self._fds):
                os.close(other)
            _serve(number, Channel(socket.socket(fileno=fds[0])), self._hello, fds[1:])
        for fd in fds:
            os.close(fd)
        self._numbers[pid] = number
        self._control.send({"forked": number, "pid": pid})

    def _reap_workers(self) -> None:
        ended = [pid for pid in _reap() if pid in self._numbers]
        gone = [self._numbers.pop(pid) for pid in ended]
        if gone or self._orphans:
            self._orphans = not kill_children(spared=self._numbers)
        for pid, number in zip(ended, gone, strict=True):
            shutil.rmtree(Path(self._hello["folder"], str(pid)), ignore_errors=True)
            self._control.send({"gone": number})

    def _end(self) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_children(spared=())
        shutil.rmtree(self._hello["folder"], ignore_errors=True)
        os._exit(0)


def _reap() -> list[int]:
    pids = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            pids.append(pid)
    return pids


# --- the worker ---


def _serve(number: int, channel: Channel, hello: dict[str, Any], pipes: list[int]) -> NoReturn:
    """Answer jobs until the driver hangs up; `os._exit` because a fork must not run the keeper's exit handlers.

    Args:
        pipes: for what is printed; none if there are no user functions.
    """
    lines = None
    try:
        lines = redirect_output(pipes[0], muted=number > 1) if pipes else None
        die_with_parent(signal.SIGKILL)
        adopt_orphans()
        names = [part["name"] for part in hello["user_functions"]]
        unconfined = Grants(*hello["grants"]).confine(names, Path(hello["folder"], str(os.getpid())))
        try:
            functions, sources = _load(hello["user_functions"], lines)
        except ValueError as error:
            channel.send({"broken": str(error)})
        else:
            about = {"unconfined": unconfined, "sources": sources}
            with contextlib.suppress(OSError):  # the driver is gone
                _answer_jobs(channel, hello, functions, about, lines)
    except Exception:
        if lines is not None:
            lines.muted = False
        traceback.print_exc()  # the keeper reports only that the worker ended
    finally:
        os._exit(0)


def _load(
    functions: list[dict[str, Any]], lines: WorkerStdout | None
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """Import the user functions; returns them by name, and the fingerprints of their code. Raises ValueError."""
    from rlhf.rewards import registry

    before, loaded = set(sys.modules), {}
    for part in functions:
        running.set(part["name"])
        loaded[part["name"]] = registry.load_user_function(part)
        if lines is not None:
            lines.end_line()
    running.set("")
    if lines is None:  # parsers print messages about their input, which must not reach the trainer's terminal
        redirect_output(os.open(os.devnull, os.O_RDWR), muted=True)
    else:
        lines.muted = False
    return loaded, loaded_sources(loaded, before=before)


def _answer_jobs(
    channel: Channel,
    hello: dict[str, Any],
    functions: dict[str, Any],
    about: dict[str, Any],
    lines: WorkerStdout | None,
) -> None:
    """Answer jobs until the driver hangs up, after a first message with what is known `about` this worker."""
    from rlhf.rewards import registry

    _limit_memory(hello["memory_mb"])
    own = children_of(os.getpid())  # started by the modules of the functions; they last as long as the worker
    waiting = [name for name, function in functions.items() if registry.waits(function)]
    channel.send({"ready": True, "cpu": time.process_time(), "waits": waiting, **about})

    async def call(job: dict[str, Any]) -> Grade:
        running.set(job["name"])
        grade = await registry.call_waiting_function(functions[job["name"]], job, hello["wall_seconds"])
        assert lines is not None
        lines.end_line()
        return grade

    calls = WaitingCalls(channel, call, waiting)
    is_open = True
    jobs: list[dict[str, Any]] = []
    while is_open:
        if not jobs:
            messages, is_open = channel.receive(wait=True)
            jobs = [job for message in messages for job in message["jobs"]]
        if jobs and jobs[0]["name"] in waiting:
            jobs = calls.run(jobs)
            kill_children(spared=own)
            continue
        replies: list[dict[str, Any]] = []
        last = False
        while jobs and not last:
            job = jobs.pop(0)
            running.set(job["name"])
            try:
                grade = registry.run(job, functions)
            except MemoryError:  # some of the memory may be lost for good, so another worker takes over
                grade, last = Grade(None, DIED, detail="out of memory"), True
            replies.append({**grade.as_message(), "number": job["number"]})
            if lines is not None and job["name"] in functions:
                lines.end_line()
                kill_children(spared=own)
        if replies:
            channel.send({"replies": replies, "cpu": time.process_time(), "last": last})
        is_open = is_open and not last


class WaitingCalls:
    """Calls of functions that wait (`async def`), all at once, each with a deadline from its own start.

    They run in one event loop, so that a client in the user's module can be used by several calls.

    Args:
        call: job -> its grade; raises nothing but MemoryError.
        names: the functions that wait; a job of any other ends the loop and is left to the caller.
    """

    def __init__(
        self, channel: Channel, call: Callable[[dict[str, Any]], Awaitable[Grade]], names: Collection[str]
    ) -> None:
        self._channel, self._call, self._names = channel, call, names
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._tasks: set[asyncio.Task[None]] = set()
        self._replies: list[dict[str, Any]] = []
        self._left: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    def run(self, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run these calls and those that arrive meanwhile until none is left; returns jobs that do not wait."""
        self._left = []
        self._loop.run_until_complete(self._run(jobs))
        return self._left

    async def _run(self, jobs: list[dict[str, Any]]) -> None:
        self._channel.socket.setblocking(False)
        self._start(jobs)
        self._loop.add_reader(self._channel.socket, self._read)
        try:
            while self._tasks or self._replies:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), BEAT_S)
                self._news.clear()
                replies, self._replies = self._replies, []
                message = {"replies": replies, "cpu": time.process_time(), "last": False}
                await self._loop.sock_sendall(self._channel.socket, encoded(message))
        finally:
            self._loop.remove_reader(self._channel.socket)

    def _read(self) -> None:
        messages, is_open = self._channel.receive()
        for message in messages:
            self._start(message["jobs"])
        if not is_open:
            os._exit(0)

    def _start(self, jobs: list[dict[str, Any]]) -> None:
        for job in jobs:
            if job["name"] not in self._names:
                self._left.append(job)
                continue
            task = self._loop.create_task(self._answer(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, job: dict[str, Any]) -> None:
        try:
            grade = await self._call(job)
        except MemoryError:
            os._exit(1)  # the driver runs every call again by itself, and finds the one that takes all memory
        self._replies.append({**grade.as_message(), "number": job["number"]})
        self._news.set()


def _limit_memory(memory_mb: int) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
