"""Work that a user's text asks for ends the program with one message, whatever it does, if it never ends."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from waiting import WAIT_S, eventually

from rlhf.config import limit

pytestmark = pytest.mark.slow

ENDLESS = {
    "a loop": ("while True: pass", 2, "did not end within 0.4 s"),
    "a call that holds Python's lock": (
        "a, b = [], []\nfor _ in range(99): a, b = [a, a], [b, b]\na == b", -9, "did not end within 0.4 s"
    ),
    "a text that doubles": ("s = 'x' * 1000\nwhile True: s += s", -9, "took more than 0.125 GiB of memory"),
}  # fmt: skip
PROGRAM = """
import sys, time
from rlhf.config import limit
limit.LIMIT_S, limit.LIMIT_BYTES = float(sys.argv[2]), 2**27
with limit.limited("first: it {}."):
    pass
with limit.limited("key=value: the work {}. Do less."):
    exec(sys.argv[1])
"""


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_ends_the_program_with_its_name_and_the_limit(name: str) -> None:
    work, status, why = ENDLESS[name]
    limit_s = "0.4" if "0.4 s" in why else "60"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, work, limit_s], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"error: key=value: the work {why}. Do less.\n"


THREAD = "import threading; t = threading.Thread(target=lambda: sum(range(5 * 10**7))); t.start(); t.join()"
MAPPED = "m = __import__('mmap').mmap(-1, 2**28); m.write(bytes(2**28)); time.sleep(0.3); m.close()"
HONEST = {
    "waiting": ("0.4", "time.sleep(1)"),
    "memory of others": ("60", MAPPED),
    "a fork": ("0.4", "os.fork() or os._exit(0)"),
    "another thread's time": ("0.4", THREAD),
}


@pytest.mark.parametrize("name", HONEST)
def test_work_that_is_within_its_limits_is_not_touched(name: str) -> None:
    limit_s, work = HONEST[name]
    program = [sys.executable, "-c", PROGRAM, f"import os; {work}", limit_s]
    done = subprocess.run(program, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_half_written_record_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of two pieces of work, as a look between two writes may find them."""
    shared, messages = mmap.mmap(-1, limit.SIZE), list[int]()
    heads = [(os.getppid(), -1e6 - number, 1.0, 0, 2**60, 0) for number in (1, 2, 1, 3, 3)]

    def look(*_: object) -> tuple[list[int], ...]:
        if heads:
            limit.HEAD.pack_into(shared, 0, *heads.pop(0))
        return [0] * bool(messages), [], []

    with monkeypatch.context() as patched:
        patched.setattr(limit, "select", SimpleNamespace(select=look))
        patched.setattr(limit, "os", SimpleNamespace(getppid=lambda: 1, write=lambda *_: messages.append(len(heads))))
        patched.setattr(limit, "_thread_s", lambda *_: 0.0)
        limit._watch(1, shared)
    assert messages == [0]


ENDS = {  # a fork goes on until the test closes its standard input
    "it is killed": "os.kill(os.getpid(), 9)",
    "a fork of it goes on": "os.fork() or sys.stdin.read()",
    "a fork of a thread goes on": "threading.Thread(target=lambda: os.fork() or sys.stdin.read()).start()",
    "it has a session of its own": "os.fork() or os.setsid()",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_watcher_ends_with_its_process(name: str) -> None:
    work = "import os; print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read(), flush=True)"
    after = f"{PROGRAM}\nimport os, threading\nsys.stdin.readline()\n{ENDS[name]}"
    command = [sys.executable, "-c", after, work, "0.4"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdin is not None
        watcher = program.stdout.readline().strip()
        assert eventually(lambda: _is_watcher(watcher))
        program.stdin.write("\n")
        program.stdin.flush()
        program.wait()
        assert eventually(lambda: not _is_watcher(watcher)), f"process {watcher} is still there"


def test_a_watcher_that_somebody_ends_is_started_again() -> None:
    children = "open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read()"
    work = f"import os\nos.kill(int({children}), 9)\nwhile {children}: time.sleep(0.01)"
    after = f"{PROGRAM}\nwith limit.limited('again: it {{}}'):\n    while True: pass"
    done = subprocess.run([sys.executable, "-c", after, work, "0.4"], capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stderr) == (2, "error: again: it did not end within 0.4 s\n")


def _is_watcher(process: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline") as file:
            return "limit.py" in file.read()
    except OSError:
        return False
