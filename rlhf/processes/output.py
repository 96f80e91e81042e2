"""The output of other people's code: whole lines after the name of the code, never directly on the terminal.

    worker: print() ── WorkerStdout ──> pipe ──> driver: OutputPipe, one per worker ──> PrintedLines ──> say(line)

The pipe is the standard output and error of a worker, so output of its child programs and of a crash arrives too.
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

MAX_LINE = 1000  # shown characters of a line
MAX_LINES, WINDOW_S = 50, 10.0  # at most so many lines are shown in so many seconds
NAME_SEPARATOR = "\x1f"  # between the name of the code and its line
READ_BYTES = 1 << 16
LAST_READS = 50  # a pipe may never end

_running: ContextVar[str | None] = ContextVar("running", default="")  # name of the running code; None drops its output


@contextlib.contextmanager
def printing_as(name: str | None) -> Iterator[None]:
    """A context in which a worker prints under this name; its end completes the last line. None prints nothing."""
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
        muted: True drops all text, so that not every worker shows what a module prints when it is imported.
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
        """Send the text of the running code that has no line end yet."""
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
    """Passes printed lines to `say_line`, at most MAX_LINES in WINDOW_S; further lines are only counted.

    Args:
        noun: kind of the code, which begins each line: `reward`.
        names: names of all code that may print.
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
        """Report how many lines were not shown, and begin a new window."""
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
        self.ended = False  # True once no process holds the pipe

    def fileno(self) -> int:
        return self._fd

    def read(self) -> bool:
        """Show new output; False if there is none."""
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
        """Show the remaining output of a worker that has ended."""
        for _ in range(LAST_READS):  # a process that outlives the worker may still print
            if not self.read():
                break
        os.close(self._fd)
        self.ended = True
