"""The engine's ends of all transports; each worker keeps an account of the transfer, tensor by tensor.

A tensor that is lost on its way, or that vLLM's loader skips, would leave old values in a layer, and vLLM only warns
about a layer that got nothing. The account is made from shapes alone. The learner reads it through `LoadedWeights` and
compares it with what it has announced, before the update is finished.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload, layerwise
from vllm.platforms import current_platform

from rlhf.algo.lora import A, B
from rlhf.weights.adapter import layer_name, peft_name
from rlhf.weights.client import Loaded
from rlhf.weights.host_copy import HostCopy, Message

# gpt-oss fills these layers in its load_weights without their weight loaders: vLLM's layerwise reload does not see it.
FILLED_DIRECTLY = ("GptOssRoutedExperts", "OAIAttention")
layerwise.logger.setLevel(logging.ERROR)  # it warns of each layer that got nothing; the account knows which should have


class Accounted:
    """A mixin for receiving ends of vLLM. `loaded` is the account of the current transfer.

    vLLM's layerwise reload counts the elements that the weight loaders of a layer copy. A model takes its tensors from
    an iterator, one after another, so elements that are counted before it asks for the next tensor belong to the last.
    """

    model: Any

    def start_weight_update(self) -> None:
        self.loaded: Loaded = {}
        super().start_weight_update()  # type: ignore[misc]
        # id(tensor) -> (layer number, tensor); keeping the tensor stops Python from reusing its id
        self._layers = {
            id(tensor): (number, tensor)
            for number, layer in enumerate(self.model.modules())
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        }
        # The reload moves parameters to `meta` and counts elements copied there, except for a few that stay in place.
        # A bias always stays, and is counted.
        self._loads_in_place = any(
            not tensor.is_meta and name != "bias"
            for layer in self.model.modules()
            for name, tensor in layer.named_parameters(recurse=False)
        )

    def receive_weights(self, update_info: Any) -> None:
        with self._counting():
            super().receive_weights(update_info)  # type: ignore[misc]

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        model = self.model
        load, elements_of = model.load_weights, layerwise.get_numel_loaded
        in_place = CopiedInPlace() if self._loads_in_place else None
        latest = [0, 0]

        def one_by_one(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            nonlocal latest
            for name, tensor in weights:
                latest = self.loaded.setdefault(name, [0, 0])
                latest[0] += tensor.nbytes
                before = in_place.elements if in_place else 0
                yield name, tensor
                if in_place and not latest[1]:
                    latest[1] = in_place.elements - before

        def counted(weight_loader: Callable[..., Any], args: Any) -> tuple[int, object]:
            elements, value = elements_of(weight_loader, args)
            latest[1] += elements
            number, _ = self._layers.get(id(next(iter(args.arguments.values()))), (None, None))
            if number is not None and number not in latest[2:]:
                latest.append(number)
            return elements, value

        with (
            mock.patch.object(layerwise, "get_numel_loaded", counted),
            mock.patch.object(model, "load_weights", lambda weights: load(one_by_one(weights))),
            in_place or contextlib.nullcontext(),
        ):
            yield


class CopiedInPlace(TorchDispatchMode):
    """Counts the elements that are copied into real memory, not into parameters that the reload has put on `meta`."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and not args[0].is_meta:
            self.elements += args[0].numel()
        return function(*args, **(kwargs or {}))


@dataclass
class CPUInitInfo(WeightTransferInitInfo):
    host: str
    port: int
    world_size: int
    timeout_s: float
    rank: int
    memory: str
    parameters: list[tuple[str, str, list[int]]]


@dataclass
class CPUUpdateInfo(WeightTransferUpdateInfo):
    names: list[str] | None


class CPUWeightTransferEngine(WeightTransferEngine[CPUInitInfo, CPUUpdateInfo]):
    """Loads weights from the node's copy in host memory through vLLM's layerwise reload, on CPU or GPU.

    A layer is loaded when its last tensor has come, so the copy may be read until the update ends.
    """

    init_info_cls = CPUInitInfo
    update_info_cls = CPUUpdateInfo
    copy: HostCopy | None = None

    def init_transfer_engine(self, init_info: CPUInitInfo) -> None:
        """One worker of the node makes the copy and joins the transfer group; then all are told where it is."""
        made_here = self.copy is not None and self.copy.path == init_info.memory
        if made_here if init_info.memory else self.parallel_config.rank:
            return
        self.copy = None  # freed first
        self.copy = HostCopy(asdict(init_info))

    def start_weight_update(self) -> None:
        self._kernels = {}
        if current_platform.is_cpu():  # vLLM packs the weights of experts only where it builds their kernels
            methods: list[Any] = [getattr(module, "quant_method", None) for module in self.model.modules()]
            self._kernels = {method: method.moe_kernel for method in methods if hasattr(method, "moe_kernel")}
        for method in self._kernels:
            method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        for layer in self._filled_directly():
            layerwise.materialize_layer(layer, layerwise.get_layerwise_info(layer))

    def receive_weights(self, update_info: CPUUpdateInfo) -> None:
        assert self.copy is not None, "init_weight_transfer_engine comes first"
        model: Any = self.model
        model.load_weights(self.copy.tensors(update_info.names))

    def finish_weight_update(self) -> None:
        for layer in self._filled_directly():
            layerwise._layerwise_process(layer, layerwise.get_layerwise_info(layer))
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self._kernels.items():
            method.moe_kernel = method.moe_kernel or kernel  # of experts that have not changed
        if current_platform.is_cpu():
            self._repack_tied_heads()

    def _filled_directly(self) -> list[Any]:
        return [layer for layer in self.model.modules() if type(layer).__name__ in FILLED_DIRECTLY]

    def _repack_tied_heads(self) -> None:
        """Rebuild the packed head of tied embeddings, which a reload leaves at its old values on CPU."""
        for module in self.model.modules():
            if isinstance(module, VocabParallelEmbedding):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)

    def shutdown(self) -> None:
        self.copy = None


class CPUReceiver(Accounted, CPUWeightTransferEngine):
    """Ours, through host memory."""


class NCCLReceiver(Accounted, NCCLWeightTransferEngine):
    """vLLM's receiving end between separate GPUs; where an engine was replaced, it joins another group."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()  # the former communicator, which vLLM would leave behind with its memory and connections
        super().init_transfer_engine(init_info)


class IPCReceiver(Accounted, IPCWeightTransferEngine):
    """vLLM's receiving end on shared GPUs."""


class LoadedWeights:
    """An extension of vLLM's workers."""

    weight_transfer_engine: Any
    model_runner: Any

    def loaded_weights(self) -> Loaded:
        """The account of the transfer that is under way."""
        return self.weight_transfer_engine.loaded

    def copy_path(self) -> str:
        """Where other workers of the node find the copy that this worker has made; empty if it has made none."""
        copy = self.weight_transfer_engine.copy
        return copy.path if copy else ""

    def receive(self, messages: Sequence[Message]) -> bool:
        """Receive into the node's copy, which this worker has made; False if a patch was damaged on its way."""
        copy = self.weight_transfer_engine.copy
        return not copy.path or copy.receive(messages)

    def adapter_problem(self, file: str) -> str:
        """Why the slot does not hold exactly the adapter of a file, bit for bit; empty if it does.

        vLLM drops layers that it does not know, and pads a tensor that is too small, without a message.
        """
        adapter = load_file(file)
        slots = dict(_slots(self.model_runner.lora_manager._adapter_manager))
        layers = dict.fromkeys(map(layer_name, adapter))
        if unknown := [name for name in layers if name not in slots]:
            return f"the engine has no layer {unknown[0]} for an adapter; it has such as {next(iter(slots), None)}"
        for layer, pair in slots.items():
            for name, slot in zip((A, B), pair, strict=True):
                sent = adapter.get(peft_name(f"{layer}.{name}"), slot.new_zeros(0, 0)).to(slot.device)
                sizes = list(zip(sent.shape, slot.shape, strict=True))
                layer_sizes, rank_sizes = sizes[::-1] if name == A else sizes  # the slot may have a higher rank
                if sent.numel() and (layer_sizes[0] != layer_sizes[1] or rank_sizes[0] > rank_sizes[1]):
                    return f"{layer}.{name} has the shape {list(sent.shape)}, and its slot {list(slot.shape)}"
                expected = torch.zeros_like(slot)
                expected[: sent.shape[0], : sent.shape[1]] = sent
                if not torch.equal(expected, slot):
                    return f"the slot of {layer}.{name} holds other values than were sent"
        return ""


def _slots(manager: Any) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Each layer of the model that may have an adapter, and its slot: A [r, in] and B [out, r]."""
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if len(parts) == len(layer.lora_a_stacked):  # else vLLM splits one layer of the learner
            for part, a, b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
                yield part, (a[0, 0], b[0, 0])
