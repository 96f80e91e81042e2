"""Learner -> engine weights: our backend through host memory, and vLLM's own backends on GPUs.

    learner rank 0                                  engine actor i, each of its vLLM workers
    --------------                                  ---------------------------------------
    bytes                    ===memory/gloo===>     the copy of its node: all weights, or what has changed
    client.start_weight_update()        ----->      initialize_layerwise_reload
    client.update_weights(names)        ----->      load_weights from the copy
    client.finish_weight_update(v)      ----->      what was loaded: every tensor, in every engine?
                                        ----->      finalize_layerwise_reload, version := v

With vLLM's backends the bytes come in buckets during update_weights. A transfer that fails is not finished: the engines
stay paused, and the run ends or starts again, with a transfer of everything.

Ours serves CPU, and `weights.transfer=delta` on GPUs. The bytes go through memory that both sides map to engines on the
node of learner rank 0, to other nodes through gloo, once per node: rank 0 of the transfer group is learner rank 0, then
comes the first engine of each other node. Where a layer of vLLM holds several tensors (q, k and v; all experts), a
change of one loads all of them: half a layer would be garbage without an error.

vLLM finds `register_with_vllm` through the `vllm.general_plugins` entry point in each of its processes, so the package
has to be installed where an engine runs. Only the functions that talk to vLLM import it: a learner on CPU needs none.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algo.sizes import BUCKET_BYTES, MOST_CHANGED
from rlhf.config.grpo import GRPOConfig
from rlhf.types import WeightsSent
from rlhf.weights.changes import Changes, write_patch
from rlhf.weights.client import EngineClient, whole_layers
from rlhf.weights.host_copy import Message, broadcast, create_shared_memory, gloo_group
from rlhf.weights.parameters import ParameterSource, buckets

BACKEND = "rlhf_cpu"
# On CPU vLLM's workers busy-wait this long after a message; its own 1 s takes half a core from the learner.
SPIN_S = 0.002
# Then they sleep until a notice, which is lost now and then; they look for themselves so often, vLLM's every 5 s.
LOOK_EVERY_MS = 20

# The engine's ends of the transports, in receivers.py; two of them take the place of vLLM's own.
RECEIVERS = {BACKEND: "CPUReceiver", "nccl": "NCCLReceiver", "ipc": "IPCReceiver"}
WORKER_EXTENSION = "rlhf.weights.receivers.LoadedWeights"  # argument `worker_extension_cls` of every engine


def backend_of(config: GRPOConfig) -> str:
    """The transport of a run."""
    if config.cluster.device == "cpu" or config.sends_changes:
        return BACKEND
    return "ipc" if config.cluster.placement == "colocated" else "nccl"


@dataclass(frozen=True)
class Rendezvous:
    """The address where the transfer group meets, with a new free port for each group."""

    host: str
    port: int
    world_size: int
    timeout_s: float
    node: str = ""  # of learner rank 0
    engine_nodes: tuple[str, ...] = ()  # the node of each engine


class CPUSender:
    """The learner's end of transfers through host memory: into a copy on each node, from which engines load.

    Rank 0 sends. The other ranks take part in gathering, or send rank 0 the changes of their parts.

    `only_changes`: send only the elements that changed since the last transfer. The first transfer, one after a
    failure, and one with more than MOST_CHANGED changes send everything.
    """

    def __init__(
        self,
        source: ParameterSource,
        client: EngineClient,
        rendezvous: Rendezvous,
        *,
        rank: int,
        only_changes: bool = False,
    ) -> None:
        self._source, self._client, self._is_sender = source, client, rank == 0
        self._metadata = source.metadata()
        self._buckets = buckets(self._metadata)
        self._changes = Changes(source, self._buckets) if only_changes else None
        self._complete = False  # whether every copy holds the weights that `_changes` remembers
        self._group: dist.ProcessGroup | None = None
        self._has_copy = rendezvous.node in rendezvous.engine_nodes  # this node has engines, which load from its copy
        if self._is_sender:
            self._connect(rendezvous)

    def _connect(self, rendezvous: Rendezvous) -> None:
        nodes, copies = rendezvous.engine_nodes, {}
        receivers = {node: nodes.index(node) for node in nodes if node != rendezvous.node}  # its first engine
        self._receivers = list(receivers.values())
        info = {
            "host": rendezvous.host, "port": rendezvous.port, "timeout_s": rendezvous.timeout_s,
            "world_size": 1 + len(receivers), "rank": 0, "memory": "",
            "parameters": [astuple(meta) for meta in self._metadata],
        }  # fmt: skip
        if self._has_copy:
            self._memory, copies[rendezvous.node] = create_shared_memory(self._buckets[-1].end)
        else:
            largest = max(bucket.end - bucket.start for bucket in self._buckets)
            self._memory = torch.empty(largest, dtype=torch.uint8)  # one bucket after another is in it
        if receivers:
            ranks = {engine: (info | {"rank": rank},) for rank, engine in enumerate(self._receivers, start=1)}
            with ThreadPoolExecutor(max_workers=1) as pool:
                engines_join = pool.submit(self._client.each, "init_weight_transfer_engine", ranks)
                self._group = gloo_group(info, 0)
                engines_join.result()
            paths = self._client.each("on_workers", dict.fromkeys(self._receivers, ("copy_path",)))
            copies |= zip(receivers, (path for path, *_ in paths), strict=True)
        arguments = {engine: (info | {"memory": copies[node]},) for engine, node in enumerate(nodes)}
        self._client.each("init_weight_transfer_engine", arguments)

    def send(self, version: int) -> WeightsSent | None:
        """Send the current weights to all engines and label them `version`. Every learner rank calls this.

        Returns a summary on rank 0, None on the others.
        """
        if torch.accelerator.is_available():  # DeepSpeed's step ends in an all-gather that may still run
            torch.accelerator.synchronize()
        changes = self._changes
        # rank 0 alone knows whether the engines have loaded the last transfer
        counts = changes.count() if changes is not None and changes.on_all_ranks(self._complete) else None
        share = None if counts is None else int(counts.sum()) / sum(meta.numel for meta in self._metadata)
        self._complete, why, size = False, "", None
        if counts is not None and share is not None and share <= MOST_CHANGED:
            size = self._send_changes(counts)
            why = "" if size is not None else "a patch was damaged on its way"
        elif share is not None:
            why = f"{share:.0%} of the elements have changed"
        names: Sequence[str] | None = None
        if size is None:
            size = self._send_all()
            if self._changes is not None:
                self._changes.remember()
        elif self._is_sender:
            assert counts is not None
            changed = [meta.name for meta, count in zip(self._metadata, counts.sum(0), strict=True) if count]
            names = whole_layers(changed, self._client.proved or ())
        if self._is_sender:
            chosen = None if names is None else set(names)  # None: all; from the copy of each engine's node
            self._client.announced = [meta for meta in self._metadata if chosen is None or meta.name in chosen]
            self._client.start_weight_update()
            self._client.update_weights({"names": names})
            self._client.finish_weight_update(str(version))
        self._complete = True
        return WeightsSent(share, size, why) if self._is_sender else None

    def _send_changes(self, counts: Tensor) -> int | None:
        """Send patches. Returns the bytes sent; None on all ranks if a patch arrived damaged."""
        assert self._changes is not None
        messages, intact = self._changes.messages(counts), True
        with self._receiving(messages) as received:
            for number, patch in self._changes.patches(counts):
                bucket = self._buckets[number]
                if self._has_copy:
                    intact = write_patch(bucket, self._memory[bucket.start : bucket.end], patch) and intact
                if self._group is not None:
                    broadcast(self._group, patch)
        intact = self._changes.on_all_ranks(intact and all(received))
        return sum(size for _, size in messages) if intact else None

    def _send_all(self) -> int:
        """Send every parameter. Returns the bytes sent; 0 on ranks that do not send."""
        stream = iter(self._source)
        if not self._is_sender:
            for _ in stream:
                pass
            return 0
        with self._receiving([(number, 0) for number in range(len(self._buckets))]), one_thread():
            for bucket in self._buckets:
                start = bucket.start if self._has_copy else 0
                memory = self._memory[start : start + bucket.end - bucket.start]
                for announced, part in bucket.tensors_in(memory):
                    name, tensor = next(stream)
                    assert name == announced, f"the weight stream yielded {name} where {announced} was announced"
                    part.copy_(tensor)
                if self._group is not None:
                    broadcast(self._group, memory)
            assert next(stream, None) is None, "the weight stream goes on after the last announced parameter"
        return sum(meta.bytes for meta in self._metadata)

    @contextlib.contextmanager
    def _receiving(self, messages: Sequence[Message]) -> Iterator[list[bool]]:
        """A context in which engines of other nodes receive these messages; afterwards the list has their answers."""
        answers: list[bool] = []
        if self._group is None or not messages:
            yield answers
            return
        calls = dict.fromkeys(self._receivers, ("receive", messages))
        pool = ThreadPoolExecutor(max_workers=1)
        receive = pool.submit(self._client.each, "on_workers", calls)
        try:
            yield answers
            answers += [answer for workers in receive.result() for answer in workers]
        finally:
            pool.shutdown(wait=False)  # an engine that died leaves its call hanging; the error must not wait for it

    def close(self) -> None:
        self._group, self._memory = None, torch.empty(0)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """For copies while other processes work: threads that wait for a core cost 20 times more.

    Measured with two busy cores: to copy 435 MB in 200 tensors takes 2.0 s with two threads per side, 0.08 s with one.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
            raise self._client.failure from error  # the engine's error is the cause of this one

    def close(self) -> None:
        self._engine.shutdown()


def make_sender(
    backend: str,
    source: ParameterSource,
    client: EngineClient,
    rendezvous: Rendezvous,
    *,
    rank: int,
    only_changes: bool = False,
) -> CPUSender | VLLMSender:
    """The learner's end of `backend`: rlhf_cpu, nccl or ipc. It connects to the engines, which must be running."""
    if backend == BACKEND:
        return CPUSender(source, client, rendezvous, rank=rank, only_changes=only_changes)
    client.announced = source.metadata()  # every transfer sends all tensors
    return VLLMSender(source, client, rendezvous, rank=rank, backend=backend)


def register_with_vllm() -> None:
    """The entry point of our plugin for vLLM. It runs in every vLLM process, in some more than once."""
    gc.freeze()  # imported modules stay
    gc.enable()  # sampling/vllm_process.py stopped it
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rlhf.weights.cpu_kernels import add_adapter_in_two_products, rotate_heads_on_cpu, round_rows_alike
    from rlhf.weights.cpu_worker import fork_worker_of_one_thread

    for name in RECEIVERS.values():
        with contextlib.suppress(ValueError):  # registered by an earlier call
            WeightTransferEngineFactory.register_engine(name, "rlhf.weights.receivers", name)
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = LOOK_EVERY_MS
    if current_platform.is_cpu():
        shm_broadcast.SpinCondition.__init__.__defaults__ = (SPIN_S,)
        rotate_heads_on_cpu()
        round_rows_alike()
        add_adapter_in_two_products()
        fork_worker_of_one_thread()
