"""The processes of the pool: the keeper, which forks, kills and reaps workers, and the loop of a worker.

Started as `python -m rlhf.rewards.worker FD`, where FD is the keeper's end of the control socket. The keeper has one
thread, so forking it is safe, and never reads a response, so no response can take it over.
"""

from __future__ import annotations

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
from collections import deque
from pathlib import Path
from typing import Any, NoReturn

from rlhf.rewards.confinement import Grants
from rlhf.rewards.grade import DIED, Grade
from rlhf.rewards.output import WorkerStdout, redirect_output, running
from rlhf.rewards.processes import adopt_orphans, children_of, die_with_parent, kill_children
from rlhf.rewards.protocol import QUICK_REWARDS, Channel
from rlhf.rewards.sources import loaded_sources
from rlhf.rewards.waiting import WaitingCalls

MAX_REPLY_DELAY_S = 0.01  # replies wait for others at most this long, to save system calls
RETRY_S = 0.1  # between attempts to kill processes that do not die at once
RECURSION_LIMIT = 3000  # enough for every answer within the limits of the parser; that many C frames fit the stack
MAX_TEXT_SHOWN = 2000  # characters of an extracted answer or a message that are sent to the driver


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
        self._fds: deque[int] = deque()  # of the fork commands, in the order of the commands
        self._pids: dict[int, int] = {}  # number of the worker -> process
        self._orphans = False  # some processes that a worker left behind are not dead yet
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        sources: list[Any] = [self._control.socket, self._wake_read]
        try:
            while True:
                readable = select.select(sources, [], [], RETRY_S if self._orphans else None)[0]
                if self._wake_read in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                if self._control.socket in readable and not self._execute_commands():
                    self._end()
                self._reap_workers()
        except OSError:
            self._end()

    def _execute_commands(self) -> bool:
        """Execute the commands that have arrived; False when the driver is gone."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control.socket, 1 << 18, 64)
        except OSError:
            return False
        self._fds.extend(fds)
        for command in self._control.feed(data):
            if "fork" in command:
                self._fork(command["fork"], [self._fds.popleft() for _ in range(command["fds"])])
            elif "ping" in command:
                self._control.send({"pong": True})
            elif command["kill"] in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[command["kill"]], signal.SIGKILL)
        return bool(data)

    def _fork(self, number: int, fds: list[int]) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            for other in self._fds:
                os.close(other)
            _serve(number, Channel(socket.socket(fileno=fds[0])), self._hello, fds[1:])
        for fd in fds:
            os.close(fd)
        self._pids[number] = pid
        self._control.send({"forked": number, "pid": pid})

    def _reap_workers(self) -> None:
        numbers = {pid: number for number, pid in self._pids.items()}
        ended = [pid for pid in _reap() if pid in numbers]
        gone = [numbers[pid] for pid in ended]
        for number in gone:
            del self._pids[number]
        if gone or self._orphans:
            self._orphans = not kill_children(spared=self._pids.values())
        for pid in ended:
            shutil.rmtree(_own_folder(self._hello, pid), ignore_errors=True)
        for number in gone:
            self._control.send({"gone": number})

    def _end(self) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        kill_children(spared=())
        shutil.rmtree(self._hello["folder"], ignore_errors=True)
        os._exit(0)


def _own_folder(hello: dict[str, Any], pid: int) -> Path:
    """The folder that a worker may write to."""
    return Path(hello["folder"], str(pid))


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
        unconfined = Grants(*hello["grants"]).confine(names, _own_folder(hello, os.getpid()))
        try:
            functions, sources = _load(hello["user_functions"], lines)
        except ValueError as error:
            channel.send({"broken": str(error)})
        else:
            about = {"unconfined": unconfined, "sources": sources}
            with contextlib.suppress(EOFError, OSError):  # the driver is gone
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
    if lines is None:
        _close_output()
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
    replies = Replies(channel)

    async def call(job: dict[str, Any]) -> dict[str, Any]:
        running.set(job["name"])
        grade = await registry.call_waiting_function(functions[job["name"]], job, hello["wall_seconds"])
        assert lines is not None
        lines.end_line()
        return grade.as_message(MAX_TEXT_SHOWN)

    calls = WaitingCalls(channel, call, lambda job: job["name"] in waiting)
    jobs: list[dict[str, Any]] = []
    while True:
        jobs = jobs or channel.receive_one()["jobs"]
        if jobs[0]["name"] in waiting:
            jobs = calls.run(jobs)
            kill_children(spared=own)
            continue
        for job in jobs:
            if job["name"] not in QUICK_REWARDS:
                replies.flush()
            running.set(job["name"])
            reply = _answer(job, functions)
            if lines is not None and job["name"] in functions:
                lines.end_line()
                kill_children(spared=own)
            replies.add(reply)
            if reply.get("last"):
                replies.flush()
                return
        replies.flush()
        jobs = []


class Replies:
    """Sends replies together, but all of them before a job that may take long: the driver then knows which job runs."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: list[dict[str, Any]] = []
        self._flushed = time.monotonic()

    def add(self, reply: dict[str, Any]) -> None:
        self._waiting.append(reply)
        if time.monotonic() - self._flushed > MAX_REPLY_DELAY_S:
            self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._channel.send({"replies": self._waiting, "cpu": time.process_time()})
            self._waiting = []
        self._flushed = time.monotonic()


def _answer(job: dict[str, Any], functions: dict[str, Any]) -> dict[str, Any]:
    from rlhf.rewards import registry

    try:
        return registry.run(job, functions).as_message(MAX_TEXT_SHOWN)
    except MemoryError:
        return {**Grade(None, DIED, detail="out of memory").as_message(MAX_TEXT_SHOWN), "last": True}


def _close_output() -> None:
    """Discard the output: parsers print messages about their input, which must not reach the trainer's terminal."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)


def _limit_memory(memory_mb: int) -> None:
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
