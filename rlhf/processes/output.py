"""What other people's code prints: whole lines with its name in front, never on the terminal directly.

    worker: print() ── WorkerStdout ──> pipe ──> driver: OutputPipe, one per worker ──> PrintedLines ──> say(line)

A worker has the pipe as its standard output and error, so programs that it starts, and a crash, are heard too.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from bdb import BdbQuit
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

MAX_LINE = 1000  # characters of a line that are shown
MAX_LINES, WINDOW_S = 50, 10.0  # so many lines are shown in so many seconds
NAME_SEPARATOR = "\x1f"  # between the name of the code and its line
READ_BYTES = 1 << 16
LAST_READS = 50  # of a pipe that may never end

_running: ContextVar[str | None] = ContextVar("running", default="")  # the code that runs now; None: it is not heard


@contextlib.contextmanager
def printing_as(name: str | None) -> Iterator[None]:
    """In this context a worker prints under this name, and whole lines at its end; with None nothing is printed."""
    token = _running.set(name)
    try:
        yield
    finally:
        if WorkerStdout.of_this_process is not None:
            WorkerStdout.of_this_process.end_line()
        _running.reset(token)


class WorkerStdout(io.RawIOBase):
    """Standard output of a worker: text of several calls becomes whole lines, each with the name of its code.

    Attributes:
        muted: whether text is dropped; so that what a module prints when it is imported is not shown by every worker.
    """

    of_this_process: WorkerStdout | None = None
    muted = False

    def __init__(self) -> None:
        self._open: dict[str, bytes] = defaultdict(bytes)  # by name: text without its line end yet

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, data: Any) -> int:
        name, text = _running.get(), bytes(data)
        if not self.muted and name is not None:
            *lines, rest = (self._open[name] + text).split(b"\n")
            self._open[name] = rest[:MAX_LINE]
            for line in lines:
                self._send(name, line)
        return len(text)

    def end_line(self) -> None:
        """Send what the running code has printed without a line end."""
        name = _running.get() or ""
        if line := self._open.pop(name, b""):
            self._send(name, line)

    def _send(self, name: str, line: bytes) -> None:
        os.write(1, name.encode() + NAME_SEPARATOR.encode() + line[:MAX_LINE] + b"\n")


def redirect_output(pipe: int) -> None:
    """Make a pipe the standard output and error of this process, and let breakpoint() fail: there is no terminal."""
    for fd in (1, 2):
        os.dup2(pipe, fd)
    os.close(pipe)
    lines = WorkerStdout.of_this_process = WorkerStdout()
    sys.stdout = sys.stderr = io.TextIOWrapper(lines, encoding="utf-8", errors="backslashreplace", write_through=True)
    sys.breakpointhook = _refuse_debugger


def _refuse_debugger(*_: object, **__: object) -> None:
    raise BdbQuit


class PrintedLines:
    """Gives printed lines to `say_line`, at most MAX_LINES in WINDOW_S; the others are counted.

    Args:
        noun: what the code is, for the beginning of each line.
        names: of all code that may print.
        say_line: called in the thread of `Workers`.
    """

    def __init__(self, noun: str, names: Sequence[str], say_line: Callable[[str], None]) -> None:
        self._noun, self._sole = noun, names[0] if len(names) == 1 else ""
        self._say_line = say_line
        self._began, self._shown, self._dropped = time.monotonic(), 0, 0

    def lines(self, data: bytes) -> None:
        """Show whole lines."""
        if time.monotonic() - self._began > WINDOW_S:
            self.end_window()
        for line in data.splitlines():
            if self._shown < MAX_LINES:
                self._shown += 1
                name, _, text = line.decode(errors="replace").rpartition(NAME_SEPARATOR)
                self._say(name, text[:MAX_LINE])
            else:
                self._dropped += 1

    def end_window(self) -> None:
        """Say how many lines were not shown, and show lines again."""
        if self._dropped:
            self._say("", f"{self._dropped} more printed lines are not shown")
        self._began, self._shown, self._dropped = time.monotonic(), 0, 0

    def _say(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; the work goes on
            self._say_line(f"{self._noun} {name or self._sole}".rstrip() + f": {text}")


class OutputPipe:
    """The driver's end of the pipe of one worker; `pipe` is the worker's end."""

    def __init__(self, printed: PrintedLines) -> None:
        self._printed = printed
        self._fd, self.pipe = os.pipe()
        os.set_blocking(self._fd, False)
        self._open = b""  # text without its line end yet
        self.ended = False  # no process has the pipe any more

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Show what was printed; False if that is nothing."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return False
        whole, end, self._open = (self._open + data).rpartition(b"\n")
        if len(self._open) > READ_BYTES or not data:
            whole, self._open = whole + end + self._open, b""
        self._printed.lines(whole)
        self.ended = not data
        return bool(data)

    def close(self) -> None:
        """Show the rest; the worker has ended."""
        for _ in range(LAST_READS):  # a process that outlives the worker may still print
            if not self.read():
                break
        os.close(self._fd)
        self.ended = True
