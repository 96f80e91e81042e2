"""The command that the user started: it runs the training in another process, and starts that again if Ray ends it.

    command ── fork ──> driver, in a session of its own ──> Ray, engines, learners, graders

Ray's C++ ends a driver whose raylet is gone with `_exit(1)` at the next use of shared memory: without a message, and no
Python runs any more. Where the driver notices first, it starts its Ray again by itself (`restarts.py`). Else the
command starts another driver, which resumes from the newest checkpoint.

A signal to the command is passed on. The driver is killed when the command is; the command ends as the driver ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rlhf.config import cli
from rlhf.config.printing import lossy_output, say
from rlhf.processes.outside import adopt_orphans, die_with_parent

LEFT_S = 30.0  # wait for the processes of a lost driver to end; the guard of its Ray kills them
LOST = "the driver has ended without a message, as Ray ends it when its raylet or its control service is gone."


class Training(NamedTuple):
    """The driver's message to the command about its run."""

    folder: str
    has_own_ray: bool
    max_restarts: int


class Restarts:
    """Counts restarts in a row without a new checkpoint."""

    def __init__(self) -> None:
        self._count, self._from_step = 0, -1

    def restart_after(self, saved: int, *, allowed: int) -> str:
        """The message of a restart from the checkpoint of step `saved` (0: none); empty if no restart is allowed."""
        self._count = 1 if saved > self._from_step else self._count + 1
        self._from_step = saved
        if not saved or self._count > allowed:
            return ""
        return f"Restart {self._count} of at most {allowed} (run.max_restarts) from the checkpoint of step {saved}."


# These two are set in the driver only.
_to_command: int | None = None  # a pipe
_follows_lost_driver = False


def follows_lost_driver() -> bool:
    """Whether this driver takes the place of one that Ray ended; it then resumes."""
    return _follows_lost_driver


def tell_command(message: Training | int) -> None:
    """In a driver: send the command its run, in case another driver must resume it, or its exit status."""
    if _to_command is not None:
        os.write(_to_command, json.dumps(message).encode() + b"\n")


def supervise(main: Callable[[], None]) -> int:
    """Run a training program in a process of its own; returns its exit status."""
    adopt_orphans()  # to see when the processes of a lost driver have ended
    with lossy_output():
        restarts, follows = Restarts(), False
        while True:
            returncode, training = _run_driver(main, follows_lost_driver=follows)
            if training is None:
                break
            from rlhf.run.checkpoint_files import checkpoint_step, complete_checkpoints  # numpy starts threads

            complete = complete_checkpoints(Path(training.folder) / "checkpoints")
            saved = [checkpoint_step(path.name) for path in complete]
            restart, follows = restarts.restart_after(max(saved, default=0), allowed=training.max_restarts), True
            if not training.has_own_ray:
                say(f"error: {LOST} Start the cluster again, and go on with --resume.", file=sys.stderr)
                return cli.RESUMABLE
            if not restart:
                say(f"error: {LOST}", file=sys.stderr)
                return cli.RUN_ERROR
            say(f"warning: {LOST} {restart}")
            try:
                _wait_for_orphans()
            except KeyboardInterrupt:
                return cli.INTERRUPTED
    if returncode == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    return cli.exit_status(returncode)


def _run_driver(main: Callable[[], None], *, follows_lost_driver: bool) -> tuple[int, Training | None]:
    """Run one driver and pass signals on; returns its exit status, and its training if Ray's code ended it."""
    command, (report, to_command) = os.getpid(), os.pipe()
    sys.stdout.flush()
    before = {number: signal.getsignal(number) for number in cli.end_signals()}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)  # until both know what to do with one
    driver = os.fork()
    passed_on = False

    def pass_on(number: int, _frame: object) -> None:
        nonlocal passed_on
        passed_on = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(driver, number)

    for number in before if driver else ():
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not driver:
        os.close(report)
        _run_as_driver(main, command, to_command, follows_lost_driver=follows_lost_driver)
    os.close(to_command)
    while (ended := os.waitpid(-1, 0))[0] != driver:
        pass  # an orphan that was adopted
    for number, handler in before.items():
        signal.signal(number, handler)
    messages = _read(report)
    returncode = os.waitstatus_to_exitcode(ended[1])
    if messages and isinstance(messages[-1], int):  # it ended by itself
        return messages[-1], None
    ended_by_ray = returncode in (1, -signal.SIGABRT) and messages and not passed_on
    return returncode, Training(*messages[-1]) if ended_by_ray else None


def _run_as_driver(main: Callable[[], None], command: int, to_command: int, *, follows_lost_driver: bool) -> NoReturn:
    """Run the program as the driver, and exit."""
    global _to_command, _follows_lost_driver
    _to_command, _follows_lost_driver = to_command, follows_lost_driver
    os.setsid()  # a signal to the group or from the terminal comes through the command alone
    die_with_parent(signal.SIGKILL)
    if os.getppid() != command:
        os._exit(cli.RUN_ERROR)
    status = cli.run_program(main)
    tell_command(status)
    sys.exit(status)


def _read(pipe: int) -> list[Any]:
    """The JSON lines in a pipe. It does not wait: a process that the driver forked may still hold the other end."""
    os.set_blocking(pipe, False)
    try:
        return [json.loads(line) for line in os.read(pipe, 2**16).splitlines()]
    except BlockingIOError:
        return []
    finally:
        os.close(pipe)


def _wait_for_orphans() -> None:
    end = time.monotonic() + LEFT_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.1)
