"""Work that a user's text asks for ends the program with one message, whatever it does, if it never ends."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

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
    began = time.monotonic()
    limit_s = "0.4" if "0.4 s" in why else "60"
    done = subprocess.run([sys.executable, "-c", PROGRAM, work, limit_s], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"error: key=value: the work {why}. Do less.\n"
    assert time.monotonic() - began < 50


def test_work_that_ends_in_time_is_not_touched_and_leaves_no_process_behind() -> None:
    work = "import os; print(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read())"
    half_written = "limit.HEAD.pack_into(limit._shared, 0, 1.0, 0.0, 0, 0)"
    after = f"{PROGRAM}\n{half_written}\ntime.sleep(0.8)\nwith limit.limited('again'): pass\nprint('done')"
    done = subprocess.run([sys.executable, "-c", after, work, "0.4"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    watcher, last = done.stdout.split("\n", 1)
    assert last.strip() == "done"
    for _ in range(100):
        if not _is_watcher(watcher.strip()):
            return
        time.sleep(0.1)
    pytest.fail(f"process {watcher} is still there")


def _is_watcher(process: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline") as file:
            return "limit.py" in file.read()
    except OSError:
        return False
