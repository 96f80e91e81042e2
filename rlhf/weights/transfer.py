"""Learner -> engine weights: both ends of our backend for CPU, and vLLM's own backends on GPUs.

    learner rank 0                                  engine actor i, each of its vLLM workers
    --------------                                  ---------------------------------------
    client.start_weight_update()        ----->      initialize_layerwise_reload
    client.update_weights(bucket)       ----->      receive the bucket ...
    its bytes              ===memory/gloo/nccl===>  ... load_weights
    client.finish_weight_update(v)      ----->      what was loaded: every tensor, in every engine?
                                        ----->      finalize_layerwise_reload, version := v

A transfer that fails is not finished: the engines stay paused, and the run ends or starts again.

On CPU the bytes go through memory that both sides map if learner rank 0 and all engines are on one node, else through
gloo. Ranks of the transfer group: 0 is learner rank 0, then the workers of engine 0, of engine 1, ...

vLLM finds `register_with_vllm` through the `vllm.general_plugins` entry point in each of its processes, so the package
has to be installed where an engine runs. Only the functions that talk to vLLM import it: a learner on CPU needs none.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algo.sizes import BUCKET_BYTES
from rlhf.weights.client import EngineClient

BACKEND = "rlhf_cpu"
ALIGNMENT = 64  # bytes; every bucket begins at a multiple of it
# On CPU vLLM's workers busy-wait this long after a message; its own 1 s takes half a core from the learner.
SPIN_S = 0.002
# Then they sleep until a notice, which is lost now and then; they look for themselves so often, vLLM's every 5 s.
LOOK_EVERY_MS = 20

# The engine's ends of the transports, in receivers.py; two of them take the place of vLLM's own.
RECEIVERS = {BACKEND: "CPUReceiver", "nccl": "NCCLReceiver", "ipc": "IPCReceiver"}
WORKER_EXTENSION = "rlhf.weights.receivers.LoadedWeights"  # argument `worker_extension_cls` of every engine


def backend_of(device: str, placement: str) -> str:
    """The transport of a run by the keys of its cluster."""
    return BACKEND if device == "cpu" else "ipc" if placement == "colocated" else "nccl"


@dataclass(frozen=True)
class Rendezvous:
    """The address where the transfer group meets, with a new free port for each group."""

    host: str
    port: int
    world_size: int
    timeout_s: float
    one_node: bool = False  # learner rank 0 and all engines share a node and its memory; on CPU no group is needed then


@dataclass(frozen=True)
class ParameterMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


class ParameterSource(Protocol):
    """What the learner publishes: the list of it, and a stream of whole tensors in the same order.

    Iterating may be a collective, so every rank iterates in step. Tensors with larger elements come first: vLLM packs
    them without gaps, and views a tensor of float32 only at a multiple of 4 bytes.
    """

    def metadata(self) -> list[ParameterMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


# --- buckets: the same cut on both sides, from the metadata alone ---


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters of one type; their bytes begin at `start` of the memory of all buckets."""

    start: int
    parameters: list[ParameterMeta]

    @property
    def end(self) -> int:
        return self.start + sum(meta.bytes for meta in self.parameters)

    def tensors_in(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and its part of the bucket's bytes, uint8 [end - start], not a copy."""
        flat = own.view(self.parameters[0].torch_dtype)
        for meta, part in zip(self.parameters, flat.split([meta.numel for meta in self.parameters]), strict=True):
            yield meta.name, part.view(meta.shape)


def broadcast(group: dist.ProcessGroup, own: Tensor) -> None:
    """Send a bucket's bytes from rank 0 of a group to the others; not every build of gloo has bfloat16."""
    group.broadcast([own], dist.BroadcastOptions()).wait()


def buckets(metadata: Iterable[ParameterMeta], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut the parameters into buckets of at most `bucket_bytes`; a single larger tensor has a bucket of its own."""
    cut: list[Bucket] = []
    filled = 0
    for meta in metadata:
        if not cut or cut[-1].parameters[0].dtype != meta.dtype or filled + meta.bytes > bucket_bytes:
            cut.append(Bucket(-(-cut[-1].end // ALIGNMENT) * ALIGNMENT if cut else 0, []))
            filled = 0
        cut[-1].parameters.append(meta)
        filled += meta.bytes
    return cut


# --- two ways for the bytes on CPU: memory that both sides map, or memory of each side and gloo between them ---


def create_shared_memory(size: int) -> tuple[Tensor, str]:
    """[size] uint8 that other processes of this node can map, and the path where they find it while this one lives.

    It belongs to a file without a name, so it disappears with the last process that maps it, however that one ends. It
    counts as shared memory, but is not limited by the size of /dev/shm, which is small in containers.
    """
    descriptor = os.memfd_create("rlhf-weights")
    os.ftruncate(descriptor, size)
    return _mapped(descriptor), f"/proc/{os.getpid()}/fd/{descriptor}"


def open_shared_memory(path: str) -> Tensor:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _mapped(descriptor)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int) -> Tensor:
    pages = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def gloo_group(info: Mapping[str, Any], rank: int) -> dist.ProcessGroup:
    """Join the transfer group outside torch's default group, which belongs to the learners (or to vLLM)."""
    timeout, size = datetime.timedelta(seconds=info["timeout_s"]), info["world_size"]
    store = dist.TCPStore(info["host"], info["port"], size, rank == 0, timeout, wait_for_workers=False)
    group: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
    return group


class Inbox:
    """An engine worker's end: `info` is what the learner sent through init_weight_transfer_engine."""

    def __init__(self, info: Mapping[str, Any], *, worker: int) -> None:
        self._buckets = buckets(ParameterMeta(name, dtype, tuple(shape)) for name, dtype, shape in info["parameters"])
        self._group: dist.ProcessGroup | None = None
        if info["memory"]:
            self._memory = open_shared_memory(info["memory"])
        else:
            self._memory = torch.empty(self._buckets[-1].end, dtype=torch.uint8)
            self._group = gloo_group(info, info["rank_offset"] + worker)

    def receive(self, number: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a bucket; they do not change until the next weights are sent."""
        bucket = self._buckets[number]
        own = self._memory[bucket.start : bucket.end]
        if self._group is not None:
            broadcast(self._group, own)
        yield from bucket.tensors_in(own)


class CPUSender:
    """The learner's end on CPU. Only rank 0 sends; the others take part in gathering."""

    def __init__(self, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int) -> None:
        self._source, self._client, self._is_sender = source, client, rank == 0
        self._group: dist.ProcessGroup | None = None
        metadata = source.metadata()
        self._buckets = buckets(metadata)
        if not self._is_sender:
            return
        info = vars(rendezvous) | {"rank_offset": 1, "memory": "", "parameters": [astuple(meta) for meta in metadata]}
        if info.pop("one_node"):
            self._memory, info["memory"] = create_shared_memory(self._buckets[-1].end)
            client.init_weight_transfer_engine(info)
            return
        largest = max(bucket.end - bucket.start for bucket in self._buckets)
        self._memory = torch.empty(largest, dtype=torch.uint8)  # one bucket after another is in it
        with ThreadPoolExecutor(max_workers=1) as pool:
            engines_join = pool.submit(client.init_weight_transfer_engine, info)
            self._group = gloo_group(info, 0)
            engines_join.result()

    def send(self, version: int) -> None:
        """Send every parameter as `version`. Called on every learner rank."""
        if not self._is_sender:
            for _ in self._source:
                pass
            return
        self._client.start_weight_update()
        stream = iter(self._source)
        loads = []
        pool = ThreadPoolExecutor(max_workers=1)
        # The engine loads at the same time, and threads that wait for a core cost 20 times more. Measured with two busy
        # cores: to copy 435 MB in 200 tensors takes 2.0 s with two threads per side, 0.08 s with one.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for number, bucket in enumerate(self._buckets):
                start = bucket.start if self._group is None else 0
                own = self._memory[start : start + bucket.end - bucket.start]
                for announced, part in bucket.tensors_in(own):
                    name, tensor = next(stream)
                    assert name == announced, f"the weight stream yielded {name} where {announced} was announced"
                    part.copy_(tensor)
                loads.append(pool.submit(self._client.update_weights, {"bucket": number}))
                if self._group is not None:
                    broadcast(self._group, own)
            assert next(stream, None) is None, "the weight stream goes on after the last announced parameter"
            for load in loads:
                load.result()
        finally:
            torch.set_num_threads(threads)
            pool.shutdown(wait=False)  # an engine that died leaves its call hanging; the error must not wait for it
        self._client.finish_weight_update(str(version))

    def close(self) -> None:
        self._group, self._memory = None, torch.empty(0)


class VLLMSender:
    """vLLM's own trainer end: `nccl` between separate GPUs, `ipc` on shared ones."""

    def __init__(
        self, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int, backend: str
    ) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        for before, meta in itertools.pairwise(source.metadata()):
            larger = meta.torch_dtype.itemsize > before.torch_dtype.itemsize
            assert not larger, f"{meta.name} has larger elements than {before.name} before it"

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(meta.name, meta.torch_dtype, meta.shape) for meta in source.metadata()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(source)

        self._client = client
        if backend == "nccl":
            info: Any = NCCLTrainerInitInfo(
                rank=rank, master_address=rendezvous.host, master_port=rendezvous.port,
                world_size=rendezvous.world_size, packed_buffer_size_bytes=BUCKET_BYTES,
            )  # fmt: skip
        else:
            largest = max(meta.bytes for meta in source.metadata())
            info = IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=max(largest, BUCKET_BYTES))
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())
        # NCCL waits for ever for an engine that has failed, unless the group is given up.
        client.on_failure = self._engine.shutdown

    def send(self, version: int) -> None:
        """Send every parameter as `version`. Called on every learner rank."""
        # vLLM reads the weights on streams of its own, and DeepSpeed's step ends in an all-gather that may still run.
        torch.accelerator.synchronize()
        self._client.version = version
        try:
            self._engine.send_weights()
        except Exception as error:
            if self._client.failure is None:
                raise
            raise self._client.failure from error  # what failed in an engine is the cause of what fails here

    def close(self) -> None:
        self._engine.shutdown()


def make_sender(
    backend: str, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int
) -> CPUSender | VLLMSender:
    """The learner's end of `backend`: rlhf_cpu, nccl or ipc. It connects to the engines, which must be running."""
    client.announced = source.metadata()  # what every transfer brings; one that brings a part will announce that part
    if backend == BACKEND:
        return CPUSender(source, client, rendezvous, rank=rank)
    return VLLMSender(source, client, rendezvous, rank=rank, backend=backend)


def register_with_vllm() -> None:
    """The engine's end, entry point of the plugin: it runs in every vLLM process, more than once in some."""
    gc.freeze()  # imported modules stay
    gc.enable()  # rollout/vllm_process.py stopped it
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rlhf.weights.cpu_kernels import add_adapter_in_two_products, rotate_heads_on_cpu, round_rows_alike

    for name in RECEIVERS.values():
        with contextlib.suppress(ValueError):  # registered by an earlier call
            WeightTransferEngineFactory.register_engine(name, "rlhf.weights.receivers", name)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_EVERY_MS
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
        rotate_heads_on_cpu()
        round_rows_alike()
        add_adapter_in_two_products()
