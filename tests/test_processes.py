"""The guard that fails a test which leaves processes behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import Watch, all_processes, running
from waiting import eventually

pytestmark = pytest.mark.slow

LEAVES_A_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)  # orphan"], env={})
sys.stdin.read()
"""


def test_an_orphan_without_environment_is_named_and_killed() -> None:
    watch = Watch()
    watch.start()
    parent = subprocess.Popen([sys.executable, "-c", LEAVES_A_CHILD], stdin=subprocess.PIPE)
    assert eventually(lambda: any(command.endswith("# orphan") for command in running(set(watch.noted)).values()))
    parent.communicate()
    (left,) = watch.end_what_is_left(grace_s=0.5)
    assert left.endswith("# orphan")
    pid = left.split()[0]
    assert eventually(lambda: pid not in {str(process.pid) for process in running(all_processes())})


def test_what_ran_before_is_none_of_the_tests_doing() -> None:
    before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    try:
        watch = Watch()
        watch.start()
        subprocess.run([sys.executable, "-c", ""], check=True)
        assert watch.end_what_is_left(grace_s=60) == []
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
