"""The keeper and its workers: `Workers` starts it with any Python >= 3.10, so it imports the standard library alone.

It has one thread, so forking it is safe, and never reads what a model wrote, so no model can take it over.

    keeper ── fork ──> warden ── fork ──> worker, which may start others

The warden waits for the worker's end, the keeper's order or the keeper's end, and kills all that is below it, however
detached, at once: signals of its own reach nothing else (Linux 6.12), and nothing below it can signal it. On older
kernels it adopts and kills one generation after the other. The keeper does that where a warden was killed itself.
A template (`rlhf.processes`) is a confined worker that runs the same loop for the workers that are forked from it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from rlhf.processes import objects
from rlhf.processes.channel import Channel
from rlhf.processes.code import loaded_sources
from rlhf.processes.confinement import Grants, close_descriptors
from rlhf.processes.domains import become_warden, kill_below
from rlhf.processes.output import WorkerStdout, redirect_output
from rlhf.processes.outside import adopt_orphans, children_of, die_with_parent, kill_children, remove

RETRY_S = 0.1  # between attempts to kill processes that do not die at once
ENDS = (signal.SIGCHLD, signal.SIGTERM)  # a warden waits for them


def main(fd: str) -> None:
    """Keep workers as the socket `fd` commands; the description of `Workers` comes by standard input."""
    die_with_parent(signal.SIGTERM)
    plan = json.load(sys.stdin)
    sys.path[:] = [*plan["path"], *(entry for entry in sys.path if entry not in ("", *plan["path"]))]
    importlib.import_module(plan["work"])  # once, before workers are forked
    control = Channel(socket.socket(fileno=int(fd)))
    Keeper(control, Path(plan["folder"]), lambda number, channel: _work(plan, number, channel)).run()


class Keeper:
    """Forks, kills and reaps workers on command.

    Args:
        folder: workers have their own folders in it; it is removed at the end.
        begin: called in a forked process with its number and channel; the process ends when it returns.
    """

    def __init__(self, control: Channel, folder: Path, begin: Callable[[int, Channel], None]) -> None:
        self._control, self._folder, self._begin = control, folder, begin
        self._fds: list[int] = []  # descriptors that came with fork commands, in their order
        self._numbers: dict[int, int] = {}  # warden -> number of its worker
        self._orphans = False  # True while processes that a worker left behind are not dead yet
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> NoReturn:
        adopt_orphans()
        self._own = children_of(os.getpid())  # of a template: the loaded code has started them
        gc.collect()
        gc.freeze()  # the memory stays shared with the workers: the garbage collector does not write to it
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda number, _: self._end(-number))
        status, is_open = 0, True
        try:
            while is_open:
                waits_for: list[Any] = [self._control.socket, self._wake_read]
                select.select(waits_for, [], [], RETRY_S if self._orphans else None)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                commands, is_open = self._control.receive(fds=self._fds)
                for command in commands:
                    self._execute(command)
                self._reap_workers()
            if self._control.problem:
                raise RuntimeError(self._control.problem)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the driver has left
        except Exception:
            traceback.print_exc()
            status = 1
        self._end(status)

    def _execute(self, command: dict[str, Any]) -> None:
        if "fork" in command:
            self._fork(command["fork"])
        elif "ping" in command:
            self._control.send({"pong": True})
        else:
            self._stop([warden for warden, number in self._numbers.items() if number == command["kill"]])

    def _fork(self, number: int) -> None:
        """Fork a warden, which forks a worker and reports it; channel and output pipe came with the command."""
        (channel, pipe), self._fds = self._fds[:2], self._fds[2:]
        keeper = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        warden = self._try_fork(number)
        if warden == 0:
            try:
                die_with_parent(signal.SIGTERM)
                if os.getppid() == keeper:  # else it has ended before that
                    self._guard(number, channel, pipe, mask)
            except Exception:
                traceback.print_exc()  # the keeper reports only that the worker ended
            finally:
                os._exit(0)  # a fork must not run the exit handlers of the keeper
        if warden is not None:
            self._numbers[warden] = number
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(channel)
        os.close(pipe)

    def _try_fork(self, number: int) -> int | None:
        try:
            return os.fork()
        except OSError as error:  # too many processes, or too little memory
            self._control.send({"gone": number, "cannot_fork": str(error)})
            return None

    def _guard(self, number: int, channel: int, pipe: int, mask: Iterable[int]) -> None:
        """Be the warden of a worker: fork it, wait for its end or SIGTERM, and kill all that it has started."""
        redirect_output(pipe)
        is_scoped = become_warden()
        for other in (self._wake_read, self._wake_write, *self._fds):
            os.close(other)
        worker = self._try_fork(number)
        if worker == 0:
            self._control.socket.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent(signal.SIGKILL)
            self._begin(number, Channel(socket.socket(fileno=channel)))
        if not worker:
            return
        with contextlib.suppress(OSError):  # the driver has left
            self._control.send({"forked": number, "pid": worker})
        close_descriptors(())
        while signal.sigwait(ENDS) == signal.SIGCHLD and worker not in _reaped():
            pass
        kill_below(is_scoped)

    def _stop(self, wardens: Iterable[int]) -> None:
        for warden in wardens:
            with contextlib.suppress(ProcessLookupError):  # code of the user has reaped it
                os.kill(warden, signal.SIGTERM)
                os.kill(warden, signal.SIGCONT)  # before Linux 6.12 code of the user can stop it

    def _reap_workers(self) -> None:
        gone = [self._numbers.pop(pid) for pid in _reaped() if pid in self._numbers]
        if gone or self._orphans:
            self._orphans = not kill_children(spared=self._numbers.keys() | self._own)
        for number in gone:
            remove(self._folder / str(number))
            self._control.send({"gone": number})

    def _end(self, status: int) -> NoReturn:
        """Kill every worker, and end with this exit status, or by the signal of this negative number."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._stop(self._numbers)
        for warden in self._numbers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(warden, 0)
        kill_children(spared=())
        remove(self._folder)
        if status < 0:
            signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        os._exit(status)


def _reaped() -> list[int]:
    """Reap the children that have ended."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.append(pid)
    return ended


# --- the workers ---


def _work(plan: dict[str, Any], number: int, channel: Channel) -> None:
    """Be confined, load other people's code, and serve; a template forks the processes that serve."""
    work, grants, folder = sys.modules[plan["work"]], Grants(*plan["grants"]), Path(plan["folder"], str(number))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills these processes before the trainer's
    unconfined = grants.confine(plan["code"], folder, system=plan["system"], modes=plan["template"])
    before = set(sys.modules)
    objects.receive(plan["objects"])
    WorkerStdout.muted = number > 1
    try:
        loaded, about = work.load(plan["hello"])
    except ValueError as error:
        channel.send({"broken": str(error)})
        return
    finally:
        WorkerStdout.muted = False
    sources = loaded_sources(plan["code"], before=before)
    ready = {"ready": about, "unconfined": unconfined, "sources": sources}
    with open("/proc/self/statm") as file:
        memory = int(file.read().split()[0]) * resource.getpagesize() + plan["memory_mb"] * 2**20

    def serve(channel: Channel) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # the driver is gone
            channel.send(ready)
            work.serve(channel, loaded)

    def serve_below(number: int, channel: Channel) -> None:
        grants.confine_further(folder / str(number))
        serve(channel)

    if plan["template"]:
        channel.send(ready)
        Keeper(channel, folder, serve_below).run()
    serve(channel)
