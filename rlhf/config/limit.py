"""A limit of time and memory for work that a user's text asks for: a chat template is a program, and may never end.

A thread watches the work, and ends the program with a message. Time is processor time of the thread that works, so none
passes while it waits. Memory is the private memory of the process, without files and shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from rlhf.config.printing import say

LIMIT_S, LIMIT_BYTES = 20.0, 2 * 2**30  # of one piece of work; the memory is the growth of the process meanwhile
LOOK_S = 0.1  # pause between checks


class _Work(NamedTuple):
    message: str
    clock: int  # id of the working thread's clock of processor time
    began: float
    memory: int


_lock = threading.RLock()
_work: _Work | None = None
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def limited(message: str) -> Iterator[None]:
    """A context that ends this process with status 2 if it takes longer than LIMIT_S, or more than LIMIT_BYTES.

    Args:
        message: what is printed then; `{}` in it stands for the limit that was exceeded.
    """
    global _work, _watcher
    with _lock:  # of several threads, since the work is done under Python's lock
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="limit", daemon=True)
            _watcher.start()
        clock = time.pthread_getcpuclockid(threading.get_ident())
        _work = _Work(message, clock, time.clock_gettime(clock), _private_memory())
        try:
            yield
        finally:
            _work = None


def _watch() -> None:
    while True:
        time.sleep(LOOK_S)
        if (work := _work) is None:
            continue
        late = False
        with contextlib.suppress(OSError):  # the thread has ended
            late = time.clock_gettime(work.clock) - work.began > LIMIT_S
        large = _private_memory() - work.memory > LIMIT_BYTES
        if (late or large) and _work is work:  # else it has ended meanwhile
            memory = f"took more than {LIMIT_BYTES / 2**30:.3g} GiB of memory"
            why = f"did not end within {LIMIT_S:g} s" if late else memory
            say(f"error: {work.message.replace('{}', why)}", file=sys.stderr)
            os._exit(2)  # USER_ERROR of the programs


def _forget() -> None:
    """In a forked process, which has no watching thread."""
    global _lock, _work, _watcher
    _lock, _work, _watcher = threading.RLock(), None, None


os.register_at_fork(after_in_child=_forget)


def _private_memory() -> int:
    """Bytes of memory that only this process has."""
    with open("/proc/self/statm") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE
