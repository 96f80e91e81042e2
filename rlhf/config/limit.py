"""A limit of time and memory for work that a user's text asks for: a chat template is a program, and may never end.

Such work may hold Python's lock, so that no thread here is certain to run. Another process watches it:

    here ----- shared memory: since when, and what to say -----> watcher
    a thread here says it and exits with status 2         <----- it takes too long
    (unless it does not run)                                     GRACE_S later, or at once if it takes too much
                                                                 memory: says it and kills this process
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

LIMIT_S, LIMIT_BYTES = 20.0, 2 * 2**30  # of one piece of work; the memory is what the process grows by meanwhile
LOOK_S, GRACE_S = 0.1, 1.0
HEAD = struct.Struct("=ddQH")  # since when (0: nothing is watched), both limits, length of the message in bytes
SIZE = mmap.PAGESIZE
SAID = SIZE - 1  # the place of a byte that is 1 when the message is out

_lock = threading.RLock()
_shared: mmap.mmap | None = None


@contextlib.contextmanager
def limited(message: str) -> Iterator[None]:
    """A context that ends this process if it takes longer than LIMIT_S, or more than LIMIT_BYTES.

    Args:
        message: what is said then; `{}` in it stands for the limit that was exceeded.
    """
    global _shared
    with _lock:  # of several threads, since the work is done under Python's lock
        if _shared is None:
            _shared = _start_watcher()
        text = message.encode("utf-8", "backslashreplace")[: SAID - HEAD.size]
        _shared[HEAD.size : HEAD.size + len(text)] = text
        HEAD.pack_into(_shared, 0, time.monotonic(), LIMIT_S, LIMIT_BYTES, len(text))
        try:
            yield
        finally:
            HEAD.pack_into(_shared, 0, 0.0, 0.0, 0, 0)


def _start_watcher() -> mmap.mmap:
    memory = os.memfd_create("rlhf-limit")
    os.truncate(memory, SIZE)
    command = [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), memory, _resident(os.getpid())))]
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory], start_new_session=True
    )
    shared = mmap.mmap(memory, SIZE)
    os.close(memory)
    from rlhf.config.printing import say  # now: the thread has little time

    threading.Thread(target=_exit_when_told, args=(watcher, shared, say), name="limit", daemon=True).start()
    return shared


def _exit_when_told(watcher: subprocess.Popen[bytes], shared: mmap.mmap, say: Callable[..., None]) -> None:
    assert watcher.stdout is not None
    if text := os.read(watcher.stdout.fileno(), SIZE):
        shared[SAID] = 1
        say(text.decode(), file=sys.stderr)
        os._exit(2)  # USER_ERROR of the programs


def _forget() -> None:
    """In a forked process, whose parent the watcher watches."""
    global _lock, _shared
    _lock, _shared = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)


def _watch(parent: int, memory: mmap.mmap, resident: int) -> None:
    """In the watcher, until the parent has ended, which closes its end of this standard input."""
    since = told = 0.0
    before = resident
    while not select.select([0], [], [], LOOK_S)[0] and os.getppid() == parent:
        began, limit_s, limit_bytes, length = HEAD.unpack_from(memory)
        if began != since:
            since, told, before = began, 0.0, resident
        now, resident = time.monotonic(), _resident(parent)
        if not (began and length):  # nothing is watched, or the header, whose last part this is, is being written
            continue
        late = now - began > limit_s
        if not late and resident - before <= limit_bytes:
            continue
        why = f"did not end within {limit_s:g} s" if late else f"took more than {limit_bytes / 2**30:.3g} GiB of memory"
        text = "error: " + memory[HEAD.size : HEAD.size + length].decode(errors="replace").replace("{}", why)
        if late and not told:
            told = now
            os.write(1, text.encode())
        elif not late or now - told > GRACE_S:
            os.write(2, b"" if memory[SAID] else f"{text}\n".encode())
            os.kill(parent, signal.SIGKILL)


def _resident(process: int) -> int:
    """Bytes of memory that a process has."""
    with open(f"/proc/{process}/statm", "rb") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the parent has ended
        _watch(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), SIZE), int(sys.argv[3]))
