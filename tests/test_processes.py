"""The guard that fails a test which leaves processes behind."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from processes import LOOK_EVERY_S, Watch

LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)  # orphan"], env={})
time.sleep(%s)
"""


def test_an_orphan_without_environment_is_named_and_killed() -> None:
    watch = Watch()
    watch.start()
    subprocess.run([sys.executable, "-c", LEAVES_A_CHILD % (4 * LOOK_EVERY_S)], check=True)
    (left,) = watch.end_what_is_left(grace_s=0.5)
    assert left.endswith("# orphan")
    pid = left.split()[0]
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_ran_before_is_none_of_the_tests_doing() -> None:
    before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        watch = Watch()
        watch.start()
        subprocess.run([sys.executable, "-c", ""], check=True)
        assert watch.end_what_is_left(grace_s=5) == []
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
