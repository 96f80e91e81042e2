"""vLLM's processes begin with `vllm_process`, without Python's garbage collector, which the plug-in starts again."""

from __future__ import annotations

import gc
import multiprocessing
import sys
from typing import Any

import pytest

from rlhf.rollout import vllm_process

CONTEXT = multiprocessing.get_context("spawn")


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


@pytest.mark.slow
def test_spawned_processes_and_theirs_begin_without_the_garbage_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    vllm_process.run_in_children()
    queue = CONTEXT.Queue()
    spawn(queue, 2)
    assert [queue.get(timeout=60) for _ in range(2)] == [(False, "rlhf.rollout.vllm_process")] * 2
    assert gc.isenabled()
