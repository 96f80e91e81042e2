"""Modes and times of a model's own files: the kernel asks before such a call of a confined process, and we make it.

No rule of Landlock or seccomp says for which files `chmod` or `utime` is allowed. So seccomp stops the calling process
and sends the call to a listener (`seccomp_unotify(2)`), which opens what the call names, looks where it lies, and
changes it if that is in the folder of the process. The process itself never makes the call, so nothing that it changes
meanwhile can lead elsewhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import struct
from typing import NamedTuple

from rlhf.processes.confinement import NUMBERS

RECEIVE, SEND, IS_VALID = 0xC0502100, 0xC0182101, 0x40082102  # SECCOMP_IOCTL_NOTIF_*, linux/seccomp.h
AT_FDCWD, AT_SYMLINK_NOFOLLOW, AT_EMPTY_PATH = -100, 0x100, 0x1000
MODE_BITS = 0o1777  # no set-user-id
MAX_PATH = PAGE = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class _Form(NamedTuple):
    """Which argument of a call is what; -1: it has none."""

    folder: int = -1  # a descriptor of a folder, or of the file where there is no path
    path: int = -1
    mode: int = -1
    times: int = -1
    flags: int = -1
    unit: str = ""  # of the times: seconds, with micro- or nanoseconds


FORMS = {
    "chmod": _Form(path=0, mode=1),
    "fchmod": _Form(folder=0, mode=1),
    "fchmodat": _Form(folder=0, path=1, mode=2),
    "fchmodat2": _Form(folder=0, path=1, mode=2, flags=3),
    "utime": _Form(path=0, times=1, unit="s"),
    "utimes": _Form(path=0, times=1, unit="us"),
    "futimesat": _Form(folder=0, path=1, times=2, unit="us"),
    "utimensat": _Form(folder=0, path=1, times=2, flags=3, unit="ns"),
}


def answer_call(listener: int, folder: str) -> None:
    """Make the next call that waits at a listener, if it is for something in the folder, whose path has no links."""
    call = bytearray(80)
    try:
        fcntl.ioctl(listener, RECEIVE, call)
    except OSError:
        return  # its process has ended
    number_of_call, pid, _, number, _, _, *arguments = struct.unpack("=QIIiIQ6Q", call)
    problem = 0
    try:
        names = {number: name for name, number in NUMBERS[platform.machine()].items()}
        _make(listener, number_of_call, pid, FORMS[names[number]], arguments, folder)
    except OSError as error:
        problem = error.errno or errno.EACCES
    with contextlib.suppress(OSError):  # its process has ended
        fcntl.ioctl(listener, SEND, struct.pack("=QqiI", number_of_call, 0, -problem, 0))


def _make(listener: int, number: int, pid: int, form: _Form, arguments: list[int], folder: str) -> None:
    """Make a call of a process; OSError where it must not, or cannot."""
    base = ctypes.c_int(arguments[form.folder]).value if form.folder >= 0 else AT_FDCWD
    flags = arguments[form.flags] if form.flags >= 0 else 0
    path = b""
    if form.path >= 0 and arguments[form.path]:
        path = _memory(pid, arguments[form.path], MAX_PATH).partition(b"\0")[0]
        if not path and not flags & AT_EMPTY_PATH:
            raise FileNotFoundError(errno.ENOENT, "")
    times = _times(pid, arguments[form.times], form.unit) if form.times >= 0 else None
    start = os.open(f"/proc/{pid}/{'cwd' if base == AT_FDCWD else f'fd/{base}'}", os.O_PATH | os.O_CLOEXEC)
    try:
        fcntl.ioctl(listener, IS_VALID, struct.pack("=Q", number))  # it has not ended, so this was about itself
        if path.startswith((b"/proc/self/", b"/proc/thread-self/")):
            path = f"/proc/{pid}/".encode() + path.split(b"/", 3)[3]
        no_link = os.O_NOFOLLOW if flags & AT_SYMLINK_NOFOLLOW else 0
        file = os.open(path, os.O_PATH | os.O_CLOEXEC | no_link, dir_fd=start) if path else os.dup(start)
    finally:
        os.close(start)
    try:
        own = f"/proc/self/fd/{file}"
        place = os.readlink(own)
        if not f"{place}/".startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "")
        if form.mode >= 0:  # the folder itself stays open for whoever works in it or reads what is left
            os.chmod(own, arguments[form.mode] & MODE_BITS | (0o700 if place == folder else 0))
        elif _libc.utimensat(file, b"", times, AT_EMPTY_PATH) != 0:
            raise OSError(ctypes.get_errno(), "")
    finally:
        os.close(file)


def _times(pid: int, address: int, unit: str) -> bytes | None:
    """Two `timespec`, as the call names them; None: now."""
    if not address:
        return None
    if unit == "s":
        first, second = struct.unpack("=qq", _memory(pid, address, 16))
        return struct.pack("=4q", first, 0, second, 0)
    first, a, second, b = struct.unpack("=4q", _memory(pid, address, 32))
    scale = 1000 if unit == "us" else 1
    return struct.pack("=4q", first, a * scale, second, b * scale)


def _memory(pid: int, address: int, size: int) -> bytes:
    """What a process has at an address; zeros where its memory ends."""
    data, first = ctypes.create_string_buffer(size), min(size, PAGE - address % PAGE)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(data), size)
    there = (ctypes.c_size_t * 4)(address, first, address + first, size - first)  # what follows may not be there
    if _libc.process_vm_readv(pid, here, 1, there, 2, 0) < 1:
        raise OSError(errno.EFAULT, "")
    return data.raw
