"""Only what has changed is sent, and what engines then hold is what the learner holds, bit for bit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import write_family
from test_transfer import Engine, Weights, check, connect
from waiting import WAIT_S, free_port
from worlds import make_config, run_world

from rlhf.algo.sizes import BYTES_PER_CHANGE
from rlhf.types import WeightsSent, World
from rlhf.weights import changes, transfer
from rlhf.weights.changes import BLOCK, make_patch, patch_bytes, write_patch
from rlhf.weights.client import EngineClient, whole_layers
from rlhf.weights.host_copy import HostCopy
from rlhf.weights.parameters import Bucket, ParameterMeta
from rlhf.weights.transfer import Rendezvous

WHOLE_BYTES = sum(meta.bytes for meta in Weights(0).metadata())


# --- a patch ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_patch_changes_just_its_elements_at_both_ends_of_every_block(dtype: torch.dtype) -> None:
    elements = 3 * BLOCK + 5
    bucket = Bucket(0, [ParameterMeta("w", str(dtype).removeprefix("torch."), (elements,))])
    places = torch.tensor([0, 1, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 3 * BLOCK, elements - 1])
    memory = torch.zeros(elements * dtype.itemsize, dtype=torch.uint8)
    bits = memory.view(changes.INTEGERS[dtype.itemsize])
    patch = make_patch(bucket, places, bits.new_full((len(places),), -3))
    assert len(patch) == patch_bytes(bucket, len(places))
    if dtype == torch.bfloat16:  # what --plan counts
        assert patch_bytes(bucket, 8) - patch_bytes(bucket, 7) == BYTES_PER_CHANGE
    assert write_patch(bucket, memory, patch)
    assert bits.nonzero().view(-1).equal(places)
    assert set(bits[places].tolist()) == {-3}


@pytest.mark.parametrize("damaged", [0, 9, -1])
def test_a_damaged_patch_is_noticed_and_nothing_is_written(damaged: int) -> None:
    bucket = Bucket(0, [ParameterMeta("w", "bfloat16", (100,))])
    patch = make_patch(bucket, torch.tensor([7]), torch.tensor([1], dtype=torch.int16))
    patch[damaged] ^= 1
    memory = torch.zeros(200, dtype=torch.uint8)
    assert not write_patch(bucket, memory, patch)
    assert not memory.any()


# --- what is loaded for a change ---


def test_a_layer_is_loaded_whole_on_every_worker_and_layers_that_share_a_tensor_are_loaded_together() -> None:
    account = {"q": [8, 4, 1], "k": [8, 4, 1], "norm": [8, 4, 2], "embed": [8, 4, 3, 4], "bias": [8, 4, 4]}
    assert whole_layers(["k"], [account]) == ["q", "k"]
    assert whole_layers(["bias"], [account]) == ["embed", "bias"]
    assert whole_layers([], [account]) == []
    other_worker = {"q": [8, 0], "k": [8, 4, 1], "norm": [8, 4, 1], "embed": [8, 4, 3], "bias": [8, 4, 4]}
    assert whole_layers(["norm"], [account, other_worker]) == ["q", "k", "norm"]


def test_everything_is_loaded_where_vllm_does_not_say_into_which_layer_a_tensor_goes() -> None:
    account = {"experts": [8, 4], "norm": [8, 4, 2], "constant": [8, 0]}
    assert whole_layers(["norm"], [account]) == ["experts", "norm", "constant"]
    assert whole_layers(["constant"], [{"norm": [8, 4, 2], "constant": [8, 0]}]) == ["constant"]


# --- transfers ---


def started(*nodes: str) -> tuple[Weights, list[Engine], transfer.CPUSender]:
    """A learner on node a, and engines that have got everything."""
    source, engines = Weights(0), [Engine() for _ in nodes]
    sender = connect(source, *engines, nodes=nodes, only_changes=True)
    assert sender.send(1) == WeightsSent(None, WHOLE_BYTES)
    check(source, *engines)
    return source, engines, sender


@pytest.mark.parametrize("nodes", [("a",), ("b",), ("a", "b", "c", "b", "a")])
def test_changes_reach_every_engine_bit_for_bit_and_layers_without_a_change_are_not_loaded(nodes: Any) -> None:
    source, engines, sender = started(*nodes)
    source.tensors["embed"][2, 1] = -0.0
    source.tensors["embed"][0, 0] = torch.nan
    sent = sender.send(2)
    assert sent is not None
    assert sent.share == 2 / 43
    assert sent.bytes < WHOLE_BYTES
    check(source, *engines)
    assert {(engine.version, *engine.loaded) for engine in engines} == {("2", "embed")}
    source.tensors["head"][3, 3] += 1
    sender.send(3)
    check(source, *engines)
    assert engines[0].loaded == ["layer.weight", "head"]  # one layer holds both
    assert sender.send(4) == WeightsSent(0.0, 0)
    assert (engines[-1].version, engines[-1].loaded) == ("4", [])
    check(source, *engines)


def test_more_than_forty_percent_is_sent_whole_and_said() -> None:
    source, engines, sender = started("a", "b")
    source.tensors["embed"] += 1
    source.tensors["norm"] += 1
    assert sender.send(2) == WeightsSent(22 / 43, WHOLE_BYTES, "51% of the elements have changed")
    check(source, *engines)


def test_after_a_damaged_patch_everything_is_sent_in_the_same_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    source, engines, sender = started("a", "b")
    numbers = iter(range(100))
    monkeypatch.setattr(changes, "_checksum", lambda _: next(numbers))
    source.tensors["embed"][2, 1] += 1
    assert sender.send(2) == WeightsSent(1 / 43, WHOLE_BYTES, "a patch was damaged on its way")
    check(source, *engines)
    monkeypatch.undo()
    source.tensors["embed"][2, 1] += 1
    sent = sender.send(3)
    assert sent is not None
    assert sent.bytes < WHOLE_BYTES
    check(source, *engines)


def test_after_a_transfer_that_failed_everything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    source, engines, sender = started("a")
    source.tensors["embed"][2, 1] += 1
    with monkeypatch.context() as failing:
        failing.setattr(HostCopy, "tensors", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sender.send(2)
    assert engines[0].version == "1"
    assert sender.send(3) == WeightsSent(None, WHOLE_BYTES)
    check(source, *engines)


# --- learners that hold parts ---


def follow(world: World, folder: Path, stage: int) -> list[tuple[float | None, bool]] | None:
    """On rank 0: the share of each transfer, and whether an engine on another node then holds the learners' weights.

    The last transfer comes after one that the engine failed to load, of which rank 0 alone hears.
    """
    from rlhf.learner.policy import Learner

    config = make_config(
        folder,
        model={"dtype": "bfloat16"},
        cluster={"device": "cpu", "learners": world.size},
        learner={"zero_stage": stage},
        weights={"transfer": "delta"},
    )
    learner, engine = Learner(config, world), Engine()
    engine.layer_of = lambda name: name
    fails = False

    def call(number: int, method: str, *arguments: Any) -> Any:
        if fails and method == "update_weights":
            raise ConnectionError(method)
        return engine.call(number, method, *arguments)

    client = EngineClient(call, engines=["engine 0"], workers_per_engine=1)
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, WAIT_S, node="a", engine_nodes=("b",))
    learner.connect(transfer.BACKEND, client, rendezvous)
    found = []
    for change in (None, lambda: learner.perturb_weights(2, 8), learner.restore_weights, None, "a failure"):
        if callable(change):
            change()
        elif change is not None:
            fails = True
            with contextlib.suppress(ConnectionError):
                learner.send_weights(1)
            fails = False
        sent = learner.send_weights(1)
        true = {name: tensor.clone() for name, tensor in learner}
        if sent is not None:
            found.append((sent.share, all(engine.weights[name].equal(tensor) for name, tensor in true.items())))
    learner.close()
    return found if world.rank == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe"])  # transformers stacks the experts of the second
def test_ranks_send_the_changes_of_their_parts(model_type: str, stage: int, tmp_path: Path) -> None:
    (everything, *others, after_a_failure), rest = run_world(follow, 2, write_family(model_type, tmp_path), stage)
    assert rest is None
    assert everything == after_a_failure == (None, True)
    shares = [share for share, _ in others]
    assert shares == [pytest.approx(shares[0]), pytest.approx(shares[0]), 0.0]
    assert 0.001 < shares[0] < 0.34
    assert all(equal for _, equal in others)
