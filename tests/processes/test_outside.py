"""The processes below a process, as that process and others see them."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
from waiting import WAIT_S

from rlhf.processes import outside


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def test_what_another_thread_has_started_is_a_child_too() -> None:
    started, seen, may_end = [], threading.Event(), threading.Event()

    def start() -> None:
        started.append(sleeper())
        seen.set()
        may_end.wait()  # its children pass to another thread when it ends

    thread = threading.Thread(target=start)
    thread.start()
    try:
        assert seen.wait(WAIT_S)
        assert started[0].pid in outside.children_of(os.getpid())
    finally:
        may_end.set()
        thread.join()
        started[0].kill()
        started[0].communicate()


def test_a_process_that_may_not_open_the_list_of_its_children_finds_them_among_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.open

    def refused(file: Any, *arguments: Any, **options: Any) -> Any:
        if str(file).endswith("/children"):
            raise PermissionError(file)
        return real(file, *arguments, **options)

    child = sleeper()
    try:
        monkeypatch.setattr(builtins, "open", refused)
        assert child.pid in outside.children_of(os.getpid())
        with pytest.raises(PermissionError):
            outside.children_of(os.getppid())
    finally:
        monkeypatch.undo()
        child.kill()
        child.communicate()
