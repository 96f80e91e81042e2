"""What a model wrote reaches nothing that is not its own: a table of doors and callers, as root and as another user."""

from __future__ import annotations

import atexit
import ctypes
import errno
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

from rlhf.processes import confinement
from rlhf.processes.confinement import ABI_SCOPES, CREATE_RULESET, _readable_by_all, enter_domain
from rlhf.processes.forkers import PACKAGE

FIXTURES = Path(__file__).parents[1] / "fixtures"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1) < ABI_SCOPES,
        reason="this kernel has no or an older Landlock",
    ),
]
USER = 54321  # that nobody is
WHO = ["root", "user"] if os.geteuid() == 0 else ["user"]
CALLERS = ["python", "code", "program", "shell"]
GROUPS = (
    "files", "folder", "process", "descriptors", "signals", "daemon", "network", "IPC", "privileges", "devices",
    "limits",
)  # fmt: skip
# What an ordinary user cannot do anyway, and what a container or a machine may refuse everybody.
ROOT_ALONE = {
    "files: only root may read", "network: raw", "network: packets", "privileges: capabilities",
    "privileges: bounding and ambient sets", "privileges: another user", "privileges: chroot",
    "privileges: a mount namespace", "privileges: mount", "privileges: the name of the machine",
    "privileges: measurements", "privileges: a control group", "privileges: a setting of the kernel",
    "devices: a character device", "devices: a block device", "devices: the kernel's log",
}  # fmt: skip
MAY_BE_CLOSED = {
    "files: only root may read", "files: attributes", "files: flags", "files: version", "files: integrity",
    "files: by a handle", "process: migrate_pages",
    "process: trace another", "process: process_vm_readv", "process: pidfd_getfd", "process: kcmp",
    "process: memory of another", "network: TCP of IPv6", "network: TCP by a fast send", "network: listen, IPv6",
    "network: listen, MPTCP", "network: raw", "network: packets", "IPC: keys", "IPC: POSIX messages",
    "privileges: a user namespace", "privileges: clone a user namespace", "privileges: a mount namespace",
    "privileges: mount", "privileges: the name of the machine", "privileges: io_uring", "privileges: measurements",
    "privileges: faults of memory", "privileges: personality", "privileges: clone3", "privileges: calls of 32 bits",
    "privileges: a control group", "privileges: a setting of the kernel", "privileges: addresses of the kernel",
    "devices: a character device", "devices: a block device",
    "devices: the kernel's log", "devices: a terminal", "limits: above the hard one", "limits: core files",
}  # fmt: skip


@functools.cache
def python_of(who: str) -> str:
    """An interpreter that an ordinary user may run: this one may lie in a folder of root's."""
    if who == "root" or os.geteuid() != 0:
        return sys.executable
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        try:
            code = "import sys, json; assert sys.version_info >= (3, 10)"
            subprocess.run([python, "-c", code], check=True, capture_output=True, **as_user(who))
            return python
        except (OSError, subprocess.CalledProcessError):
            continue
    pytest.skip("no Python >= 3.10 is where other users may run it")


def as_user(who: str) -> dict[str, Any]:
    ids = {"user": USER, "group": USER, "extra_groups": []} if who == "user" and os.geteuid() == 0 else {}
    return {"cwd": "/", **ids}


@functools.cache
def readable_copy() -> Path:
    """The programs and the package, where another user may read them."""
    folder = Path(tempfile.mkdtemp(prefix="readable-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(PACKAGE, folder / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    for file in FIXTURES.glob("*.py"):
        shutil.copy(file, folder)
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return folder


@functools.cache
def reports(who: str, program: str, *callers: str) -> dict[str, dict[str, str]]:
    """What became of each attempt, by caller."""
    folder = readable_copy()
    command = [python_of(who), str(folder / "door_callers.py"), str(folder / "rlhf"), program, *callers]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_S, env={"PATH": os.environ["PATH"]}, **as_user(who)
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def of_group(who: str, caller: str, group: str) -> dict[str, str]:
    report = reports(who, "doors.py", "control", *CALLERS)
    assert report[caller].keys() == report["control"].keys(), report[caller]
    found = {door: end for door, end in report[caller].items() if door.startswith(f"{group}:")}
    assert found
    return found


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("group", GROUPS)
def test_without_a_domain_each_door_is_open(who: str, group: str) -> None:
    """So what follows can fail."""
    closed = MAY_BE_CLOSED | (ROOT_ALONE if who == "user" else set())
    report = of_group(who, "control", group)
    assert {door: end for door, end in report.items() if end != "in"}.keys() <= closed, report


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("group", GROUPS)
def test_each_door_is_closed(who: str, caller: str, group: str) -> None:
    assert "in" not in of_group(who, caller, group).values()


@pytest.mark.parametrize("who", WHO)
def test_honest_programs_work(who: str) -> None:
    """But for `multiprocessing.Lock`, `Queue` and `Pool`, whose locks are in /dev/shm."""
    for report in reports(who, "honest.py", "python", "shell").values():
        assert {name: end for name, end in report.items() if end != "ok"} == {}
        assert len(report) >= 9


def in_fork(work: Callable[[], object]) -> str:
    """What a forked process says of an error; "" if there is none."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__} {getattr(error, 'errno', '')}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


def test_what_would_be_the_17th_layer_is_refused(tmp_path: Path) -> None:
    def nest() -> None:
        for _ in range(17):
            enter_domain(tmp_path, kept=range(3, 64))

    assert in_fork(lambda: enter_domain(tmp_path)) == ""
    assert in_fork(nest).startswith(f"ConfinementError {errno.E2BIG}: ")


def test_no_rule_is_left_out_for_want_of_a_descriptor(tmp_path: Path) -> None:
    def crowded(most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        enter_domain(tmp_path, kept=range(3, most))
        (tmp_path / "own").touch()

    enough = max(map(int, os.listdir("/proc/self/fd"))) + 80
    ends = {in_fork(lambda most=most: crowded(most)).partition(":")[0] for most in range(16, enough)}  # type: ignore[misc]
    assert ends == {f"ConfinementError {errno.EMFILE}", ""}


@pytest.mark.parametrize(
    ("abi", "attempt", "is_allowed"),
    [
        (5, lambda fd, file: os.kill(0, 0), True),  # its own group
        (5, lambda fd, file: os.kill(os.getppid(), 0), False),
        (5, lambda fd, file: os.kill(-1, 0), False),
        (5, lambda fd, file: signal.pidfd_send_signal(fd, 0), False),
        (5, lambda fd, file: os.setsid(), False),
        (5, lambda fd, file: os.setpgid(0, 0), False),
        (5, lambda fd, file: os.truncate(file, 0), True),
        (2, lambda fd, file: os.truncate(file, 0), False),
        (2, lambda fd, file: os.open(file, os.O_RDONLY | os.O_TRUNC), False),
        (2, lambda fd, file: file.write_text("other text"), True),
    ],
)
def test_seccomp_stands_in_for_what_an_older_landlock_does_not_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abi: int, attempt: Callable[[int, Path], object], is_allowed: bool
) -> None:
    real, descriptor, file = confinement._call, os.pidfd_open(os.getpid()), tmp_path / "file"
    file.write_text("text")
    monkeypatch.setattr(
        confinement, "_call", lambda number, *rest: abi if rest == (None, 0, 1) else real(number, *rest)
    )

    def enter_and_attempt() -> None:
        enter_domain(tmp_path, kept=[descriptor, *range(3, 64)])
        attempt(descriptor, file)

    said = in_fork(enter_and_attempt)
    os.close(descriptor)
    assert said == "" if is_allowed else said.startswith("PermissionError 13"), said


def test_around_what_other_users_may_not_read_everything_else_is_granted(tmp_path: Path) -> None:
    for name in ("whole/a/b", "part/open/c", "part/closed/d", "part/mixed/e", "part/mixed/f"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(0o644)
    (tmp_path / "part/closed").chmod(0o750)
    (tmp_path / "part/mixed/f").chmod(0o640)
    (tmp_path / "part/link").symlink_to("closed/d")
    granted = {str(Path(path).relative_to(tmp_path)) for path in _readable_by_all(str(tmp_path))}
    assert granted == {"whole", "part/open", "part/mixed/e"}
    assert _readable_by_all(str(tmp_path / "whole")) == [str(tmp_path / "whole")]
