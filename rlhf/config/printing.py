"""Output of the programs.

Text of data, models and rewards cannot command the terminal that shows it. Output may be lost: a closed pipe, a full
disk or a lost terminal ends no program that has better to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

SILENT_S, LOOK_S = 8.0, 0.5  # a heartbeat speaks after so long a silence, for which it looks this often
KEPT = "\n\t\u200c\u200d"  # lines, tabs, and the joiners that Persian, Hindi and emoji are written with


def printable(value: Any) -> str:
    """Text for a terminal. Control characters, which could move the cursor or reverse the text, are escaped."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(c if c in KEPT or unicodedata.category(c)[0] != "C" else f"\\u{ord(c):04x}" for c in text)


def as_utf8(text: str) -> str:
    """Text that UTF-8 can encode: lone surrogates are escaped as in JSON."""
    return text.encode("utf-8", "backslashreplace").decode()


def say(*texts: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print text at once, without control characters. What nobody reads any more, as after `| head`, is dropped."""
    try:
        print(*map(printable, texts), file=file, end=end, flush=True)
    except BrokenPipeError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), (file or sys.stdout).fileno())
    note_line()


_printed_at = _heartbeat_ended_at = 0.0  # when this program printed its last line, and when its last heartbeat ended


def note_line() -> None:
    """Tell `heartbeat` that a line of this program was printed."""
    global _printed_at
    _printed_at = time.monotonic()


@contextlib.contextmanager
def heartbeat(text: Callable[[], str], say: Callable[[str], object] = say) -> Iterator[None]:
    """A context that calls `say(text())` whenever this program has printed nothing for SILENT_S.

    A thread does it, because imports and loading block the event loop. An empty text is not printed. Silence before
    the context counts only if another heartbeat has just ended.
    """
    global _heartbeat_ended_at
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if time.monotonic() - _printed_at >= SILENT_S and (line := text()):
                say(line)
                note_line()

    if time.monotonic() - _heartbeat_ended_at > SILENT_S:
        note_line()
    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _heartbeat_ended_at = time.monotonic()


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """A context that prints `what (12 s)` when nothing else was printed for a while."""
    began = time.monotonic()
    return heartbeat(lambda: f"{what} ({time.monotonic() - began:.0f} s)")


def to_stderr(line: str) -> None:
    say(line, file=sys.stderr)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """A context in which text is dropped if standard output or standard error cannot take it.

    Every write is tried, so a log goes on once the disk has room again. The first failure of standard output is a
    warning on standard error.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    streams = sys.stdout, sys.stderr
    lossy: Any = _Lossy(sys.stdout), _Lossy(sys.stderr)
    lossy[1].warns = False
    with contextlib.redirect_stdout(lossy[0]), contextlib.redirect_stderr(lossy[1]):
        try:
            yield
        finally:
            for stream in streams:
                _drop_unwritten(stream)


class WrappedStream:
    """A text stream with another `write`; everything else is passed on to the wrapped stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        raise NotImplementedError

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Lossy(WrappedStream):
    """A text stream whose `write` and `flush` never fail."""

    warns = True  # of the first failure

    def write(self, text: str) -> int:
        with self._failures_dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._failures_dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _failures_dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self.warns:
                self.warns = False
                say(f"warning: standard output: {error.strerror}. The program goes on without it.", file=sys.stderr)


def _drop_unwritten(stream: TextIO) -> None:
    """Python flushes its streams when it exits; a failure there would become the exit status."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        stream.flush()
