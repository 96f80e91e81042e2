"""Answers system calls of a model's program that seccomp holds: changes of modes and times, starts of processes.

No rule of Landlock or seccomp says for which files `chmod` or `utime` is allowed. So seccomp stops the calling process
and sends the call to a listener (`seccomp_unotify(2)`), which opens what the call names, looks where it lies, and
changes it if that is in the folder of the process. The process itself never makes the call, so nothing that it changes
meanwhile can lead elsewhere.

No rule bounds the number of processes of one program either, and a program that forks without end outruns a check that
is made from time to time. So each start of a process or thread waits until it is counted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import stat
import struct
from collections.abc import Callable

from rlhf.processes.confinement import ASKED_STARTS, NUMBERS

RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102  # SECCOMP_IOCTL_NOTIF_*, linux/seccomp.h
CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE: the process makes the call itself
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
MODE_BITS = 0o1777  # no set-user-id
MAX_PATH = PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)


# positions of the arguments: folder (or file, without a path), path, mode, times, flags
FORMS = {
    "chmod": (None, 0, 1, None, None),
    "fchmod": (0, None, 1, None, None),
    "fchmodat": (0, 1, 2, None, None),
    "fchmodat2": (0, 1, 2, None, 3),
    "utimensat": (0, 1, None, 2, 3),
}


def answer_call(listener: int, folder: str, may_start: Callable[[], bool]) -> None:
    """Answer the next call at a listener: allow a start, or make a change whose target is in the folder.

    Args:
        folder: a path without links.
        may_start: asked for each start of a process or thread; the caller of one that may not be waits to be killed.
    """
    request = bytearray(80)
    with contextlib.suppress(OSError):  # its process has ended
        fcntl.ioctl(listener, RECEIVE, request)
        number, pid, _, call, _, _, *arguments = struct.unpack("=QIIiIQ6Q", request)
        problem, numbers = 0, NUMBERS[platform.machine()]
        if call in [numbers.get(name) for name in ASKED_STARTS]:
            if may_start():
                fcntl.ioctl(listener, SEND, struct.pack("=QqiI", number, 0, 0, CONTINUE))
            return
        try:
            name = next(name for name in FORMS if numbers.get(name) == call)
            form = [None if position is None else arguments[position] for position in FORMS[name]]
            _change(folder, lambda: fcntl.ioctl(listener, IS_VALID, struct.pack("=Q", number)), pid, *form)
        except OSError as error:
            problem = error.errno or errno.EACCES
        fcntl.ioctl(listener, SEND, struct.pack("=QqiI", number, 0, -problem, 0))


def _change(
    folder: str, check: Callable[[], object], pid: int,
    start: int | None, path: int | None, mode: int | None, times: int | None, flags: int | None,
) -> None:  # fmt: skip
    """Change a mode or times for a process, whose path and times are addresses in its memory; OSError if not allowed.

    Args:
        check: raises OSError if the process has ended, since the memory that was read is then another's.
    """
    name = _memory(pid, path, MAX_PATH).partition(b"\0")[0] if path else b""
    if path and not (name or (flags or 0) & AT_EMPTY_PATH):
        raise FileNotFoundError(errno.ENOENT, "")
    new_times = _memory(pid, times, 32) if times else None
    base = AT_FDCWD if start is None else ctypes.c_int(start).value
    opened = os.open(f"/proc/{pid}/{'cwd' if base == AT_FDCWD else f'fd/{base}'}", os.O_PATH | os.O_CLOEXEC)
    try:
        check()
        if name.startswith((b"/proc/self/", b"/proc/thread-self/")):
            name = f"/proc/{pid}/".encode() + name.split(b"/", 3)[3]
        no_link = os.O_NOFOLLOW if (flags or 0) & AT_SYMLINK_NOFOLLOW else 0
        file = os.open(name, os.O_PATH | os.O_CLOEXEC | no_link, dir_fd=opened) if name else os.dup(opened)
    finally:
        os.close(opened)
    try:
        own = f"/proc/self/fd/{file}"
        real_path = os.readlink(own)
        if not f"{real_path}/".startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "")
        if mode is not None:  # folders stay open for whoever looks what is in them
            of_folder = 0o500 if stat.S_ISDIR(os.fstat(file).st_mode) else 0
            os.chmod(own, mode & MODE_BITS | (0o700 if real_path == folder else of_folder))
        elif _libc.utimensat(file, b"", new_times, AT_EMPTY_PATH) != 0:
            raise OSError(ctypes.get_errno(), "")
    finally:
        os.close(file)


def _memory(pid: int, address: int, size: int) -> bytes:
    """The bytes at an address of a process, with zeros after the end of its memory."""
    data, first = ctypes.create_string_buffer(size), min(size, PAGE - address % PAGE)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(data), size)
    there = (ctypes.c_size_t * 4)(address, first, address + first, size - first)  # the second page may not exist
    if _libc.process_vm_readv(pid, here, 1, there, 2, 0) < 1:
        raise OSError(errno.EFAULT, "")
    return data.raw
