"""Runs one command, such as a program that a model wrote, in a process domain; all its children end with it.

    caller ── fork ──> warden ── fork ──> the command, confined by `enter_domain`
       └── socket: hang up to stop it; <── its result ─────────┘

The warden adopts orphans, however detached. When the command ends or exceeds a bound, or the caller hangs up or dies,
the warden kills every process below it, and only then reports. The command can neither signal nor trace it. A user's
program nests a domain in its own with the file that `write_launcher` makes. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import select
import shlex
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.processes.calls import answer_call
from rlhf.processes.confinement import close_descriptors, enter_domain, scope_signals
from rlhf.processes.forkers import BOOT, PACKAGE
from rlhf.processes.outside import KILL_S, adopt_orphans, die_with_parent, kill_children, may_signal, pids, threads_of

LOOK_S, LOOK_FRACTION = 0.02, 0.05  # pause between checks of a command's use; largest share of time for checks
PARENT_S = 1.0  # pause between checks that the caller lives; user code may hold a copy of its socket
THREADS = 16  # threads per process, on average
BLOCK, MIB = 512, 1 << 20  # bytes; BLOCK is the unit of `st_blocks`


class Bounds(NamedTuple):
    """Bounds of a command, which is ended if it exceeds one.

    Attributes:
        seconds: seconds by the clock.
        processes: processes at the same time, with THREADS each on average.
        folder_mb, files: size and number of the files in its folder, including deleted files that it keeps open.
        limits: (RLIMIT, value) pairs for each of its processes, within the limits of the caller.
    """

    seconds: float = math.inf
    processes: float = math.inf
    folder_mb: float = math.inf
    files: float = math.inf
    limits: Sequence[tuple[int, int]] = ()


class RefusedError(OSError):
    """A command was not started, because it does not exist or cannot be confined."""


class Command:
    """A command in a confined domain, which runs after `begin`; its descriptor becomes readable when it has ended.

    Args:
        folder: the only folder that it may write to.
        work: its working folder, the only one where it may change modes and times of files. A nested domain shares it.
        output: descriptor for its output; None passes the caller's output and standard input on.
        reach: further arguments of `enter_domain`.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, *, work: str | Path, variables: Mapping[str, str],
        bounds: Bounds = Bounds(), output: int | None = None, **reach: Any,  # noqa: B008 - a constant
    ) -> None:  # fmt: skip
        self._socket, theirs = socket.socketpair()
        caller = os.getpid()

        def become(warden: socket.socket) -> None:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            enter_domain(folder, kept=[warden.fileno()], listener_to=warden, **reach)
            os.chdir(work)
            for kind, wanted in (*bounds.limits, (resource.RLIMIT_CORE, 0)):
                hard = resource.getrlimit(kind)[1]
                limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
                resource.setrlimit(kind, (limit, limit))
            if warden.recv(1):
                os.execvpe(command[0], [*command], variables)

        with theirs:
            self._warden = os.fork()
            if self._warden == 0:
                with _ending():
                    try:
                        report = _guard(theirs, caller, folder, str(work), bounds, output, become)
                    except Exception as error:
                        report = {"refused": f"{type(error).__name__}: {error}"}
                    theirs.sendall(json.dumps(report).encode())

    def begin(self) -> None:
        with contextlib.suppress(OSError):  # it was refused
            self._socket.send(b"b")

    def fileno(self) -> int:
        return self._socket.fileno()

    def ended(self) -> tuple[int, str]:
        """Wait until its processes have ended. Returns the exit status (or minus the signal) and the exceeded bound.

        Raises:
            RefusedError: the command was not started.
        """
        data = b""
        while not data.endswith(b"}") and (more := self._socket.recv(1 << 16)):
            data += more
        report = json.loads(data or b'{"refused": "its warden was killed"}')
        if "refused" in report:
            raise RefusedError(f"it cannot run in a domain of its own: {report['refused']}")
        return report["status"], report["over"]

    def close(self) -> None:
        """End the command and all its processes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(PermissionError):  # before Linux 6.12 a process in a domain may not
                os.kill(self._warden, signal.SIGCONT)  # code of the user can have stopped it
            self._socket.settimeout(2 * KILL_S)
            while self._socket.recv(1 << 16):
                pass
        self._socket.close()
        with contextlib.suppress(ChildProcessError):  # code of the user has reaped it
            if os.waitpid(self._warden, os.WNOHANG)[0] == 0:
                os.kill(self._warden, signal.SIGKILL)
                os.waitpid(self._warden, 0)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """A context that ends this forked process without flushing or cleaning up anything of the caller."""
    try:
        gc.disable()  # nor are its objects finalized
        yield
    finally:
        os._exit(127)


def become_warden() -> bool:
    """Prepare this fork for `kill_below`: a session of its own, orphans, a scope. False if the kernel has no scopes."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(PermissionError):  # below a domain on an older kernel
        os.setsid()
    adopt_orphans()
    is_scoped = scope_signals()
    kill_below(is_scoped)  # it fails here, not later, where an older kernel hides them
    return is_scoped


def _guard(
    leash: socket.socket, caller: int, folder: Path, work: str, bounds: Bounds, output: int | None, become: Any
) -> dict[str, Any]:
    """Fork a process that calls `become`, and guard it to its end; returns the report for the caller."""
    is_scoped = become_warden()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for target, fd in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)) if output is not None else ():
        assert fd is not None
        os.dup2(fd, target)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        with _ending():
            try:
                die_with_parent(signal.SIGKILL)
                become(theirs)
            except BaseException as error:
                theirs.sendall(f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace"))
    close_descriptors([leash.fileno(), ours.fileno()])
    problem, listeners = b"", list[int]()
    with contextlib.suppress(OSError):  # it was refused
        ours.send(leash.recv(1))
        ours.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):  # it has not read that
        while (more := socket.recv_fds(ours, 1000, 1))[0]:  # it ends when the command begins
            problem, listeners = problem + more[0].lstrip(b"\0"), listeners + more[1]
    if problem:
        os.waitpid(child, 0)
        return {"refused": problem.decode("utf-8", "replace")}
    below = partial(_below, child, is_scoped)
    over = _watch([os.pidfd_open(child), leash.fileno()], listeners, caller, folder, work, bounds, below)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        if not is_scoped:  # nothing can leave its group
            os.killpg(child, signal.SIGKILL)
    pid, status = os.waitpid(child, os.WNOHANG)
    with contextlib.suppress(PermissionError):  # below a domain that has no scope either, which ends what is left
        kill_below(is_scoped)
    return {"status": os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL, "over": over}


def _watch(
    ends: Sequence[int], listeners: Sequence[int], caller: int, folder: Path, work: str, bounds: Bounds,
    below: Callable[[], list[int]],
) -> str:  # fmt: skip
    """Wait until the command ends or has to be ended. Returns the bound that it exceeded, or an empty string.

    Args:
        ends: descriptors that become readable when the command ends, or the caller hangs up.
        below: `_below`.
    """
    waiting, real_folder = select.poll(), os.path.realpath(work)
    for fd in (*ends, *listeners):
        waiting.register(fd, select.POLLIN)
    deadline = time.monotonic() + bounds.seconds
    looks = bounds._replace(seconds=math.inf, limits=()) != Bounds()
    pause = LOOK_S if looks else PARENT_S
    look = time.monotonic() + pause
    room, over = bounds.processes, ""  # room: starts of processes and threads until they are counted again

    def may_start() -> bool:
        nonlocal room, over
        if room <= 0:
            present = below()
            room, over = bounds.processes + 1 - len(present), _crowd(bounds, present)
        room -= 1
        return not over

    while True:
        events = waiting.poll(1000 * max(0.0, min(look, deadline) - time.monotonic()))
        ready = {fd for fd, event in events if event & select.POLLIN}  # at a hang-up `answer_call` might wait for ever
        for listener in ready & {*listeners}:
            answer_call(listener, real_folder, may_start)
        if over:
            return f"because {over}"
        if ready & {*ends}:
            return ""
        began = time.monotonic()
        if began >= deadline:
            return f"after {bounds.seconds:g} seconds"
        if began >= look:
            if os.getppid() != caller:
                return ""
            present = below()
            if looks and (over := _exceeded(folder, bounds, present)):
                return f"because {over}"
            look = time.monotonic() + max(pause, (time.monotonic() - began) / LOOK_FRACTION)


def _crowd(bounds: Bounds, below: Sequence[int]) -> str:
    if len(below) > bounds.processes:
        return f"it has over {bounds.processes:g} processes"
    if sum(map(threads_of, below)) > THREADS * bounds.processes:
        return f"it has over {THREADS * bounds.processes:g} threads"
    return ""


def _exceeded(folder: Path, bounds: Bounds, below: Sequence[int]) -> str:
    if crowd := _crowd(bounds, below):
        return crowd
    blocks = count = 0
    try:
        for entry in _files(folder, below):
            count, blocks = count + 1, blocks + entry.st_blocks
            if count > bounds.files:
                return f"it has over {bounds.files:g} files"
            if blocks * BLOCK > bounds.folder_mb * MIB:
                return f"its files have over {bounds.folder_mb:g} MiB"
    except (OSError, RecursionError):
        return "its files cannot be seen"
    return ""


def _files(folder: Path, below: Sequence[int]) -> Iterator[os.stat_result]:
    """Status of each entry in a folder, and of deleted files that processes keep open. OSError if it cannot look."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        for name in (*folders, *names):
            with contextlib.suppress(FileNotFoundError):
                yield os.lstat(os.path.join(parent, name))
    deleted: dict[tuple[int, int], os.stat_result] = {}
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            try:  # its threads share their descriptors; one that has ended, maybe the first, has none
                opened = (fds for task in _entries(f"/proc/{pid}/task") if (fds := [*_entries(f"{task}/fd")]))
                for fd in next(opened, ()):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        entry = os.stat(fd)
                        if stat.S_ISREG(entry.st_mode) and not entry.st_nlink:
                            deleted[entry.st_dev, entry.st_ino] = entry
            except PermissionError:
                if not _is_ending(pid):
                    raise
    yield from deleted.values()


def _entries(folder: str) -> Iterator[str]:
    """The current entries of a folder in /proc; none if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        yield from (f"{folder}/{name}" for name in os.listdir(folder))


def _is_ending(pid: int) -> bool:
    """True if a process has ended or is about to end; then only root may look into it."""
    ended = os.pidfd_open(pid)
    try:
        return bool(select.select([ended], [], [], 1.0)[0])
    finally:
        os.close(ended)


def _below(child: int, is_scoped: bool) -> list[int]:
    """The processes below this one, by whom it may signal, or by the group of its child; [] if none are visible.

    It first reaps orphans that have ended, so that they do not count; the status of the child is left for `_guard`.
    """
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child:
            os.waitpid(ended.si_pid, 0)
    with contextlib.suppress(PermissionError):
        others = (pid for pid in pids() if pid != os.getpid())
        return [pid for pid in others if (may_signal(pid) if is_scoped else _group(pid) == child)]
    return []


def _group(pid: int) -> int:
    with contextlib.suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def kill_below(is_scoped: bool) -> None:
    """Kill and reap all processes below this warden: at once, or without a scope parents before their children."""
    if not is_scoped or may_signal(os.getppid()):
        kill_children(spared=())
        return
    deadline = time.monotonic() + KILL_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.kill(-1, signal.SIGKILL)  # all at once, so that none can outrun it; it reaches those below alone
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.0005)


def write_launcher(file: Path, folder: Path, readable: Sequence[str]) -> None:
    """Write a program that runs its arguments as a command in a domain that may write only to this folder."""
    words = [sys.executable, "-I", "-S", "-c", BOOT.format(module="domains"), PACKAGE, str(folder)]
    with open(os.open(file, os.O_WRONLY | os.O_CREAT, 0o700), "w") as script:
        script.write(f'#!/bin/sh\nexec {shlex.join([*words, json.dumps(readable)])} "$@"\n')


def main(folder: str, readable: str, *command: str) -> None:
    """Run a command in a domain, and end with its status."""
    variables = {name: value for name, value in os.environ.items() if name not in ("RLHF_ROW", "RLHF_REWARD")}
    reach: dict[str, Any] = {"readable": json.loads(readable), "network": True}  # as the caller's
    running = Command(command, Path(folder), work=os.getcwd(), variables=variables, **reach)
    running.begin()
    try:
        status, _ = running.ended()
    except RefusedError as error:
        sys.exit(str(error))
    finally:
        running.close()
    if status < 0:
        with contextlib.suppress(OSError):  # that of SIGKILL is fixed
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
