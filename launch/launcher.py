"""Shared parts of the launchers: errors, signals, waiting, processes and the command line."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.5
USER_ERROR, RUN_ERROR, HANGUP = 2, 1, 128 + signal.SIGHUP
RESUMABLE = 75  # as in rlhf.config.cli: Ray is gone under a run that --resume goes on with
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
LIBC = ctypes.CDLL(None)


class LaunchError(Exception):
    """Ends this node, and with it the run: a message for the user and an exit status."""

    def __init__(self, message: str, status: int = RUN_ERROR) -> None:
        super().__init__(message)
        self.status = status


def say(text: object) -> None:
    print(f"{socket.gethostname()}: {text}", file=sys.stderr, flush=True)


# --- waiting ---

interrupts: list[int] = []  # exit statuses that signals, or the end of standard input, ask for


def end_on_signals(*, with_stdin: bool = False) -> None:
    """Only note them, for `wait_until`: nothing cuts short the clean-up that the first one begins."""

    def read_stdin() -> None:
        while os.read(0, 4096):
            pass
        interrupts.append(HANGUP)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: interrupts.append(128 + number))
    if with_stdin:
        threading.Thread(target=read_stdin, daemon=True).start()


def wait_until(
    met: Callable[[], T], deadline_s: float = float("inf"), check: Callable[[], None] = lambda: None
) -> T | None:
    """The first value of `met` that is true; None after the deadline. Between two values, `check` may raise.

    Raises:
        LaunchError: this node was interrupted.
    """
    end = time.monotonic() + deadline_s
    while not (value := met()):
        if interrupts:
            raise LaunchError("interrupted, ending the run.", interrupts[0])
        if time.monotonic() > end:
            return None
        check()
        time.sleep(POLL_S)
    return value


# --- processes ---


def start(command: Sequence[str], output: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; it gets SIGTERM when this process is killed."""
    with output.open("ab") if output else contextlib.nullcontext() as file:
        try:
            return subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file and subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} does not start: {error.strerror}.", USER_ERROR) from error


def stop(process: subprocess.Popen[bytes], grace_s: float, *, told: bool = False) -> None:
    """End a process; after the grace period, kill the rest of its session.

    Args:
        told: it got SIGTERM already; a second one would keep a run from saving.
    """
    if not told:
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill the descendants that ignored SIGTERM or outlived their parent."""
    import psutil

    for _ in range(50):
        if not (left := psutil.Process().children(recursive=True)):
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=0.1)


def ray_command() -> str:
    installed = Path(sys.executable).parent / "ray"
    return os.environ.get("RAY") or (str(installed) if installed.exists() else "ray")


def exit_status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


# --- the command line ---


def command_line(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that every launcher has."""
    rest = "The first argument that is not listed here begins the arguments of the program, and so does `--`."
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description=description, epilog=rest, formatter_class=shape
    )
    parser.add_argument("--module", default="rlhf.grpo", help="the program; default: rlhf.grpo")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds to wait for the nodes; default: 600")
    return parser


def main(command: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Run a command with its flags; `program` gets the arguments after them. A LaunchError becomes one message."""
    takes_value = {name: action.nargs is None for action in parser._actions for name in action.option_strings}
    flags, rest = [], list(argv)
    while rest and rest[0].partition("=")[0] in takes_value:
        flags.append(rest.pop(0))
        if rest and takes_value.get(flags[-1]):
            flags[-1] += f"={rest.pop(0)}"  # a value may begin with a dash
    options = parser.parse_args(flags)
    options.program = rest[1:] if rest[:1] == ["--"] else rest
    try:
        return command(options)
    except LaunchError as error:
        say(error)
        return error.status
    except ImportError as error:
        say(f"{error.name} is not installed here. Set it up: make setup-gpu.")
        return USER_ERROR
