"""Learner -> engine weights: both ends of our gloo backend, and vLLM's own backends on GPUs.

    learner rank 0                                  engine actor i, each of its vLLM workers
    --------------                                  ---------------------------------------
    client.start_weight_update()        ----->      initialize_layerwise_reload
    client.update_weights(names, ...)   ----->      receive buckets ...
    broadcast buckets            ===gloo/nccl===>   ... load_weights
    client.finish_weight_update(v)      ----->      finalize_layerwise_reload, version := v

Ranks of the transfer group: 0 is learner rank 0, then the workers of engine 0, of engine 1, ...

vLLM finds `register_with_vllm` through the `vllm.general_plugins` entry point in each of its processes, so the package
has to be installed where an engine runs. Only the functions that talk to vLLM import it: a learner on CPU needs none.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "rlhf_gloo"
BUCKET_BYTES = 256 * 2**20  # bytes broadcast at once; bounds the extra memory on both sides
SPIN_S = 0.002  # vLLM's workers busy-wait this long after a message; its own 1 s takes half a core from the learner


@dataclass(frozen=True)
class Rendezvous:
    """Where the transfer group meets; a new port or tag for each group that is built."""

    host: str
    port: int
    tag: str
    world_size: int
    timeout_s: float


@dataclass(frozen=True)
class ParameterMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class ParameterSource(Protocol):
    """The learner's weights: what will be sent, and a stream of whole tensors in the same order.

    Iterating may be a collective (ZeRO-3 gathers), so every learner rank iterates in step.
    """

    def metadata(self) -> list[ParameterMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class EngineClient:
    """The control plane: vLLM's four weight-update calls, made on every engine at once and waited for.

    `call(engine_index, method, *args)` starts a call on one engine and returns a function that waits for it.
    """

    def __init__(self, call: Callable[..., Callable[[], Any]], *, engines: int, workers_per_engine: int) -> None:
        self._call = call
        self._engines = engines
        self._workers = workers_per_engine
        self.version = 0

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        waits = [self._call(i, method, *arguments[i]) for i in range(self._engines)]
        for wait in waits:
            wait()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Give every engine its own place in the group: workers of engine i start at rank 1 + i x workers."""
        infos = []
        for i in range(self._engines):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] = 1 + i * self._workers
            infos.append((info,))
        self._all("init_weight_transfer_engine", infos)

    def start_weight_update(self) -> None:
        self._all("start_weight_update", [()] * self._engines)

    def update_weights(self, update_info: Any) -> None:
        self._all("update_weights", [(update_info,)] * self._engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update", [(weight_version or str(self.version),)] * self._engines)


class WeightSender(Protocol):
    """The learner's end; every rank holds one, rank 0 sends."""

    def send(self, version: int) -> None: ...

    def close(self) -> None: ...


# --- buckets: the same cut on both sides, from the metadata alone ---


def buckets(metadata: Iterable[ParameterMeta], bucket_bytes: int = BUCKET_BYTES) -> list[list[ParameterMeta]]:
    """Cut the parameters into consecutive runs of one dtype and at most `bucket_bytes` (one tensor may exceed it)."""
    runs: list[list[ParameterMeta]] = []
    filled = 0
    for meta in metadata:
        size = meta.numel * getattr(torch, meta.dtype).itemsize
        if not runs or runs[-1][0].dtype != meta.dtype or filled + size > bucket_bytes:
            runs.append([])
            filled = 0
        runs[-1].append(meta)
        filled += size
    return runs


def gloo_group(rendezvous: Rendezvous, rank: int) -> dist.ProcessGroup:
    """Join the transfer group outside torch's default group, which belongs to the learners (or to vLLM)."""
    timeout = datetime.timedelta(seconds=rendezvous.timeout_s)
    store = dist.TCPStore(
        rendezvous.host, rendezvous.port, rendezvous.world_size, is_master=rank == 0, timeout=timeout,
        wait_for_workers=False,
    )  # fmt: skip
    prefixed = dist.PrefixStore(rendezvous.tag, store)
    group: Any = dist.ProcessGroupGloo(prefixed, rank, rendezvous.world_size, timeout)
    return group


def _broadcast(group: dist.ProcessGroup, tensor: Tensor) -> None:
    # gloo has no bfloat16 on every build: the bytes are what travels
    group.broadcast([tensor.view(torch.uint8)], dist.BroadcastOptions()).wait()


class GlooSender:
    """The learner's end of the gloo backend. Only rank 0 is in the group; the others take part in gathering."""

    def __init__(self, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int) -> None:
        self._source = source
        self._client = client
        self._is_sender = rank == 0
        self._group: dist.ProcessGroup | None = None
        if self._is_sender:
            info = {
                "host": rendezvous.host,
                "port": rendezvous.port,
                "tag": rendezvous.tag,
                "world_size": rendezvous.world_size,
                "timeout_s": rendezvous.timeout_s,
                "rank_offset": 1,
            }
            with ThreadPoolExecutor(max_workers=1) as pool:
                engines_join = pool.submit(client.init_weight_transfer_engine, info)
                self._group = gloo_group(rendezvous, 0)
                engines_join.result()

    def send(self, version: int) -> None:
        """Send every parameter as `version`. Called on every learner rank."""
        if not self._is_sender:
            for _ in self._source:
                pass
            return
        metadata = self._source.metadata()
        self._client.start_weight_update()
        update = {
            "names": [m.name for m in metadata],
            "dtypes": [m.dtype for m in metadata],
            "shapes": [list(m.shape) for m in metadata],
        }
        pool = ThreadPoolExecutor(max_workers=1)
        try:
            engines_load = pool.submit(self._client.update_weights, update)
            self._broadcast_all(metadata)
            engines_load.result()
        finally:
            pool.shutdown(wait=False)  # an engine that died leaves its call hanging; the error must not wait for it
        self._client.finish_weight_update(str(version))

    def _broadcast_all(self, metadata: list[ParameterMeta]) -> None:
        assert self._group is not None
        stream = iter(self._source)
        for bucket in buckets(metadata):
            flat = torch.empty(sum(m.numel for m in bucket), dtype=getattr(torch, bucket[0].dtype))
            offset = 0
            for meta in bucket:
                name, tensor = next(stream)
                assert name == meta.name, f"the weight stream yielded {name} where {meta.name} was announced"
                flat[offset : offset + meta.numel].copy_(tensor.reshape(-1))
                offset += meta.numel
            _broadcast(self._group, flat)
        assert next(stream, None) is None, "the weight stream goes on after the last announced parameter"

    def close(self) -> None:
        self._group = None


class VLLMSender:
    """vLLM's own trainer end: `nccl` between separate GPUs, `ipc` on shared ones."""

    def __init__(
        self, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int, backend: str
    ) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(m.name, getattr(torch, m.dtype), m.shape) for m in source.metadata()]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(source)

        self._client = client
        info: Any
        match backend:
            case "nccl":
                info = NCCLTrainerInitInfo(
                    rank=rank,
                    master_address=rendezvous.host,
                    master_port=rendezvous.port,
                    world_size=rendezvous.world_size,
                )
            case "ipc":
                info = IPCTrainerInitInfo(rank=rank, packed=True)
            case _:
                raise AssertionError(backend)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source())

    def send(self, version: int) -> None:
        self._client.version = version
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


def make_sender(
    backend: str, source: ParameterSource, client: EngineClient, rendezvous: Rendezvous, *, rank: int
) -> WeightSender:
    """The learner's end of `backend`: rlhf_gloo, nccl or ipc. Joins the group; the engines must be up."""
    if backend == BACKEND:
        return GlooSender(source, client, rendezvous, rank=rank)
    return VLLMSender(source, client, rendezvous, rank=rank, backend=backend)


# --- the engine's end ---


def register_with_vllm() -> None:
    """Entry point of the plugin: runs in every vLLM process, more than once in some."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rlhf.rollout.receiver", "GlooReceiver")
    shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
