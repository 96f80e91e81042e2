"""A further layer around built-in rewards, in case a response tricks a parser: an audit hook refuses side effects."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED_PREFIXES = ("os.", "subprocess.", "socket.", "ctypes.", "shutil.", "pty.", "signal.", "urllib.", "webbrowser.")
# events of imports, without side effects
HARMLESS = frozenset(["os.listdir", "os.scandir", "os.walk", "os.fwalk"])

_refusing: ContextVar[bool] = ContextVar("refusing", default=False)
_install = cache(sys.addaudithook)  # a hook stays for good


class RefusedError(Exception):
    """Grading tried to run code, write, start a process or connect."""


@contextlib.contextmanager
def refusing_side_effects() -> Iterator[None]:
    """A context in which this thread cannot run code from strings, write files, start processes or connect."""
    _install(_audit)
    token = _refusing.set(True)
    try:
        yield
    finally:
        _refusing.reset(token)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _refusing.get():
        return
    if event == "exec":
        refused = not os.path.isabs(arguments[0].co_filename)
    elif event == "compile":
        refused = not os.path.isabs(str(arguments[1] or ""))
    elif event == "open":
        refused = bool((arguments[2] or 0) & WRITE_FLAGS) or any(c in str(arguments[1] or "") for c in "wax+")
    else:
        refused = event.startswith(REFUSED_PREFIXES) and event not in HARMLESS
    if refused:
        raise RefusedError(f"{event} while grading")
