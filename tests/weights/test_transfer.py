"""The bytes of a weight transfer on CPU: what the learner holds is what the engine's end is given, both ways."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from waiting import WAIT_S, free_port

from rlhf.types import WeightsSent
from rlhf.weights import parameters, transfer
from rlhf.weights.client import EngineClient
from rlhf.weights.host_copy import HostCopy, open_shared_memory
from rlhf.weights.parameters import ParameterMeta, buckets
from rlhf.weights.transfer import CPUSender, Rendezvous

SHAPES = {"embed": (7, 3), "layer.weight": (5,), "norm": (1,), "head": (4, 4)}
DTYPES = {"embed": torch.bfloat16, "layer.weight": torch.bfloat16, "norm": torch.float32, "head": torch.bfloat16}


class Weights:
    """A learner's parameters."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: torch.randn(shape, generator=generator).to(DTYPES[name]) for name, shape in SHAPES.items()
        }

    def metadata(self) -> list[ParameterMeta]:
        return [ParameterMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def own_parts(self) -> list[tuple[Tensor, int]]:
        return [(tensor.view(-1), 0) for tensor in self.tensors.values()]


LAYERS = {"embed": 0, "layer.weight": 1, "norm": 2, "head": 1}  # one layer of vLLM holds two tensors


class Engine:
    """Stands for an engine of one worker: keeps what it loads from the copy of its node, and the order of the calls.

    Attributes:
        weights: as if an engine without them had loaded all that was sent.
        loaded: the tensors of the last transfer.
        layer_of: the layer of vLLM that holds a tensor.
    """

    layer_of: Callable[[str], Any] = LAYERS.__getitem__

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}
        self.loaded: list[str] = []
        self.version = ""
        self.copy: HostCopy | None = None
        self._process = ThreadPoolExecutor(1)

    def call(self, _: int, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        return self._process.submit(self.answer, method, *arguments).result

    def answer(self, method: str, *arguments: Any) -> Any:
        match method, *arguments:
            case "init_weight_transfer_engine", info:
                if self.copy is None or self.copy.path != info["memory"]:
                    self.copy = HostCopy(info)
            case "on_workers", name, *more:
                return [self.copy.path if name == "copy_path" else self.receive(*more)]
            case "update_weights", {"names": names}:
                assert self.copy is not None
                new = {name: tensor.clone() for name, tensor in self.copy.tensors(names)}
                self.weights, self.loaded = self.weights | new, list(new)
            case ("loaded_weights",):
                new = {name: self.weights[name] for name in self.loaded}
                return [{name: [x.nbytes, x.numel(), self.layer_of(name)] for name, x in new.items()}]
            case "finish_weight_update", version:
                self.version = version
        return None

    def receive(self, messages: Any) -> bool:
        assert self.copy is not None
        return self.copy.receive(messages)


def connect(source: Weights, *engines: Engine, nodes: tuple[str, ...], only_changes: bool = False) -> CPUSender:
    def call(engine: int, *question: Any) -> Any:
        return engines[engine].call(0, *question)

    client = EngineClient(call, engines=[f"engine {i}" for i in range(len(engines))], workers_per_engine=1)
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S, node="a", engine_nodes=nodes)
    return CPUSender(source, client, rendezvous, rank=0, only_changes=only_changes)


def check(source: Weights, *engines: Engine) -> None:
    for engine in engines:
        assert engine.weights.keys() == SHAPES.keys()
        for name, tensor in source.tensors.items():
            assert engine.weights[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


@pytest.mark.parametrize("node", ["a", "b"])
@pytest.mark.parametrize("bucket_bytes", [1, 48, 2**20])
def test_every_tensor_arrives_bit_for_bit_each_time(
    node: str, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters.buckets, "__defaults__", (bucket_bytes,))
    source, engine = Weights(0), Engine()
    sender = connect(source, engine, nodes=(node,))
    assert engine.copy is not None
    assert bool(engine.copy.path) == (node == "b")  # on its own node the learner makes the copy
    for version in (1, 2):
        source.tensors = Weights(version).tensors
        engine.calls.clear()
        sent = sender.send(version)
        assert sent == WeightsSent(None, sum(meta.bytes for meta in source.metadata()))
        assert engine.version == str(version)
        check(source, engine)
        received = ["on_workers"] * (node == "b")
        assert engine.calls == [
            *received, "start_weight_update", "update_weights", "loaded_weights", "finish_weight_update",
        ]  # fmt: skip
    sender.close()
    cut = buckets(source.metadata())
    assert len(cut) == {1: 4, 48: 4, 2**20: 3}[bucket_bytes]  # a run of one type: embed and layer.weight, norm, head


def test_buckets_in_memory_do_not_overlap_and_begin_where_any_type_may() -> None:
    cut = buckets(Weights(0).metadata())
    assert all(bucket.start % parameters.ALIGNMENT == 0 for bucket in cut)
    assert all(before.end <= bucket.start for before, bucket in itertools.pairwise(cut))
    assert [bucket.end - bucket.start for bucket in cut] == [2 * (7 * 3 + 5), 4, 2 * 4 * 4]


def test_ranks_that_do_not_send_take_part_in_gathering() -> None:
    gathered = []

    class Gathering(Weights):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.tensors.items():
                gathered.append(name)
                yield name, tensor

    client = EngineClient(Engine().call, engines=["engine 0"], workers_per_engine=1)
    sender = CPUSender(Gathering(0), client, Rendezvous("127.0.0.1", 1, 2, 1.0, engine_nodes=("",)), rank=1)
    assert sender.send(1) is None
    assert gathered == list(SHAPES)


@pytest.mark.slow
def test_a_learner_that_is_killed_leaves_no_file_and_its_readers_keep_their_bytes() -> None:
    before = set(os.listdir("/dev/shm"))
    program = (
        "import sys, torch\n"
        "from rlhf.weights.host_copy import create_shared_memory\n"
        "memory, path = create_shared_memory(4096)\n"
        "memory[64:67] = torch.tensor([1, 2, 3])\n"
        "print(path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    learner = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert learner.stdout is not None
    path = learner.stdout.readline().strip()
    memory = open_shared_memory(path)
    named = set(os.listdir("/dev/shm")) - before
    learner.kill()
    learner.wait()
    learner.stdout.close()
    assert memory[64:67].tolist() == [1, 2, 3]
    assert not Path(path).exists()
    assert not [name for name in named if "rlhf" in name]


# --- the plugin ---


@pytest.mark.private
@pytest.mark.slow
def test_rotary_positions_on_cpu_are_the_same_for_heads_in_a_dimension_of_their_own() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.platforms import current_platform

    transfer.register_with_vllm()
    transfer.register_with_vllm()  # as it is called in some processes
    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(32, 128, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype=torch.float32)
    torch.manual_seed(0)
    query, key, positions = torch.randn(7, 4, 32), torch.randn(7, 2, 32), torch.arange(7)
    by_head = rope.forward_cpu(positions, query.clone(), key.clone())
    flat = rope.forward_cpu(positions, query.flatten(1), key.flatten(1))
    for found, expected in zip(by_head, flat, strict=True):
        torch.testing.assert_close(found, expected.view_as(found))
