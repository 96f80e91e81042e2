"""What the programs print.

Text of data, models and rewards cannot command the terminal that shows it. Output may be lost: a closed pipe, a full
disk or a lost terminal ends no program that has better to do.
"""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import Any, TextIO

KEPT = "\n\t\u200c\u200d"  # lines, tabs, and the joiners that Persian, Hindi and emoji are written with


def printable(value: Any) -> str:
    """Text for a terminal; control characters, which could move the cursor or turn the text, are escaped."""
    text = value if isinstance(value, str) else repr(value)
    return "".join(c if c in KEPT or unicodedata.category(c)[0] != "C" else f"\\u{ord(c):04x}" for c in text)


def say(*texts: str, file: TextIO | None = None) -> None:
    """Print text at once, without control characters; every line of a program that is not laid out by rich."""
    print(*map(printable, texts), file=file, flush=True)


@contextlib.contextmanager
def lossy_output() -> Iterator[None]:
    """A context in which text that standard output or standard error refuses is dropped.

    Each write is tried: a log on a disk with room again goes on. The first failure of standard output is told on
    standard error.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    lossy: Any = _Lossy(sys.stdout, warn=True), _Lossy(sys.stderr, warn=False)
    sys.stdout, sys.stderr = lossy
    try:
        yield
    finally:
        for stream in before:
            _drop_unwritten(stream)
        sys.stdout, sys.stderr = before


class _Lossy:
    """A text stream whose `write` and `flush` do not fail."""

    def __init__(self, stream: TextIO, *, warn: bool) -> None:
        self._stream, self._warn = stream, warn

    def write(self, text: str) -> int:
        with self._failures_dropped():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._failures_dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _failures_dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._warn:
                self._warn = False
                say(f"warning: standard output: {error.strerror}. The program goes on without it.", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drop_unwritten(stream: TextIO) -> None:
    """Python flushes its streams when it exits; a failure there would become the exit status."""
    try:
        stream.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        stream.flush()
