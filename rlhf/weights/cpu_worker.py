"""On CPU, the worker of an engine begins as a copy of the engine's core, not with imports of its own.

vLLM spawns it there, since the OpenMP library reads, while it is loaded, to which cores its threads are bound. A worker
of one thread needs no such list: the affinity of its process binds it as well. `import vllm` takes 5 to 10 s of a core.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch


def fork_worker_of_one_thread() -> None:
    """In an engine's core, fork the worker as vLLM does for GPUs if it is the only one and is to have one thread."""
    from vllm.v1.executor import multiproc_executor

    executor: Any = multiproc_executor
    make, context = executor.WorkerProc.make_worker_process, executor.get_mp_context
    if make.__module__ == __name__:
        return

    def make_worker_process(vllm_config: Any, **arguments: Any) -> Any:
        threads = (os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads())  # of the worker, of this process
        listed = os.environ.get("GOMP_CPU_AFFINITY", "").split()  # vLLM's are numbers; others may have ranges
        bound_otherwise = os.environ.keys() & {"KMP_AFFINITY", "OMP_PLACES"} or not all(map(str.isdecimal, listed))
        if vllm_config.parallel_config.local_world_size > 1 or threads != ("1", 1) or bound_otherwise:
            return make(vllm_config=vllm_config, **arguments)
        own_cores = os.sched_getaffinity(0)
        cores = set(map(int, listed))
        executor.get_mp_context = lambda: multiprocessing.get_context("fork")
        os.sched_setaffinity(0, cores or own_cores)
        try:
            return make(vllm_config=vllm_config, **arguments | {"inherited_fds": []})
        finally:
            os.sched_setaffinity(0, own_cores)
            executor.get_mp_context = context

    executor.WorkerProc.make_worker_process = staticmethod(make_worker_process)
