"""A machine without GPUs stands in for one with them, so that vLLM's own nccl and ipc transfers run on it.

gloo takes the place of NCCL, memory that both sides map that of CUDA IPC, and streams are recorded: EVENTS has, in
order, what was waited for and what was sent on which stream. Names, buckets, payloads, ranks, calls and their order are
vLLM's and ours. It cannot show that the device obeys the order, that CUDA opens the handles, and how fast it is.

`install` patches a process before either end of a transfer is made in it.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from waiting import WAIT_S

from rlhf.weights.transfer import Bucket, ParameterMeta, SharedMemory

EVENTS: list[str] = []  # of this process


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        EVENTS.append(f"wait for {self.name}")


STREAMS = [Stream("main")]  # the last one is the current one


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    STREAMS.append(stream)
    yield
    STREAMS.pop()


class Communicator:
    """Stands for vLLM's PyNcclCommunicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        wait = datetime.timedelta(seconds=WAIT_S)
        store = dist.TCPStore(host, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, wait)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        EVENTS.append(f"broadcast {tensor.nbytes} on {STREAMS[-1].name}")
        self._group.broadcast([tensor], dist.BroadcastOptions()).wait()

    def destroy(self) -> None:
        pass


class SharedBuffers:
    """Memory of the "device" that another process can open by its handle, a path."""

    def __init__(self) -> None:
        self._paths: dict[int, tuple[str, SharedMemory]] = {}

    def empty(self, size: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        if str(device) != "cuda":
            return torch.empty(size, dtype=dtype, device=device)
        memory, path = SharedMemory.create(size)
        tensor = _bytes(memory, size)
        self._paths[tensor.data_ptr()] = (path, memory)
        return tensor

    def export(self, tensor: torch.Tensor) -> tuple[None, tuple[Any, ...]]:
        """In the places of reduce_tensor's answer; the seventh is the device's number."""
        EVENTS.append(f"export {tensor.nbytes}")
        return None, (None, None, None, None, None, None, 0, self._paths[tensor.data_ptr()][0], tensor.nbytes)

    def open(self, *handle: Any) -> torch.Tensor:
        return _bytes(SharedMemory.open(handle[7]), handle[8])


def _bytes(memory: SharedMemory, size: int) -> torch.Tensor:
    return memory.view(Bucket(0, [ParameterMeta("", "uint8", (size,))]))


class TorchWithSharedMemory:
    """torch as vLLM's packed_tensor sees it."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self.empty = buffers.empty

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Properties:
    def __init__(self, gpu: int) -> None:
        self.uuid = f"GPU-{gpu}"


def install(gpu: int) -> None:
    """Make this process one that has GPU number `gpu`, for the ends of a transfer that it holds."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

    from rlhf.weights.cpu_receiver import CPUReceiver

    sides, buffers, patched = [Stream("side 0"), Stream("side 1")], SharedBuffers(), torch.cuda
    nccl_common.stateless_init_process_group = Communicator
    torch.accelerator.current_device_index = lambda: gpu
    torch.accelerator.synchronize = lambda *_: EVENTS.append("wait for the device")
    patched.stream = on
    patched.current_stream = lambda *_: STREAMS[-1]
    patched.synchronize = torch.accelerator.synchronize
    patched.ipc_collect = lambda: EVENTS.append("collect")
    patched.get_device_properties = lambda _: Properties(gpu)
    packed_tensor._get_streams = lambda _, count: tuple(sides[:count])
    packed_tensor.torch = TorchWithSharedMemory(buffers)
    packed_tensor.reduce_tensor = buffers.export
    reductions.rebuild_cuda_tensor = buffers.open
    for engine in (nccl_engine.NCCLWeightTransferEngine, ipc_engine.IPCWeightTransferEngine):
        finish = engine.finish_weight_update

        def finish_on_cpu(self: Any, finish: Any = finish) -> None:
            finish(self)
            CPUReceiver._repack_tied_heads(self)  # only kernels on CPU keep a packed copy

        engine.finish_weight_update = finish_on_cpu
