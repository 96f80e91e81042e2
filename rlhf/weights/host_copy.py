"""A node's copy of the published weights in host memory, from which all engines of the node load.

On the node of learner rank 0 it is memory that rank 0 has made and writes. On another node the first worker of the
node's first engine makes it, and receives what rank 0 sends; the other workers map it.
"""

from __future__ import annotations

import datetime
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.weights.changes import write_patch
from rlhf.weights.parameters import ParameterMeta, buckets

Message = tuple[int, int]  # number of a bucket, and bytes of a patch of it; 0: the whole bucket


def create_shared_memory(size: int) -> tuple[Tensor, str]:
    """[size] uint8 that other processes of this node can map, and the path where they find it while the tensor lives.

    It belongs to a file without a name, so it disappears with the last process that maps it, however that one ends. It
    counts as shared memory, but is not limited by the size of /dev/shm, which is small in containers.
    """
    descriptor = os.memfd_create("rlhf-weights")
    os.ftruncate(descriptor, size)
    pages = _map(descriptor)
    weakref.finalize(pages, os.close, descriptor)
    return torch.frombuffer(pages, dtype=torch.uint8), f"/proc/{os.getpid()}/fd/{descriptor}"


def open_shared_memory(path: str) -> Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(_map(descriptor), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def gloo_group(info: Mapping[str, Any], rank: int) -> dist.ProcessGroup:
    """Join the transfer group outside torch's default group, which belongs to the learners (or to vLLM)."""
    timeout, size = datetime.timedelta(seconds=info["timeout_s"]), info["world_size"]
    store = dist.TCPStore(info["host"], info["port"], size, rank == 0, timeout, wait_for_workers=False)
    group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    return group


def broadcast(group: dist.ProcessGroup, own: Tensor) -> None:
    """Send bytes from rank 0 of a group to the others; not every build of gloo has bfloat16."""
    group.broadcast([own], dist.BroadcastOptions()).wait()


class HostCopy:
    """A worker's view of its node's copy.

    `info`: the argument of init_weight_transfer_engine. Without `memory` this worker makes the copy, and receives as
    `rank` of the transfer group.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._buckets = buckets(ParameterMeta(name, dtype, tuple(shape)) for name, dtype, shape in info["parameters"])
        self._group: dist.ProcessGroup | None = None
        self.path = ""  # where the other workers of the node find the copy; empty if another process has made it
        if info["memory"]:
            self._memory = open_shared_memory(info["memory"])
        else:
            self._memory, self.path = create_shared_memory(self._buckets[-1].end)
            self._group = gloo_group(info, info["rank"])

    def _bytes(self, number: int) -> Tensor:
        bucket = self._buckets[number]
        return self._memory[bucket.start : bucket.end]

    def receive(self, messages: Sequence[Message]) -> bool:
        """Receive buckets and patches in the order in which they are sent; False if a patch was damaged on its way."""
        assert self._group is not None, "another process has made this copy"
        intact = True
        for number, size in messages:
            if not size:
                broadcast(self._group, self._bytes(number))
                continue
            patch = torch.empty(size, dtype=torch.uint8)
            broadcast(self._group, patch)
            intact = write_patch(self._buckets[number], self._bytes(number), patch) and intact
        return intact

    def tensors(self, names: Sequence[str] | None) -> Iterator[tuple[str, Tensor]]:
        """These tensors, or all if None; they do not change until the next transfer."""
        chosen = None if names is None else set(names)
        for number, bucket in enumerate(self._buckets):
            for name, tensor in bucket.tensors_in(self._bytes(number)):
                if chosen is None or name in chosen:
                    yield name, tensor
