"""The heartbeat finds stopped processes, below an actor too, and kills what it is told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
from waiting import eventually

from rlhf.cluster.heartbeat import stopped_processes

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_stopped_processes_are_found_and_killed_and_others_are_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE) as actor:
        assert eventually(lambda: psutil.Process(actor.pid).children())
        (child,) = psutil.Process(actor.pid).children()
        gone = 2**22 - 1  # above the largest process id of this machine, or unused
        assert stopped_processes([actor.pid, gone]) == []
        os.kill(child.pid, signal.SIGSTOP)
        assert eventually(lambda: stopped_processes([actor.pid]) == [child.pid])
        os.kill(child.pid, signal.SIGCONT)
        assert eventually(lambda: stopped_processes([actor.pid], kill=[child.pid]) == [])
        time.sleep(0.1)
        assert child.is_running()
        os.kill(child.pid, signal.SIGSTOP)
        assert eventually(lambda: stopped_processes([actor.pid], kill=[child.pid]))
        assert eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
