"""The engine's end of the weight transfer on CPU, loaded by vLLM inside each of its workers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise

from rlhf.weights.transfer import Inbox

# gpt-oss fills these layers in its load_weights without their weight loaders: vLLM's layerwise reload does not see it.
FILLED_DIRECTLY = ("GptOssRoutedExperts", "OAIAttention")


@dataclass
class CPUInitInfo(WeightTransferInitInfo):
    host: str
    port: int
    world_size: int
    timeout_s: float
    rank_offset: int
    memory: str
    parameters: list[tuple[str, str, list[int]]]


@dataclass
class CPUUpdateInfo(WeightTransferUpdateInfo):
    bucket: int


class CPUWeightTransferEngine(WeightTransferEngine[CPUInitInfo, CPUUpdateInfo]):
    """Receives buckets from learner rank 0 and loads them through vLLM's layerwise reload.

    A layer is loaded when its last tensor has arrived, so the tensors of a bucket may be read until the update ends.
    """

    init_info_cls = CPUInitInfo
    update_info_cls = CPUUpdateInfo
    inbox: Inbox | None = None

    def init_transfer_engine(self, init_info: CPUInitInfo) -> None:
        self.inbox = Inbox(asdict(init_info), worker=self.parallel_config.rank)

    def start_weight_update(self) -> None:
        self._forget_expert_kernels()
        initialize_layerwise_reload(self.model)
        for layer in self._filled_directly():
            layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))

    def receive_weights(self, update_info: CPUUpdateInfo) -> None:
        assert self.inbox is not None, "init_weight_transfer_engine comes first"
        model: Any = self.model
        model.load_weights(self.inbox.receive(update_info.bucket))

    def finish_weight_update(self) -> None:
        for layer in self._filled_directly():
            layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_heads()

    def _filled_directly(self) -> list[Any]:
        return [layer for layer in self.model.modules() if type(layer).__name__ in FILLED_DIRECTLY]

    def _forget_expert_kernels(self) -> None:
        """Make vLLM build the kernels of experts again: it packs their weights only then, not in an update."""
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None

    def _repack_tied_heads(self) -> None:
        """Rebuild the packed head of tied embeddings, which a reload leaves at its old values on CPU."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        self.inbox = None
