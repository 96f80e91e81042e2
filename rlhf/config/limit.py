"""A limit of time and memory for work that a user's text asks for: a chat template is a program, and may never end.

Such work may hold Python's lock, so that no thread here is certain to run. Another process watches it:

    here ----- shared memory: what began, and what to say -----> watcher, which looks at /proc
    a thread here says it and exits with status 2         <----- it takes too long
    (unless it does not run)                                     GRACE_S later, or at once if it takes too much
                                                                 memory: says it and kills this process

Time is processor time of the thread that works: none passes while it is stopped, or waits for a processor. Memory is
what the process has for itself, without files and shared memory.
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
LOOK_S, GRACE_S, SAYING_S = 0.1, 1.0, 10.0
# Thread (0: nothing is watched), its time and the process's memory at the start, both limits, bytes of the message. It
# is not written at once, so the watcher trusts it when two looks have found the same.
HEAD = struct.Struct("=QddQQH")
SIZE = mmap.PAGESIZE
PRINTED = SIZE - 1  # position of a byte that is 1 once the message is printed

_lock = threading.RLock()
_shared: mmap.mmap | None = None


@contextlib.contextmanager
def limited(message: str) -> Iterator[None]:
    """A context that ends this process if it runs longer than LIMIT_S, or takes more than LIMIT_BYTES.

    Args:
        message: printed then; `{}` in it stands for the limit that was exceeded.
    """
    global _shared
    with _lock:  # of several threads, since the work is done under Python's lock
        shared = _shared = _shared or _start_watcher()
        text = message.encode("utf-8", "backslashreplace")[: PRINTED - HEAD.size]
        shared[HEAD.size : HEAD.size + len(text)] = text
        began, memory = time.thread_time(), _memory(os.getpid())
        HEAD.pack_into(shared, 0, threading.get_native_id(), began, LIMIT_S, memory, LIMIT_BYTES, len(text))
        try:
            yield
        finally:
            HEAD.pack_into(shared, 0, 0, 0, 0, 0, 0, 0)


def _start_watcher() -> mmap.mmap:
    memory = os.memfd_create("rlhf-limit")
    os.truncate(memory, SIZE)
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(memory)]
    watcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[memory], start_new_session=True
    )
    shared = mmap.mmap(memory, SIZE)
    os.close(memory)
    from rlhf.config.printing import say  # now: the thread has little time

    threading.Thread(target=_exit_on_message, args=(watcher, shared, say), name="limit", daemon=True).start()
    return shared


def _exit_on_message(watcher: subprocess.Popen[bytes], shared: mmap.mmap, say: Callable[..., None]) -> None:
    global _shared
    assert watcher.stdout is not None
    if text := os.read(watcher.stdout.fileno(), SIZE):
        shared[PRINTED] = 1
        say(text.decode(), file=sys.stderr)
        os._exit(2)  # USER_ERROR of the programs
    watcher.wait()
    _shared = None  # somebody ended it: the next work starts another


def _forget() -> None:
    """Forget the watcher in a forked process: it watches the parent."""
    global _lock, _shared
    _lock, _shared = threading.RLock(), None


os.register_at_fork(after_in_child=_forget)


def _watch(parent: int, shared: mmap.mmap) -> None:
    """In the watcher, until the parent has ended: then standard input ends, unless a fork of the parent holds it."""
    known, warned_at = tuple[float, ...](), 0.0
    while not select.select([0], [], [], LOOK_S)[0] and os.getppid() == parent:
        head = HEAD.unpack_from(shared)
        if head != known or not head[0]:
            known, warned_at = head, 0.0
            continue
        thread, began, limit_s, memory, limit_bytes, length = head
        late = _thread_s(parent, thread) - began > limit_s
        if not late and _memory(parent) - memory <= limit_bytes:
            continue
        why = f"did not end within {limit_s:g} s" if late else f"took more than {limit_bytes / 2**30:.3g} GiB of memory"
        text = "error: " + shared[HEAD.size : HEAD.size + length].decode(errors="replace").replace("{}", why)
        if late and not warned_at:
            warned_at = time.monotonic()
            os.write(1, text.encode())
        elif not late or time.monotonic() - warned_at > (SAYING_S if shared[PRINTED] else GRACE_S):
            if not shared[PRINTED] and select.select([], [2], [], GRACE_S)[1]:  # a full pipe is not waited for
                os.write(2, f"{text}\n".encode())
            os.kill(parent, signal.SIGKILL)


def _thread_s(process: int, thread: int) -> float:
    """Processor time of a thread, seconds. 0 if it has ended."""
    try:
        with open(f"/proc/{process}/task/{thread}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(process: int) -> int:
    """Bytes of memory of a process, without files and shared memory."""
    with open(f"/proc/{process}/statm", "rb") as file:
        resident, shared = file.read().split()[1:3]
    return (int(resident) - int(shared)) * mmap.PAGESIZE


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # the parent has ended
        _watch(int(sys.argv[1]), mmap.mmap(int(sys.argv[2]), SIZE))
