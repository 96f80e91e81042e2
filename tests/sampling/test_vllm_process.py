"""vLLM's processes begin with `vllm_process`: no garbage collector, which the plug-in starts again, and a title."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import WAIT_S

from rlhf.sampling import vllm_process

CONTEXT = multiprocessing.get_context("spawn")

TITLED = """
import multiprocessing

def show():
    import ray, setproctitle  # Ray sets RAY_CLIENT_MODE
    setproctitle.setproctitle("VLLM::Worker")
    print(open("/proc/self/comm").read().strip(), flush=True)
"""
START = """
import multiprocessing, titled
from rlhf.sampling import vllm_process

vllm_process.run_in_children()
child = multiprocessing.get_context("spawn").Process(target=titled.show)
child.start()
child.join()
"""
LEAVING = """
import os
from multiprocessing import shared_memory
from rlhf.sampling import vllm_process

memory = shared_memory.SharedMemory(create=True, size=1)
path = f"/dev/shm/{memory.name}"
print(os.path.exists(path))
vllm_process.remove_shared_memory()
print(os.path.exists(path))
"""


def report(queue: Any, generations: int) -> None:
    spec = sys.modules["__main__"].__spec__
    queue.put((gc.isenabled(), spec.name if spec else None))
    if generations > 1:
        spawn(queue, generations - 1)


def spawn(queue: Any, generations: int) -> None:
    child = CONTEXT.Process(target=report, args=(queue, generations))
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.private
@pytest.mark.slow
def test_spawned_processes_and_theirs_begin_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    vllm_process.run_in_children()
    queue = CONTEXT.Queue()
    spawn(queue, 2)
    assert [queue.get(timeout=WAIT_S) for _ in range(2)] == [(False, "rlhf.sampling.vllm_process")] * 2
    assert gc.isenabled()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["RAY_CLIENT_MODE", "PATH"])
def test_a_process_has_its_title_though_ray_moves_the_first_variable(tmp_path: Path, first: str) -> None:
    (tmp_path / "titled.py").write_text(TITLED)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    variables = {"RAY_CLIENT_MODE": "0", "PATH": os.environ["PATH"], "PYTHONPATH": paths}
    environment = {first: variables.pop(first), **variables}
    shown = subprocess.run(
        [sys.executable, "-c", START], env=environment, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert shown.stdout == "VLLM::Worker\n", shown.stderr


@pytest.mark.private
@pytest.mark.slow
def test_what_was_in_shared_memory_is_gone_before_ray_can_kill_the_tracker() -> None:
    shown = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert shown.stdout.split() == ["True", "False"], shown.stderr
