"""The bytes of a weight transfer on CPU: what the learner holds is what the engine's end is given, both ways."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from waiting import WAIT_S, free_port

from rlhf.weights import transfer
from rlhf.weights.transfer import CPUSender, Inbox, ParameterMeta, Rendezvous, buckets, open_shared_memory

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


class Engine:
    """Stands for the engine and its client: keeps what its end of the transfer yields, and the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loaded: dict[str, Tensor] = {}
        self.version = ""

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.info = info
        self.inbox = Inbox(info, worker=0)

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self.loaded = {}

    def update_weights(self, update: dict[str, Any]) -> None:
        self.calls.append("bucket")
        self.loaded |= dict(self.inbox.receive(update["bucket"]))

    def finish_weight_update(self, version: str) -> None:
        self.calls.append("finish")
        self.loaded = {name: tensor.clone() for name, tensor in self.loaded.items()}
        self.version = version


def connect(source: Weights, engine: Any, *, one_node: bool) -> CPUSender:
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S, one_node=one_node)
    return CPUSender(source, engine, rendezvous, rank=0)


@pytest.mark.parametrize("one_node", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 48, 2**20])
def test_every_tensor_arrives_bit_for_bit_each_time(
    one_node: bool, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer.buckets, "__defaults__", (bucket_bytes,))
    source, engine = Weights(0), Engine()
    sender = connect(source, engine, one_node=one_node)
    assert bool(engine.info["memory"]) == one_node
    for version in (1, 2):
        source.tensors = Weights(version).tensors
        sender.send(version)
        assert engine.version == str(version)
        assert engine.loaded.keys() == SHAPES.keys()
        for name, tensor in source.tensors.items():
            assert torch.equal(engine.loaded[name], tensor), name
    sender.close()
    cut = buckets(source.metadata())
    assert engine.calls == ["start", *["bucket"] * len(cut), "finish"] * 2
    assert len(cut) == {1: 4, 48: 4, 2**20: 3}[bucket_bytes]  # a run of one type: embed and layer.weight, norm, head


def test_buckets_in_memory_do_not_overlap_and_begin_where_any_type_may() -> None:
    cut = buckets(Weights(0).metadata())
    assert all(bucket.start % transfer.ALIGNMENT == 0 for bucket in cut)
    assert all(before.end <= bucket.start for before, bucket in itertools.pairwise(cut))
    assert [bucket.end - bucket.start for bucket in cut] == [2 * (7 * 3 + 5), 4, 2 * 4 * 4]


def test_a_failing_engine_fails_the_transfer_instead_of_hanging_it() -> None:
    class Failing(Engine):
        def update_weights(self, update: dict[str, Any]) -> None:
            raise RuntimeError("no such layer")

    with pytest.raises(RuntimeError, match="no such layer"):
        connect(Weights(0), Failing(), one_node=True).send(1)


def test_ranks_that_do_not_send_take_part_in_gathering() -> None:
    gathered = []

    class Gathering(Weights):
        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.tensors.items():
                gathered.append(name)
                yield name, tensor

    engine = Engine()
    CPUSender(Gathering(0), engine, Rendezvous("127.0.0.1", 1, 2, 1.0, one_node=True), rank=1).send(1)
    assert gathered == list(SHAPES)
    assert engine.calls == []


@pytest.mark.slow
def test_a_learner_that_is_killed_leaves_no_file_and_its_readers_keep_their_bytes() -> None:
    before = set(os.listdir("/dev/shm"))
    program = (
        "import sys, torch\n"
        "from rlhf.weights.transfer import create_shared_memory\n"
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
