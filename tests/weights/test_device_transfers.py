"""vLLM's own nccl and ipc transfers, both ends in this process on a stand-in for the device: payload and order."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import device_stand_in
import pytest
import torch
from device_stand_in import EVENTS, record
from test_transfer import SHAPES, Weights
from torch import Tensor
from waiting import WAIT_S, free_port

from rlhf.weights import transfer
from rlhf.weights.transfer import EngineClient, Rendezvous, make_sender


class Model(torch.nn.Module):
    """Keeps what it is given to load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        record(f"load {' '.join(name for name, _ in weights)}")
        self.loaded |= dict(weights)


class RecordedWeights(Weights):
    def __init__(self, seed: int) -> None:
        """Of larger elements first, as vLLM wants them."""
        super().__init__(seed)
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: -item[1].itemsize))

    def __iter__(self) -> Any:
        for name, tensor in super().__iter__():
            record(f"read {name}")
            yield name, tensor


def worker_of(backend: str, model: Model) -> Any:
    """vLLM's receiving end; of an engine there is only what it reads."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu"), model
    )


def calls_to(worker: Any) -> Callable[..., Callable[[], Any]]:
    def call(_: int, method: str, *arguments: Any) -> Callable[[], Any]:
        record(method)
        match method:
            case "init_weight_transfer_engine":
                worker.init_transfer_engine(worker.parse_init_info(*arguments))
            case "finish_weight_update":
                worker.finish_weight_update()
            case _:
                getattr(worker, method)(*arguments)
        return lambda: record(f"end of {method}")

    return call


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_payload_buckets_and_order_of_synchronization(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device_stand_in.install(0, monkeypatch.setattr)
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 48)
    source, model = RecordedWeights(0), Model()
    client = EngineClient(calls_to(worker_of(backend, model)), engines=1, workers_per_engine=1)
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S)
    sender = make_sender(backend, source, client, rendezvous, rank=0)
    for seed in (1, 2):
        source.tensors = RecordedWeights(seed).tensors
        EVENTS.clear()
        sender.send(seed)
        assert model.loaded.keys() == SHAPES.keys()
        assert all(torch.equal(model.loaded[name], tensor) for name, tensor in source.tensors.items())
        check = order_of_nccl if backend == "nccl" else order_of_ipc
        check(list(EVENTS))
    sender.close()


# What the weights have, in bytes: norm 4, embed 42, layer.weight 10, head 32. DeepSpeed's step is waited for first.


def order_of_nccl(events: list[str]) -> None:
    """A bucket ends with the tensor that overfills it; the engines load in another thread."""
    assert events == [
        "wait for the device", "start_weight_update", "end of start_weight_update",
        "wait for side 0", "read norm", "read embed", "read layer.weight", "broadcast 56 on side 0",
        "wait for side 1", "read head", "broadcast 32 on side 1",
        "wait for side 0", "wait for side 0", "wait for side 1",
        "finish_weight_update", "end of finish_weight_update",
    ]  # fmt: skip


def order_of_ipc(events: list[str]) -> None:
    """One buffer: it is full when the engines are called, and filled again when they have answered."""
    answered = ["wait for the device", "end of update_weights", "collect"]  # the engine waits for its copies
    assert events == [
        "wait for the device", "start_weight_update", "end of start_weight_update", "export 48",
        "read norm", "read embed", "read layer.weight", "wait for main", "update_weights", "load norm embed", *answered,
        "read head", "wait for main", "update_weights", "load layer.weight head", *answered,
        "finish_weight_update", "end of finish_weight_update", "collect",
    ]  # fmt: skip


def test_a_rank_that_does_not_send_waits_for_the_update_too_before_it_takes_part_in_gathering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_stand_in.install(1, monkeypatch.setattr)
    client = EngineClient(calls_to(None), engines=0, workers_per_engine=1)
    sender = make_sender("nccl", RecordedWeights(0), client, Rendezvous("127.0.0.1", 1, 3, 1.0), rank=1)
    EVENTS.clear()
    sender.send(1)
    assert EVENTS == ["wait for the device", "read norm", "read embed", "read layer.weight", "read head"]


def test_weights_that_vllm_could_not_unpack_are_refused() -> None:
    client = EngineClient(calls_to(None), engines=0, workers_per_engine=1)
    with pytest.raises(AssertionError, match=r"norm has larger elements than layer\.weight before it"):
        make_sender("ipc", Weights(0), client, Rendezvous("", 0, 1, 1.0), rank=0)
