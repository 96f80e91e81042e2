"""vLLM's own nccl and ipc transfers, both ends in this process on a stand-in for the device: payload and order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import device_stand_in
import pytest
import torch
from device_stand_in import EVENTS, record
from test_transfer import DTYPES, SHAPES, Weights
from torch import Tensor
from waiting import WAIT_S, free_port

from rlhf.weights import transfer
from rlhf.weights.client import EngineClient
from rlhf.weights.transfer import BACKEND, Rendezvous, make_sender

pytestmark = pytest.mark.slow

NAMES = {"memory": BACKEND, "gloo": BACKEND}  # both ways for the bytes on CPU


class Model(torch.nn.Module):
    """Loads as a model of vLLM does, and has another tensor that no learner sends.

    Attributes:
        skipped: a tensor that its loader does not take.
        full: it cannot load anything.
    """

    def __init__(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

        super().__init__()
        self.skipped, self.full = "", False
        self.layer, self.rotary = torch.nn.Module(), torch.nn.Module()
        self.rotary.register_buffer("cache", torch.ones(3))
        for name, shape in SHAPES.items():
            module, _, own = name.rpartition(".")
            empty = torch.nn.Parameter(torch.zeros(shape, dtype=DTYPES[name]), requires_grad=False)
            self.get_submodule(module).register_parameter(own, empty)
        record_metadata_for_reloading(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        names = []
        for name, tensor in weights:
            if self.full:
                raise RuntimeError("no memory is left for the weights")
            names.append(name)
            if name != self.skipped:
                parameter = self.get_parameter(name)
                getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        record(f"load {' '.join(names)}")


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

    transfer.register_with_vllm()
    parallel = SimpleNamespace(rank=0, world_size=1, data_parallel_index=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=transfer.RECEIVERS[NAMES.get(backend, backend)]),
        config,
        torch.device("cpu"),
        model,
    )


def calls_to(worker: Any) -> Callable[..., Callable[[], Any]]:
    from rlhf.weights.receivers import LoadedWeights

    holder: Any = SimpleNamespace(weight_transfer_engine=worker)

    def call(_: int, method: str, *arguments: Any) -> Callable[[], Any]:
        record(method)
        answer: Any = None
        match method:
            case "loaded_weights":
                answer = [worker.loaded]
            case "init_weight_transfer_engine":
                worker.init_transfer_engine(worker.parse_init_info(*arguments))
            case "on_workers":
                answer = [getattr(LoadedWeights, arguments[0])(holder, *arguments[1:])]
            case "finish_weight_update":
                worker.finish_weight_update()
            case _:
                getattr(worker, method)(*arguments)
        return lambda: (record(f"end of {method}"), answer)[1]

    return call


def connect(backend: str, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordedWeights, Model, Any]:
    """A learner's weights, the model of an engine, and the sender between them."""
    device_stand_in.install(0, monkeypatch.setattr)
    monkeypatch.setattr(transfer, "BUCKET_BYTES", 48)
    source, model = RecordedWeights(0), Model()
    client = EngineClient(calls_to(worker_of(backend, model)), engines=["engine 7"], workers_per_engine=1)
    nodes = ("here" if backend == "memory" else "there",)
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S, node="here", engine_nodes=nodes)
    return source, model, make_sender(NAMES.get(backend, backend), source, client, rendezvous, rank=0)


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
def test_payload_buckets_and_order_of_synchronization(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model, sender = connect(backend, monkeypatch)
    for seed in (1, 2):
        source.tensors = RecordedWeights(seed).tensors
        EVENTS.clear()
        sender.send(seed)
        assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in source.tensors.items())
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
        "loaded_weights", "end of loaded_weights", "finish_weight_update", "end of finish_weight_update",
    ]  # fmt: skip


def order_of_ipc(events: list[str]) -> None:
    """One buffer: it is full when the engines are called, and filled again when they have answered."""
    answered = ["wait for the device", "end of update_weights", "collect"]  # the engine waits for its copies
    assert events == [
        "wait for the device", "start_weight_update", "end of start_weight_update", "export 48",
        "read norm", "read embed", "read layer.weight", "wait for main", "update_weights", "load norm embed", *answered,
        "read head", "wait for main", "update_weights", "load layer.weight head", *answered,
        "loaded_weights", "end of loaded_weights", "finish_weight_update", "end of finish_weight_update", "collect",
    ]  # fmt: skip


def test_an_engine_that_joins_another_group_destroys_the_communicator_of_the_former(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when another engine was replaced: the learner closes its end, and all engines are called again."""
    source, model, first = connect("nccl", monkeypatch)
    worker = worker_of("nccl", model)
    first.close()
    client = EngineClient(calls_to(worker), engines=["engine 7"], workers_per_engine=1)
    groups = []
    for seed in (1, 2):
        rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S)
        sender = make_sender("nccl", source, client, rendezvous, rank=0)
        sender.send(seed)
        groups.append(worker.model_update_group)
        sender.close()
    assert [group._aborted.is_set() for group in groups] == [True, False]
    assert torch.equal(model.get_parameter("head"), source.tensors["head"])


@pytest.mark.parametrize("backend", ["memory", "gloo", "nccl", "ipc"])
def test_a_tensor_that_a_later_transfer_does_not_load_is_named_and_the_update_is_not_finished(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, sender = connect(backend, monkeypatch)
    sender.send(1)
    sender.send(2)
    model.skipped = "layer.weight"
    EVENTS.clear()
    with pytest.raises(ValueError, match=r"engine 7: layer\.weight\b.* 0 of 5 elements"):
        sender.send(3)
    assert EVENTS[-1] == "end of loaded_weights"


@pytest.mark.parametrize("backend", ["memory", "gloo", "nccl", "ipc"])
def test_an_engine_that_fails_at_a_bucket_ends_the_transfer_at_once_with_its_error_and_without_a_finish(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, sender = connect(backend, monkeypatch)
    sender.send(1)
    model.full = True
    EVENTS.clear()
    with pytest.raises(RuntimeError, match="no memory is left for the weights") as raised:
        sender.send(2)
    assert not {"loaded_weights", "finish_weight_update"} & set(EVENTS)
    if backend == "nccl":  # the second bucket waited for the engine
        assert "the group was aborted" in str(raised.value.__cause__)


def test_a_rank_that_does_not_send_waits_for_the_update_too_before_it_takes_part_in_gathering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device_stand_in.install(1, monkeypatch.setattr)
    client = EngineClient(calls_to(None), engines=[], workers_per_engine=1)
    sender = make_sender("nccl", RecordedWeights(0), client, Rendezvous("127.0.0.1", 1, 3, 1.0), rank=1)
    EVENTS.clear()
    sender.send(1)
    assert EVENTS == ["wait for the device", "read norm", "read embed", "read layer.weight", "read head"]


def test_weights_that_vllm_could_not_unpack_are_refused() -> None:
    client = EngineClient(calls_to(None), engines=[], workers_per_engine=1)
    with pytest.raises(AssertionError, match=r"norm .*larger .*layer\.weight"):
        make_sender("ipc", Weights(0), client, Rendezvous("", 0, 1, 1.0), rank=0)
