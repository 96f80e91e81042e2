"""Limits what a process may reach: by default its code, the system's files, its own folder, and no network.

Any process may use these mechanisms on itself. All but the last belong to Linux and hold for all processes below it:

    Landlock      files: only named files can be opened; no process outside can be examined or sent a signal;
                  network: where a port is granted, only TCP connections to that port
    seccomp       network: no socket can be made, or with a port only those of TCP; files: owners and attributes cannot
                  be changed; processes: the scheduling and limits of others cannot be changed
    capabilities  all are dropped, except those that the user's own code needs for files of another user
    audit hook    network: the same in Python, with a message that names the remedy

Mechanisms that the kernel lacks are skipped and reported. A worker confines itself after it is forked and before it
imports other people's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import os
import platform
import resource
import socket
import stat
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
    "no_proxy", "NO_PROXY",
)  # fmt: skip
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
NETWORK_VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", *CERTIFICATES)  # with `network: true`
FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/etc")
SYSTEM = (  # /etc/resolv.conf may be a link to elsewhere
    "/etc/resolv.conf", "/run/systemd/resolve", "/var/lib/ca-certificates", "/sys/devices/system", "/sys/fs/cgroup",
    "/sys/kernel/mm/hugepages", "/sys/kernel/mm/transparent_hugepage", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat",
    *(f"/proc/sys/{name}" for name in ("kernel/osrelease", "kernel/pid_max", "kernel/random", "vm/overcommit_memory")),
)  # fmt: skip
MIN_OPEN_FILES = 256  # of a domain below others
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

# linux/landlock.h; the numbers of the calls are the same on every architecture
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, CLOSE_RANGE = 444, 445, 446, 436
CONNECT_TCP, BIND_TCP, NET_PORT, PATH_BENEATH = 2, 1, 2, 1
WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE | IOCTL_DEV
CHANGE_FOLDERS, MAKE_DEVICES, REFER = 0x1FF0, 1 << 6 | 1 << 11, 1 << 13
ABSTRACT_SOCKETS, SIGNALS = 1, 2
ABI_REFER, ABI_TRUNCATE, ABI_NET, ABI_IOCTL, ABI_SCOPES = 2, 3, 4, 5, 6

# linux/seccomp.h, linux/prctl.h, linux/capability.h, linux/sched.h
PR_SET_NO_NEW_PRIVS, PR_GET_SECCOMP = 38, 21
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, CAPABILITY_VERSION = 24, 47, 4, 0x20080522
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050000 | 13, 0x00050000 | 38  # with EACCES, with ENOSYS
# does nothing; with EPERM and EOPNOTSUPP, after which copies go on without an owner and without attributes
IDLE, NOT_OWNER, UNSUPPORTED = 0x00050000, 0x00050000 | 1, 0x00050000 | 95
ASK, NEW_LISTENER, SET_FILTER = 0x7FC00000, 1 << 3, 1  # a listener decides
WAIT_KILLABLE = 1 << 5  # from Linux 5.19, as REFER: a handler of a signal interrupts no call that the listener has
X32 = 0x40000000  # another numbering of the calls
NEWEST = 470  # the last call that was looked at; what came later is absent for code that a model wrote
MSG_FASTOPEN = 0x20000000  # a send that connects, which Landlock does not judge
CLONE_FILES, CLONE_THREAD, CLONE_NAMESPACES, CLOSE_RANGE_UNSHARE = 0x400, 0x10000, 0x7E020000, 2
WORD = 0xFFFFFFFF
CAP_SETPCAP = 8
# of the user's own code: DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER for bind mounts of another user; SETPCAP to drop these
KEPT_CAPABILITIES = 1 << 1 | 1 << 2 | 1 << 3 | 1 << CAP_SETPCAP

# asm/unistd.h: the name of a system call, its number on x86-64 and on ARM64 (-: there is none)
_NUMBERS = """
socket 41 198, socketpair 53 199, listen 50 201, accept 43 202, accept4 288 242, io_uring_setup 425 425,
sendto 44 206, sendmsg 46 211, sendmmsg 307 269,
chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7,
setxattrat 463 463, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466,
file_setattr 469 469, ioprio_set 251 30,
utime 132 -, utimes 235 -, futimesat 261 -, chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
utimensat 280 88,
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
prlimit64 302 261, setpriority 141 140,
unshare 272 97, setns 308 268, add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, fanotify_init 300 262, syslog 103 116, name_to_handle_at 303 264,
open_by_handle_at 304 265,
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, kcmp 312 272,
process_madvise 440 440, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193, semctl 66 191,
semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180, mq_unlink 241 181,
memfd_create 319 279, memfd_secret 447 447, inotify_init 253 -, inotify_init1 294 26, clone3 435 435, clone 56 220,
personality 135 92, fcntl 72 25, ioctl 16 29, prctl 157 167,
kill 62 129, tkill 200 130, tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240,
pidfd_send_signal 424 424, truncate 76 45, seccomp 317 277, landlock_create_ruleset 444 444,
open 2 -, openat 257 56, openat2 437 437,
fork 57 -, vfork 58 -, execve 59 221, execveat 322 281,
setsid 112 157, setpgid 109 154, close_range 436 436
"""
_TABLE = [entry.split() for entry in _NUMBERS.replace("\n", " ").split(",")]
NUMBERS = {
    machine: {name: int(numbers[column]) for name, *numbers in _TABLE if numbers[column] != "-"}
    for column, machine in enumerate(("x86_64", "aarch64"))
}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h


def _from(first: str, last: str) -> tuple[str, ...]:
    """The names of the table from one to another."""
    names = [name for name, *_ in _TABLE]
    return tuple(names[names.index(first) : names.index(last) + 1])


OWNERS, ATTRIBUTES = _from("chown", "fchownat"), _from("setxattr", "removexattrat")
MODES = _from("chmod", "utimensat")
SCHEDULERS = _from("sched_setaffinity", "setpriority")
MACHINE = _from("unshare", "open_by_handle_at")  # after capabilities are dropped, these calls are left to refuse
# access to other processes, and objects that are shared or outlive their maker
OTHERS = _from("ptrace", "memfd_secret")
SIGNALLED, STARTS = _from("kill", "pidfd_send_signal"), _from("fork", "execveat")
ASKED_STARTS = ("fork", "vfork", "clone")  # a listener counts them
# Values refused in an argument, under a mask: F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE and F_NOTIFY; FIOSETOWN,
# SIOCSPGRP, TIOCSTI and TIOCLINUX; all of file systems, which change files that are open for reading; PR_SCHED_CORE
REFUSED_VALUES = {
    ("fcntl", 1, WORD): (8, 10, 15, 1024, 1026),
    ("ioctl", 1, WORD): (0x8901, 0x8902, 0x5412, 0x541C),
    ("ioctl", 1, 0xFF00): (0x5800, 0x6600, 0x6F00, 0x7600, 0x9400, 0xF500),
    ("prctl", 0, WORD): (62,),
}

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

Check = tuple[int, int, int, bool]  # an argument, a mask, a value in it, and whether it has to be that value
FILES, USER, MODEL, ALONE = range(4)  # levels of a `Domain`
_venv = [str(folder) for folder in Path(sys.executable).parents[1:2] if (folder / "pyvenv.cfg").exists()]  # with -S
_prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, *_venv, str(Path(__file__).parents[1]))
INTERPRETER = tuple(dict.fromkeys(_prefixes))
_libc = ctypes.CDLL(None, use_errno=True)
_held: list[Domain] = []  # what `enter_domain` uses


class ConfinementError(OSError):
    """A step of the confinement failed (errno and step), so no other code may run in this process."""


class NoNetworkError(BaseException):
    """Confined code tried to connect. Not an Exception: a client would catch that and retry until its deadline."""


class Grants(NamedTuple):
    """Access of processes beyond the default: environment variables, the network, files and folders.

    Attributes:
        readable: files and folders that they may read but not write.
        port: the only TCP port that they may connect to, without the rest of the network; 0 allows none.
        code_connects: the user's code connects to it, and not only a program that it starts.
    """

    env: Sequence[str] = ()
    network: bool = False
    files: Sequence[str] = ()
    readable: Sequence[str] = ()
    port: int = 0
    code_connects: bool = False

    def environment(self, noun: str) -> dict[str, str]:
        """The whole environment of the processes.

        Args:
            noun: the section of the config that has the grants, for messages.

        Raises:
            ValueError: a named variable is not set, or a named file is not there.
        """
        for name in set(self.env) - set(os.environ):
            remedy = "Set it where the run starts, or remove the name."
            raise ValueError(f"{noun} env={name}: this environment variable is not set. {remedy}")
        for path in (path for path in self.files if not os.path.exists(path)):
            raise ValueError(f"{noun} files={path}: there is no such file or folder. Create it, or correct the path.")
        names = (*KEPT_VARIABLES, *(NETWORK_VARIABLES if self.network else ()), *self.env)
        kept = {name: os.environ[name] for name in names if name in os.environ}
        return {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}

    def confine(
        self, code: Sequence[str], folder: Path, *, system: Sequence[str] = (), modes: bool = False
    ) -> list[str]:
        """Confine this process for good; returns which of `files` and `network` this kernel cannot forbid.

        It also computes what `enter_domain` allows, in this process and in its forks.

        Args:
            code: names of functions or classes, whose code may be read.
            folder: the process may write to it, and its temporary files go there.
            system: `system_files`, if that is known already.
            modes: allow to change modes and times of files, as where functions of the user run.

        Raises:
            ConfinementError: a step failed that this kernel knows.
        """
        _make_temporary(folder)
        others = [os.environ.get(name, "") for name in CERTIFICATES]
        libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        others += [*(path for path in libraries if os.path.isabs(path)), *self.readable]
        port = 0 if self.network else self.port
        coarse = [*FOLDERS, *SYSTEM, *INTERPRETER, *_packages()]  # Landlock's layers intersect
        _held[:] = [Domain([*coarse, *others, *self.files], network=self.network, port=port)]
        domain = Domain(
            [*(system or system_files()), "/proc/self", *_readable_code(code), *others],
            [*DEVICES, str(folder), *self.files],
            level=USER, network=self.network, port=port, modes=modes or bool(code),
        )  # fmt: skip
        if code and not self.network and not self.code_connects:
            sys.addaudithook(_refuse_network)
        domain.enter()
        domain.close()
        no_network = domain.filters and (not port or domain.abi >= ABI_NET)
        return [name for name, holds in (("files", domain.abi), ("network", self.network or no_network)) if not holds]

    def confine_further(self, folder: Path) -> None:
        """Confine a fork of a confined process further: it may write to this folder instead of its parent's."""
        _make_temporary(folder)
        domain = Domain(["/"], [*DEVICES, str(folder), *self.files], level=FILES)
        domain.enter()
        domain.close()


def enter_domain(
    folder: Path,
    *,
    readable: Sequence[str] = (),
    writable: Sequence[str] = (),
    network: bool = False,
    kept: Sequence[int] = (),
    listener_to: socket.socket | None = None,
) -> None:
    """Confine this process for good, as the last step before it runs a model's program.

    It gets a session of its own, reads the system's files, the interpreter with its packages, and the files that the
    process is granted, and writes to its folder alone. It has no capability, no descriptor above 2, and reaches no
    process but those that it starts itself. It can be called again below, with a folder in this one.

    Args:
        readable, writable: further files and folders, within what the process may reach already.
        network: network access of a process that has not been confined by `Grants`.
        kept: descriptors that stay open.
        listener_to: gets a descriptor for `calls.answer_call`, which counts the processes that it starts, and by which
            it changes modes and times of files in its folder, or in the folder of an outer domain that has a listener.

    Raises:
        ConfinementError: a step failed that this kernel knows. The program must not run then.
    """
    domain = _held[0] if _held else Domain([*FOLDERS, *SYSTEM, *INTERPRETER, *_packages()], network=network)
    with contextlib.suppress(PermissionError):  # it leads a session
        os.setsid()
    domain.enter(readable, [str(folder), *writable], listener_to)
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # all of a user may have so many on their way
    fewer = max(open_files // 2, min(open_files, MIN_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fewer, fewer))
    _held.clear()
    close_descriptors(kept)


def close_descriptors(kept: Iterable[int]) -> None:
    """Close all descriptors above 2 except `kept`."""
    first = 3
    for fd in (*sorted(kept), WORD):
        if fd > first and _call(CLOSE_RANGE, first, fd - 1, 0) < 0:
            os.closerange(first, min(fd, os.sysconf("SC_OPEN_MAX")))  # before Linux 5.9
        first = fd + 1


def scope_signals() -> bool:
    """Limit the signals of this process to itself and the processes below it; False before Linux 6.12."""
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    ruleset = _call(CREATE_RULESET, struct.pack("=QQQ", REFER, 0, SIGNALS), 24, 0)
    if ruleset < 0:
        return False
    rules = [*_rules(["/"], REFER), struct.pack("=Qi", 0, ruleset)]  # without one no layer lets files change folders
    is_scoped = _call(ADD_RULE, ruleset, PATH_BENEATH, rules[0], 0) == _call(RESTRICT_SELF, ruleset, 0) == 0
    _close(rules)
    return is_scoped


def _make_temporary(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # an ended keeper has removed it
    folder.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


@functools.cache
def system_files() -> list[str]:
    """The system's files and folders that every user may read: as root a process could read the others too."""
    if os.geteuid() != 0:
        return [*FOLDERS, *SYSTEM]
    real = dict.fromkeys(os.path.realpath(folder) for folder in FOLDERS)
    return [*SYSTEM, *(path for folder in real for path in _readable_by_all(folder))]


def _readable_by_all(folder: str) -> list[str]:
    """A folder, or the parts of it that all users may read. Links are skipped, since they lead elsewhere."""
    is_whole, within = True, list[str]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                continue
            mode, inner = entry.stat(follow_symlinks=False).st_mode, [entry.path]
            if stat.S_ISDIR(mode):
                inner = _readable_by_all(entry.path) if mode & 0o5 == 0o5 else []
            elif not mode & 0o4:
                inner = []
            is_whole &= inner == [entry.path]
            within += inner
    return [folder] if is_whole else within


def _packages() -> list[str]:
    return [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]


def _readable_code(code: Iterable[str]) -> Iterator[str]:
    """Paths to read: the interpreter, the files of the code with their folders, modules and packages on sys.path.

    Not the other files on sys.path: runs are often started in the folder that holds both the code and the run folders.
    """
    yield from (*INTERPRETER, *_packages())
    for name in (name.rpartition(":")[0] for name in code):
        if name.endswith(".py"):
            yield str(Path(name).absolute().parent)
            continue
        with contextlib.suppress(ValueError, ImportError):  # its import reports the error
            if spec := importlib.util.find_spec(name.partition(".")[0]):
                yield from spec.submodule_search_locations or [spec.origin or ""]
    roots = (*FOLDERS, sys.prefix, sys.base_prefix, *_packages())
    for entry in (entry or "." for entry in sys.path):
        if os.path.isdir(entry) and not any(Path(entry).is_relative_to(root) for root in roots):
            endings = (".py", ".so", ".libs", ".dist-info")  # the last two come with a package
            yield from (file.path for file in os.scandir(entry) if file.name.endswith(endings) or _holds_code(file))


def _holds_code(folder: os.DirEntry[str]) -> bool:
    with contextlib.suppress(OSError):
        return any(name.endswith(".py") for name in os.listdir(folder.path))
    return False


class Domain:
    """Rules of Landlock and seccomp, made once; every process that enters is confined by them for good.

    Args:
        readable, writable: files and folders. The rest cannot be opened.
        level: who is confined: FILES by Landlock alone; USER, the user's code; MODEL, what a model wrote; ALONE, that
            too, and it starts no process, sends no signal, not even to itself, and makes nothing that outlives it.
            Threads are allowed; a C library starts them with `clone` where there is no `clone3`.
        network: allow sockets. Without it, pairs of connected streams are allowed: event loops make them.
        port: allow TCP connections to this port; 0: none.
        modes: allow to change modes and times of files, as compilers and copies do; they may be any files of the user.

    Attributes:
        abi: the version of the kernel's Landlock; 0: it has none.
        filters: the programs of seccomp, by their verdict on changes of modes and times; that with ASK sends starts of
            processes to the listener too. None if the kernel has no seccomp, or the machine is unknown.
    """

    def __init__(
        self, readable: Sequence[str], writable: Sequence[str] = DEVICES, *, level: int = MODEL, network: bool = False,
        port: int = 0, modes: bool = False,
    ) -> None:  # fmt: skip
        self.abi, self._level = max(0, _call(CREATE_RULESET, None, 0, 1)), level
        self._port = port if self.abi >= ABI_NET else 0
        self._handled = READ_FILE | WRITE_FILE | CHANGE_FOLDERS
        for abi, right in ((ABI_REFER, REFER), (ABI_TRUNCATE, TRUNCATE), (ABI_IOCTL, IOCTL_DEV)):
            self._handled |= right if self.abi >= abi else 0
        self._readable = READ_FILE
        self._writable = self._handled
        if level >= MODEL:
            self._handled |= READ_DIR
            self._readable |= READ_DIR
            self._writable = self._handled & ~MAKE_DEVICES
        self._rules = [*_rules(readable, self._readable), *_rules(writable, self._writable)] if self.abi else []
        has_seccomp = platform.machine() in NUMBERS and prctl(PR_GET_SECCOMP, 0, 0, 0, 0) >= 0
        self._modes, self.filters = ALLOW if modes else REFUSE, dict[int, bytes]()
        if has_seccomp and level != FILES:
            self.filters = _filters(level, network=network, port=port, modes=modes, abi=self.abi)

    def enter(
        self, readable: Sequence[str] = (), writable: Sequence[str] = (), listener_to: socket.socket | None = None
    ) -> None:
        """Confine this process, with further files and folders.

        Raises:
            ConfinementError: a step failed that this kernel knows.
        """
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if self.abi:
            net = CONNECT_TCP | BIND_TCP if self._port else 0
            attributes = struct.pack("=QQQ", self._handled, net, ABSTRACT_SOCKETS | SIGNALS)
            size = len(attributes) if self.abi >= ABI_SCOPES else 16 if net else 8
            ruleset = _done("landlock_create_ruleset", _call(CREATE_RULESET, attributes, size, 0))
            further = [*_rules(readable, self._readable), *_rules(writable, self._writable)]
            for rule in (*self._rules, *further):
                _done("landlock_add_rule", _call(ADD_RULE, ruleset, PATH_BENEATH, rule, 0))
            if net:
                rule = struct.pack("=QQ", CONNECT_TCP, self._port)
                _done("landlock_add_rule", _call(ADD_RULE, ruleset, NET_PORT, rule, 0))
            _done("landlock_restrict_self", _call(RESTRICT_SELF, ruleset, 0))
            _close([*further, struct.pack("=Qi", 0, ruleset)])
        if self._level != FILES:
            _drop_capabilities(KEPT_CAPABILITIES if self._level == USER else 0)
        if self.filters and listener_to is None:
            _set_filter(self.filters[self._modes])
        elif self.filters and listener_to is not None:
            flags = NEW_LISTENER | (WAIT_KILLABLE if self.abi >= ABI_REFER else 0)
            try:
                socket.send_fds(listener_to, [b"\0"], [_set_filter(self.filters[ASK], flags)])
            except ConfinementError as error:
                if error.errno != errno.EBUSY:
                    raise
                # an outer domain has a listener already, which decides; below `Grants` it is that of a container
                _set_filter(self.filters[REFUSE if self in _held else ALLOW])

    def close(self) -> None:
        """Close the descriptors of its rules. It cannot be entered again."""
        _close(self._rules)


def _rules(paths: Iterable[str], rights: int) -> Iterator[bytes]:
    """Rules of Landlock; each has an open descriptor."""
    for path in dict.fromkeys(paths):
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConfinementError(error.errno, f"open: {error.strerror}. The code was not run") from None
            continue  # it is not on this machine
        of_this = rights if stat.S_ISDIR(os.fstat(fd).st_mode) else rights & OF_FILES
        yield struct.pack("=Qi", of_this, fd)


def _close(rules: Iterable[bytes]) -> None:
    for rule in rules:
        os.close(struct.unpack("=Qi", rule)[1])


def _drop_capabilities(kept: int) -> None:
    """Keep these at most; none after the start of another program."""
    head, held = struct.pack("=Ii", CAPABILITY_VERSION, 0), ctypes.create_string_buffer(24)
    _done("capget", _libc.capget(head, held))
    low = struct.unpack("=6I", held)  # effective, permitted and inheritable; the same three of the numbers from 32
    if low[0] >> CAP_SETPCAP & 1:
        for number in range(64):
            if not kept >> number & 1 and prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
                break  # there are no more
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _done("capset", _libc.capset(head, struct.pack("=6I", low[0] & kept, low[1] & kept, 0, 0, 0, 0)))


def _filters(level: int, *, network: bool, port: int, modes: bool, abi: int) -> dict[int, bytes]:
    """Filters of system calls, by what becomes of those for modes and times.

    Args:
        abi: of Landlock, for which they stand in: up to 2 it lets read-only files be emptied, and up to 5 others be
            sent signals.
    """
    refused = [*MACHINE, "io_uring_setup", "file_setattr", "ioprio_set"]
    absent = ["clone3", "utime", "utimes", "futimesat"]  # C libraries take those whose arguments a filter can see
    checks: dict[str, list[Check]] = {"clone": [(0, CLONE_NAMESPACES, 0, True)]}
    if level == USER:  # the first argument of these is a process, 0 for this one
        checks |= {name: [(0, WORD, 0, True)] for name in SCHEDULERS}
        checks["setpriority"] = [(0, WORD, os.PRIO_PROCESS, True), (1, WORD, 0, True)]
    stream = (1, 0xF, int(socket.SOCK_STREAM), True)
    if not network:
        refused += ["listen", "accept", "accept4", *([] if port else ["socket"])]
        checks["socketpair"] = [(0, WORD, int(socket.AF_UNIX), True), stream]
    if port and not network:
        tcp = (2, ~socket.IPPROTO_TCP & WORD, 0, True)  # 0 is TCP too
        checks |= {name: [(at, MSG_FASTOPEN, 0, True)] for name, at in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3))}
        checks["socket"] = [(0, WORD, int(socket.AF_INET), True), stream, tcp]
    if level >= MODEL:
        for name in OWNERS:  # tar and `cp -p` give their files to the user whose they are
            at = 2 if name == "fchownat" else 1
            checks[name] = [(at, WORD, os.geteuid(), True), (at + 1, WORD, os.getegid(), True)]
        refused += [*OTHERS, *(name for name in SCHEDULERS if name != "prlimit64")]
        absent += ["inotify_init", "inotify_init1"]  # they would name the files of others
        checks |= {"prlimit64": [(0, WORD, 0, True)], "personality": [(0, WORD, WORD, True)]}
        # the threads of a process have the same descriptors, so that who looks sees all
        checks["clone"].append((0, CLONE_FILES | CLONE_THREAD, CLONE_THREAD, False))
        checks["close_range"] = [(2, CLOSE_RANGE_UNSHARE, 0, True)]
        for (name, at, mask), values in REFUSED_VALUES.items():
            checks[name] = [*checks.get(name, ()), *((at, mask, value, False) for value in values)]
    if level >= MODEL and abi < ABI_TRUNCATE:
        refused, absent = [*refused, "truncate"], [*absent, "openat2"]
        empties = os.O_TRUNC | os.O_ACCMODE, os.O_TRUNC, False
        checks |= {"open": [(1, *empties)], "openat": [(2, *empties)]}
    if level >= MODEL and abi < ABI_SCOPES:
        refused += [*SIGNALLED[1:], "setsid", "setpgid"]  # all that a process starts stays in its group
        checks["kill"] = [(0, WORD, 0, True)]
    if level == ALONE:
        refused += [*SIGNALLED, *STARTS, "truncate"]
        checks["clone"].append((0, CLONE_THREAD, CLONE_THREAD, True))
    actions = {**dict.fromkeys(refused, REFUSE), **dict.fromkeys(absent, ABSENT)}
    actions |= dict.fromkeys(OWNERS, IDLE if level >= MODEL else REFUSE) | dict.fromkeys(ATTRIBUTES, UNSUPPORTED)
    newest = NEWEST if level >= MODEL else WORD
    verdicts = (REFUSE, ASK, ALLOW) if level == MODEL else (ALLOW,) if modes else (REFUSE,)
    starts = ASKED_STARTS if abi else ()  # before Linux 5.5, which has no Landlock, a listener cannot allow a call
    asked = {action: [*MODES, *(starts if action == ASK else ())] for action in verdicts}
    return {action: _assembled(actions | dict.fromkeys(asked[action], action), checks, newest) for action in verdicts}


def _assembled(actions: Mapping[str, int], checks: Mapping[str, Sequence[Check]], newest: int) -> bytes:
    """A filter; a call with checks is refused unless they all hold, and absent if its number is above `newest`."""
    numbers, refuse = NUMBERS[platform.machine()], (RETURN, 0, 0, REFUSE)
    # (operation, steps to skip if true, if false, value)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, AUDIT_ARCH[platform.machine()]), refuse, (LOAD, 0, 0, 0)]
    steps += [(AT_LEAST, 0, 1, X32), refuse, (AT_LEAST, 0, 1, min(newest + 1, WORD)), (RETURN, 0, 0, ABSENT)]
    for name in (actions.keys() & numbers.keys()) - checks.keys():
        steps += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, actions[name])]
    for name, of_call in ((name, of_call) for name, of_call in checks.items() if name in numbers):
        steps.append((EQUAL, 0, 4 * len(of_call) + 1, numbers[name]))
        for argument, mask, value, is_that in of_call:
            equal = (EQUAL, int(is_that), int(not is_that), value)
            unless = (RETURN, 0, 0, NOT_OWNER if name in OWNERS else REFUSE)
            steps += [(LOAD, 0, 0, 16 + 8 * argument), (AND, 0, 0, mask), equal, unless]
        steps.append((RETURN, 0, 0, actions.get(name, ALLOW)))
    return b"".join(struct.pack("=HBBI", *step) for step in (*steps, (RETURN, 0, 0, ALLOW)))


def _set_filter(program: bytes, flags: int = 0) -> int:
    held = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(held)))
    return _done("seccomp", int(_libc.syscall(NUMBERS[platform.machine()]["seccomp"], SET_FILTER, flags, head)))


def _done(step: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise ConfinementError(error, f"{step}: {os.strerror(error)}. The code was not run")
    return result


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
    """How to get an access that the confinement refused. Empty if the error says it; `otherwise` for other errors."""
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
