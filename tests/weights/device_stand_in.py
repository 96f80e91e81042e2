"""A machine without GPUs stands in for one with them, so that vLLM's own nccl and ipc transfers run on it.

gloo takes the place of NCCL, memory that both sides map that of CUDA IPC, and streams are recorded: EVENTS has, in
order, what was waited for and what was sent on which stream. Names, buckets, payloads, ranks, calls and their order are
vLLM's and ours. It cannot show that the device obeys the order, that CUDA opens the handles, and how fast it is.

`install` patches a process before either end of a transfer is made in it.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from waiting import WAIT_S

from rlhf.weights.host_copy import create_shared_memory, open_shared_memory

EVENTS: list[str] = []  # of this process, but for those of a thread that waits for engines


def record(event: str) -> None:
    if threading.current_thread() is threading.main_thread():
        EVENTS.append(event)


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        record(f"wait for {self.name}")


STREAMS = [Stream("main")]  # the last one is the current one


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    STREAMS.append(stream)
    yield
    STREAMS.pop()


class Communicator:
    """Stands for vLLM's PyNcclCommunicator. As with NCCL, a broadcast waits for all receivers, until it is aborted."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        wait = datetime.timedelta(seconds=WAIT_S)
        self._store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
        self._group: Any = dist.ProcessGroupGloo(self._store, rank, world_size, wait)
        self._rank, self._receivers, self._broadcasts = rank, world_size - 1, 0
        self._aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        record(f"broadcast {tensor.nbytes} on {STREAMS[-1].name}")
        self._broadcasts += 1
        ready = f"ready for broadcast {self._broadcasts}"
        if self._rank == src:
            self._wait_for_receivers(ready)
        else:
            self._store.add(ready, 1)
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def _wait_for_receivers(self, ready: str) -> None:
        end = time.monotonic() + WAIT_S
        while self._store.add(ready, 0) < self._receivers:
            if self._aborted.wait(0.001):
                raise RuntimeError("the group was aborted")
            assert time.monotonic() < end, "a receiver does not come"

    def destroy(self) -> None:
        self._aborted.set()


class SharedBuffers:
    """Memory of the "device" that another process can open by its handle, a path."""

    def __init__(self) -> None:
        self._paths: dict[int, str] = {}

    def empty(self, size: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if str(device) != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        tensor, path = create_shared_memory(size)
        self._paths[tensor.data_ptr()] = path
        return tensor

    def export(self, tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        """In the places of reduce_tensor's answer; the seventh is the device's number."""
        record(f"export {tensor.nbytes}")
        return None, (None, None, None, None, None, None, 0, self._paths[tensor.data_ptr()], tensor.nbytes)

    def open(self, *handle: Any) -> torch.Tensor:
        return open_shared_memory(handle[7])[: handle[8]]


class TorchWithSharedMemory:
    """torch as vLLM's packed_tensor sees it."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.empty = buffers.empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Properties:
    def __init__(self, gpu: int) -> None:
        self.uuid = f"GPU-{gpu}"


def install(gpu: int, patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make this process one that has GPU number `gpu`, for the ends of a transfer that it holds."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

    from rlhf.weights.receivers import CPUWeightTransferEngine

    sides, buffers = [Stream("side 0"), Stream("side 1")], SharedBuffers()

    def synchronize(*_: Any) -> None:
        record("wait for the device")

    patch(nccl_common, "stateless_init_process_group", Communicator)
    patch(torch.accelerator, "current_device_index", lambda: gpu)
    patch(torch.accelerator, "synchronize", synchronize)
    patch(torch.cuda, "synchronize", synchronize)
    patch(torch.cuda, "stream", on)
    patch(torch.cuda, "current_stream", lambda *_: STREAMS[-1])
    patch(torch.cuda, "ipc_collect", lambda: record("collect"))
    patch(torch.cuda, "get_device_properties", lambda _: Properties(gpu))
    patch(packed_tensor, "_get_streams", lambda _, count: tuple(sides[:count]))
    patch(packed_tensor, "torch", TorchWithSharedMemory(buffers))
    patch(packed_tensor, "reduce_tensor", buffers.export)
    patch(reductions, "rebuild_cuda_tensor", buffers.open)
    for engine in (nccl_engine.NCCLWeightTransferEngine, ipc_engine.IPCWeightTransferEngine):

        def finish_on_cpu(self: Any, finish: Any = engine.finish_weight_update) -> None:
            finish(self)
            CPUWeightTransferEngine._repack_tied_heads(self)  # only kernels on CPU keep a packed copy

        patch(engine, "finish_weight_update", finish_on_cpu)
