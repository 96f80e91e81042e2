"""What a process may reach: by default its code, the system's files, a folder of its own, and no network.

Any process may use these three mechanisms on itself. The first two are of Linux and hold for all processes below it:

    Landlock    files: only named files can be opened; no process outside can be examined or sent a signal;
                network: where a port is granted, only TCP connections to that port
    seccomp     network: no socket can be made, or with a port only those of TCP; files: owners and attributes cannot be
                changed; processes: the scheduling and limits of others cannot be changed
    audit hook  network: the same in Python, with a message that names the remedy

Mechanisms that the kernel lacks are left out and reported. A worker confines itself after it has been forked, before it
imports other people's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
import platform
import socket
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rlhf.processes.outside import prctl

# The environment variables that a program needs to start; a grant names more.
KEPT_VARIABLES = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE",
)  # fmt: skip
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
NETWORK_VARIABLES = (  # with `network: true`
    "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", *CERTIFICATES,
)  # fmt: skip
SYSTEM = (  # /etc/resolv.conf may be a link to elsewhere
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/resolv.conf", "/opt", "/nix/store", "/sys",
    "/run/systemd/resolve", "/var/lib/ca-certificates", "/proc/self", "/proc/sys", "/proc/cpuinfo", "/proc/meminfo",
    "/proc/stat",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# linux/landlock.h; the numbers of the calls are the same on every architecture
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CONNECT_TCP, BIND_TCP, NET_PORT, ABI_NET = 2, 1, 2, 4
WRITE_FILE, READ_FILE, CHANGE_FOLDERS, REFER, TRUNCATE = 1 << 1, 1 << 2, 0x1FF0, 1 << 13, 1 << 14
ABSTRACT_SOCKETS, SIGNALS = 1, 2
ABI_TRUNCATE, ABI_REFER, ABI_SCOPES = 3, 2, 6
PATH_BENEATH = 1

# linux/seccomp.h, linux/prctl.h, asm/unistd.h
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, AND, EQUAL, AT_LEAST, HAS_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
X32 = 0x40000000  # another numbering of the calls


class Calls(NamedTuple):
    """The numbers of system calls on one machine."""

    audit_arch: int
    socket: tuple[int, ...]  # socket, io_uring_setup
    socketpair: int
    owners: tuple[int, ...]  # [f|l]chown[at], [f|l]setxattr[at], [f|l]removexattr[at], ioprio_set
    modes: tuple[int, ...]  # [f]chmod[at|at2], utime[s], futimesat, utimensat
    schedulers: tuple[int, ...]  # sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr, prlimit64
    setpriority: int
    processes: tuple[int, ...]  # [v]fork, execve[at], ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    clone: int
    lasting: tuple[int, ...]  # [t|tg]kill, rt_[tg]sigqueueinfo, pidfd_send_signal, truncate, (shm|sem|msg)get, mq_open
    sends: tuple[tuple[int, int], ...]  # sendto, sendmsg, sendmmsg, and the argument that has the flags


MACHINES = {
    "x86_64": Calls(
        0xC000003E, (41, 425), 53, (92, 93, 94, 260, 188, 189, 190, 463, 197, 198, 199, 466, 251),
        (90, 91, 268, 452, 132, 235, 261, 280), (203, 144, 142, 314, 302), 141,
        (57, 58, 59, 322, 101, 310, 311, 438), 56,
        (62, 200, 234, 129, 297, 424, 76, 29, 64, 68, 240), ((44, 3), (46, 2), (307, 3)),
    ),
    "aarch64": Calls(
        0xC00000B7, (198, 425), 199, (54, 55, 5, 6, 7, 463, 14, 15, 16, 466, 30),
        (52, 53, 452, 88), (122, 119, 118, 274, 261), 140,
        (221, 281, 117, 270, 271, 438), 220,
        (129, 130, 131, 138, 240, 424, 45, 194, 190, 186, 180), ((206, 3), (211, 2), (269, 3)),
    ),
}  # fmt: skip
ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050000 | 13, 0x00050000 | 38  # with EACCES, with ENOSYS
MSG_FASTOPEN = 0x20000000  # a send that connects, which Landlock does not judge
TCP: dict[int, int | tuple[int, int]] = {
    0: int(socket.AF_INET),
    1: int(socket.SOCK_STREAM),
    2: (0, ~socket.IPPROTO_TCP & 0xFFFFFFFF),
}  # 0 or TCP
CLONE3, CLONE_THREAD = 435, 0x10000  # the arguments of clone3 are in memory, which a filter cannot read

NO_NETWORK = "this code has no network. If it needs one, set `network: true` next to its name"
NO_FILE = (
    "This code reads its own files and the system's, and writes to its temporary folder. Name other files and folders "
    "next to it: `files: [PATH]`"
)
NO_SHARED_MEMORY = (
    "Processes share locks and memory in /dev/shm, which this code cannot open. If it needs them, set "
    "`files: [/dev/shm]` next to its name"
)
NOT_ALONE = (
    "this kernel cannot confine the code of responses. Use Linux 5.13 or later with Landlock and seccomp, on x86-64 or "
    "ARM64, or grade without `code`"
)

_libc = ctypes.CDLL(None, use_errno=True)


class NoNetworkError(BaseException):
    """Confined code tried to connect. Not an Exception: a client would catch that and retry until its deadline."""


class Grants(NamedTuple):
    """What processes may reach beyond the default: environment variables, the network, files and folders.

    Attributes:
        readable: files and folders that they may only read.
        port: they may connect to it over TCP, without the rest of the network; 0: to nothing.
    """

    env: Sequence[str] = ()
    network: bool = False
    files: Sequence[str] = ()
    readable: Sequence[str] = ()
    port: int = 0

    def environment(self, noun: str) -> dict[str, str]:
        """The whole environment of the processes.

        Args:
            noun: the section of the config that has the grants, for messages.

        Raises:
            ValueError: a named variable is not set, or a named file is not there.
        """
        for name in set(self.env) - set(os.environ):
            remedy = "Set it where the run starts, or remove the name."
            raise ValueError(f"{noun} env={name}: there is no such environment variable. {remedy}")
        for path in (path for path in self.files if not os.path.exists(path)):
            raise ValueError(f"{noun} files={path}: there is no such file or folder. Create it, or correct the path.")
        names = (*KEPT_VARIABLES, *(NETWORK_VARIABLES if self.network else ()), *self.env)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

    def confine(self, code: Sequence[str], folder: Path) -> list[str]:
        """Confine this process for good; returns which of `files` and `network` this kernel cannot forbid.

        Args:
            code: names of functions or classes, whose code may be read.
            folder: the process may write to it, and its temporary files go there.
        """
        _make_temporary(folder)
        libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        certificates = [os.environ.get(name, "") for name in CERTIFICATES]
        readable = [*SYSTEM, *_etc(), *_readable_code(code), *libraries, *certificates, *self.readable]
        port = 0 if self.network else self.port
        no_files, only_port = _forbid(readable, [*DEVICES, str(folder), *self.files], port)
        if code and not self.network:
            sys.addaudithook(_refuse_network)
        no_network = (
            _forbid_reaching_out(network=self.network, modes=bool(code or port), tcp=bool(port)) or self.network
        )
        no_network &= only_port
        return [name for name, forbidden in (("files", no_files), ("network", no_network)) if not forbidden]

    def confine_further(self, folder: Path) -> None:
        """Confine a process that a confined one has forked: it writes to this folder and not to the other's."""
        _make_temporary(folder)
        _forbid_files(["/"], [*DEVICES, str(folder), *self.files])


def confine_alone(readable: Sequence[str]) -> bool:
    """Confine a confined process until it reaches nothing at all: it reads these paths, writes nothing, starts nothing.

    It sends no signal, not even to itself, and makes nothing that outlives it. It is in a Landlock domain of its own
    below that of its parent, so it cannot look into the parent either. Threads are allowed; a C library starts them
    with `clone` where there is no `clone3`. False if the kernel cannot do all this.
    """
    calls = MACHINES.get(platform.machine())
    if not _forbid_files(readable, DEVICES) or calls is None:
        return False
    forbidden = (*calls.processes, *calls.socket, *calls.modes, *calls.lasting)
    pairs = {calls.socketpair: {1: int(socket.SOCK_STREAM)}}
    return forbid_calls(calls.audit_arch, forbidden, pairs, bits={calls.clone: CLONE_THREAD}, absent=[CLONE3])


def _make_temporary(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # an ended keeper has removed it
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def _etc() -> Iterator[str]:
    """What every user may read in /etc: root may also read the files of passwords and keys, so they are left out."""
    if os.geteuid() != 0:
        yield "/etc"
        return
    for folder, _, names in os.walk("/etc"):
        for path in (os.path.join(folder, name) for name in names):
            with contextlib.suppress(OSError):
                if os.stat(path).st_mode & 0o004:
                    yield path


def _readable_code(code: Iterable[str]) -> Iterator[str]:
    """Paths to read: the interpreter, the files of the code with their folders, modules and packages on sys.path.

    Not the other files on sys.path: runs are often started in the folder that holds both the code and the run folders.
    """
    yield from {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(__file__).parents[1])}
    for name in (name.rpartition(":")[0] for name in code):
        if name.endswith(".py"):
            yield str(Path(name).absolute().parent)
            continue
        with contextlib.suppress(ValueError, ImportError):  # its import reports the error
            if spec := importlib.util.find_spec(name.partition(".")[0]):
                yield from spec.submodule_search_locations or [spec.origin or ""]
    roots = (*SYSTEM, sys.prefix, sys.base_prefix)
    for entry in (entry or "." for entry in sys.path):
        if Path(entry).name in ("site-packages", "dist-packages"):
            yield entry
        elif os.path.isdir(entry) and not any(Path(entry).is_relative_to(root) for root in roots):
            endings = (".py", ".so", ".libs", ".dist-info")  # the last two come with a package
            yield from (file.path for file in os.scandir(entry) if file.name.endswith(endings) or _holds_code(file))


def _holds_code(folder: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return any(name.endswith(".py") for name in os.listdir(folder.path))
    return False


def _forbid_files(readable: Sequence[str], writable: Sequence[str]) -> bool:
    """Allow only files under these paths to be opened; False if the kernel has no Landlock."""
    return _forbid(readable, writable, 0)[0]


def _forbid(readable: Sequence[str], writable: Sequence[str], port: int) -> tuple[bool, bool]:
    """`_forbid_files`, and if a port is named no TCP connection but to that port: whether each of them holds."""
    abi = _call(CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return False, not port
    net = CONNECT_TCP | BIND_TCP if port and abi >= ABI_NET else 0
    handled = READ_FILE | WRITE_FILE | CHANGE_FOLDERS
    handled |= (REFER if abi >= ABI_REFER else 0) | (TRUNCATE if abi >= ABI_TRUNCATE else 0)
    attributes = struct.pack("=QQQ", handled, net, ABSTRACT_SOCKETS | SIGNALS)
    size = len(attributes) if abi >= ABI_SCOPES else 16 if net else 8
    ruleset = _call(CREATE_RULESET, attributes, size, 0)
    if net:
        _call(ADD_RULE, ruleset, NET_PORT, struct.pack("=QQ", CONNECT_TCP, port), 0)
    for paths, rights in ((readable, READ_FILE), (writable, handled)):
        for path in paths:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue  # it is not on this machine
            of_this = rights if os.path.isdir(path) else rights & (READ_FILE | WRITE_FILE | TRUNCATE)
            _call(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", of_this, fd), 0)
            os.close(fd)
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_confined = _call(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return is_confined, not port or (is_confined and bool(net))


def _forbid_reaching_out(*, network: bool, modes: bool, tcp: bool = False) -> bool:
    """Forbid system calls that Landlock does not judge; False if the kernel has no seccomp or the machine is unknown.

    Args:
        network: allow sockets. Without it, pairs of connected streams are allowed: event loops make them.
        modes: allow to change modes and times of files, as compilers and copies do; they may be any files of the user.
        tcp: allow sockets of TCP, whose connections Landlock judges.
    """
    calls = MACHINES.get(platform.machine())
    if calls is None:
        return False
    sockets = () if network else calls.socket[1:] if tcp else calls.socket
    forbidden = (*calls.owners, *(() if modes else calls.modes), *sockets)
    # the first argument of these is a process, 0 for this one
    unless: dict[int, Mapping[int, int | tuple[int, int]]] = {number: {0: 0} for number in calls.schedulers}
    unless[calls.setpriority] = {0: os.PRIO_PROCESS, 1: 0}
    if not network:
        unless[calls.socketpair] = {1: int(socket.SOCK_STREAM)}
    if tcp and not network:
        unless[calls.socket[0]] = TCP
    return forbid_calls(calls.audit_arch, forbidden, unless, without=calls.sends if tcp and not network else ())


def forbid_calls(
    machine: int,
    numbers: Sequence[int],
    unless: Mapping[int, Mapping[int, int | tuple[int, int]]] | None = None,
    *,
    bits: Mapping[int, int] | None = None,
    absent: Sequence[int] = (),
    without: Sequence[tuple[int, int]] = (),
) -> bool:
    """Have the kernel refuse these system calls from now on; False if it cannot.

    Args:
        unless: calls that are allowed with these values of these arguments: number -> {argument: value}. Flags above
            the lowest four bits of a value that is not 0 are ignored; (value, mask) compares the bits of a mask.
        bits: calls that are allowed if their first argument has a bit: number -> bit.
        absent: calls that fail as on a kernel that does not have them.
        without: calls that are refused with MSG_FASTOPEN in this argument.
    """
    refuse, allow = (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)
    # (operation, steps to skip if true, if false, value)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), refuse, (LOAD, 0, 0, 0), (AT_LEAST, 0, 1, X32), refuse]
    for number in numbers:
        steps += [(EQUAL, 0, 1, number), refuse]
    for number in absent:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ABSENT)]
    for number, argument in without:
        flags = (LOAD, 0, 0, 16 + 8 * argument)
        steps += [(EQUAL, 0, 4, number), flags, (HAS_BIT, 0, 1, MSG_FASTOPEN), refuse, (LOAD, 0, 0, 0)]
    for number, bit in (bits or {}).items():
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, 16), (HAS_BIT, 1, 0, bit), refuse, allow]
    for number, values in (unless or {}).items():
        steps.append((EQUAL, 0, 4 * len(values) + 1, number))
        for argument, allowed in values.items():
            if isinstance(allowed, tuple):
                allowed, mask = allowed
            else:
                mask = 0xF if allowed else 0xFFFFFFFF
            steps += [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask), (EQUAL, 1, 0, allowed), refuse]
        steps.append(allow)
    program = b"".join(struct.pack("=HBBI", *step) for step in (*steps, allow))
    held = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(held)))
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return bool(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(head), 0, 0) == 0)


def _call(number: int, *arguments: Any) -> int:
    """A system call; -1 if the kernel refuses it."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in (number, *arguments)]
    return int(_libc.syscall(*words))


def _refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        raise NoNetworkError(NO_NETWORK)
    if event != "socket.__new__" or arguments[1] not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        return
    frame: FrameType | None = sys._getframe(1)
    if frame and frame.f_locals.get("fileno") is not None:
        return  # one of a connected pair, which event loops make
    while frame := frame and frame.f_back:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            raise PermissionError(errno.EACCES, NO_NETWORK)  # a module may test what exists: urllib3 tests for IPv6
    raise NoNetworkError(NO_NETWORK)


def remedy(error: BaseException, *, otherwise: str = "") -> str:
    """How to get what the confinement refused; "" if the error says it, `otherwise` for other errors."""
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = str(frames[-1][0].f_globals.get("__name__")) if frames else ""
    match error:
        case _ if NO_NETWORK in str(error):
            return ""
        case PermissionError():
            return NO_SHARED_MEMORY if raised_in.startswith("multiprocessing.") else NO_FILE
        case KeyError(args=(str(variable), *_)) if raised_in == "os":
            return f"If this environment variable is set where the run starts, set `env: [{variable}]` next to the name"
    return otherwise
