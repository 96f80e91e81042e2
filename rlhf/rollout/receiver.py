"""The engine's end of the gloo weight transfer, loaded by vLLM inside each of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlhf.transfer import ParameterMeta, Rendezvous, _broadcast, buckets, gloo_group


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    host: str
    port: int
    tag: str
    world_size: int
    timeout_s: float
    rank_offset: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives flat buckets from learner rank 0 and loads them through vLLM's layerwise reload."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    group: dist.ProcessGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        rendezvous = Rendezvous(
            init_info.host, init_info.port, init_info.tag, init_info.world_size, init_info.timeout_s
        )
        self.group = gloo_group(rendezvous, init_info.rank_offset + self.parallel_config.rank)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self.group is not None, "init_weight_transfer_engine comes first"
        metadata = [
            ParameterMeta(name, dtype, tuple(shape))
            for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True)
        ]
        for bucket in buckets(metadata):
            flat = torch.empty(sum(m.numel for m in bucket), dtype=getattr(torch, bucket[0].dtype))
            _broadcast(self.group, flat)
            pieces = flat.split([m.numel for m in bucket])
            model: Any = self.model
            model.load_weights((m.name, piece.view(m.shape)) for m, piece in zip(bucket, pieces, strict=True))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._repack_tied_heads()

    def _repack_tied_heads(self) -> None:
        """Rebuild the packed head of tied embeddings, which a reload leaves at its old values on CPU."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        self.group = None
