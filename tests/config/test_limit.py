"""Work that a user's text asks for ends the program with one message if it never ends."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow

ENDLESS = {
    "a loop": ("while True: pass", "did not end within 0.4 s"),
    "a text that doubles": ("s = 'x' * 1000\nwhile True: s += s", "took more than 0.125 GiB of memory"),
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
THREAD = "import threading; t = threading.Thread(target=lambda: sum(range(5 * 10**7))); t.start(); t.join()"
HONEST = {
    "waiting": "import time; time.sleep(1)",
    "memory of others": "m = __import__('mmap').mmap(-1, 2**28); m.write(bytes(2**28)); time.sleep(0.3); m.close()",
    "a fork": "os.fork() or os._exit(0)",
    "another thread's time": THREAD,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_work_ends_the_program_with_its_name_and_the_limit(name: str) -> None:
    work, why = ENDLESS[name]
    began = time.monotonic()
    limit_s = "0.4" if "0.4 s" in why else "60"
    done = subprocess.run([sys.executable, "-c", PROGRAM, work, limit_s], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: key=value: the work {why}. Do less.\n"
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("name", HONEST)
def test_work_that_is_within_its_limits_is_not_touched(name: str) -> None:
    work = f"import os; {HONEST[name]}"
    done = subprocess.run([sys.executable, "-c", PROGRAM, work, "0.4"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_process_watches_its_own_work() -> None:
    forks = "import os\nif not os.fork():\n    with limit.limited('again: it {}'):\n        while True: pass\n"
    after = f"{PROGRAM}\n{forks}sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    done = subprocess.run([sys.executable, "-c", after, "0", "0.4"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "error: again: it did not end within 0.4 s\n")
