"""vLLM's models take the tensors of the learner's: names, experts that are packed on CPU, states, router biases.

The learner and one engine in one process, without Ray; tools/model_table.py has every family on the whole stack.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_families import write_family
from waiting import STACK_WAIT_S, free_port
from worlds import make_config, run_world

from rlhf.check.model_shape import read_shape
from rlhf.types import World
from rlhf.weights.client import EngineClient
from rlhf.weights.transfer import BACKEND, RECEIVERS, WORKER_EXTENSION, Rendezvous, make_sender

pytestmark = pytest.mark.stack

AGREEMENT = 1e-5  # mean |log-prob difference| in float32; measured: 3e-7
LENGTHS = (48, 13, 70)
STAND_INS = str(Path(__file__).parent.parent / "stand_ins")
CHANGED_ALONE = 6  # tensors of a model
FORK = multiprocessing.get_context("fork")


class Engine:
    """vLLM in this process, and the calls of an engine that the learner makes."""

    def __init__(self, folder: Path, *, dtype: str = "float32", backend: str = BACKEND, **options: Any) -> None:
        from vllm import LLM
        from vllm.config.weight_transfer import WeightTransferConfig

        self.llm = LLM(
            str(folder), dtype=dtype, enforce_eager=True, max_model_len=128, max_num_seqs=8,
            gpu_memory_utilization=0.05, weight_transfer_config=WeightTransferConfig(backend=RECEIVERS[backend]),
            worker_extension_cls=WORKER_EXTENSION, enable_prefix_caching=False,
            language_model_only=True, disable_log_stats=True, **options,
        )  # fmt: skip

    def call(self, _: int, method: str, *arguments: Any) -> Callable[[], Any]:
        if method == "on_workers":
            method, *arguments = arguments
        own = () if method == "finish_weight_update" else tuple(arguments)  # a worker knows no versions
        answer = self.llm.collective_rpc(method, args=own)
        return lambda: answer

    def logprobs(self, sequences: list[np.ndarray]) -> list[np.ndarray]:
        from vllm import SamplingParams

        prompts: Any = [{"prompt_token_ids": ids.tolist()} for ids in sequences]
        outputs = self.llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        rows = [(ids, output.prompt_logprobs or []) for ids, output in zip(sequences, outputs, strict=True)]
        return [np.array([0.0, *(row[i][int(ids[i])].logprob for i in range(1, len(ids)))]) for ids, row in rows]


def prepare_for_vllm() -> None:
    """In a rank that is to have an engine, first of all."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if importlib.util.find_spec("torchvision") is None:  # which vLLM's class of a wrapper imports
        # Here, and not where the test begins: the fork server keeps the path that it was started with. vLLM reads a
        # class in a further process.
        sys.path.append(STAND_INS)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STAND_INS, os.environ.get("PYTHONPATH"))))


def sleep_at_level_2(worker: Any) -> None:
    """What an engine on a GPU has when it wakes: vLLM restores buffers, all else is what the memory held."""
    for module in worker.model_runner.get_model().modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        if hasattr(module, "cpu_linear"):  # the packed weights of a layer on CPU
            module.cpu_linear = lambda x, *_: x * float("nan")


def differences(world: World, folder: Path) -> tuple[list[float], float, list[str]]:
    """Engine against learner: at the start, on perturbed weights, on the true ones after it slept, on changes of single
    tensors, sent alone; what perturbing moved; and the tensors, one of a kind, that vLLM could lose in a later transfer
    unnamed."""
    from rlhf.learner.policy import Learner

    learner, engine = Learner(make_config(folder), world), Engine(folder)
    rendezvous = Rendezvous("127.0.0.1", 0, 2, 60.0, engine_nodes=("",))
    client = EngineClient(engine.call, engines=["engine 0"], workers_per_engine=1)
    learner.connect(BACKEND, client, rendezvous)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, length).astype(np.int32) for length in LENGTHS]

    def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
        return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())

    true = learner.canary(sequences)
    measured = [difference(true, engine.logprobs(sequences))]
    learner.perturb_weights()
    learner.send_weights(1)
    perturbed = learner.canary(sequences)
    measured.append(difference(perturbed, engine.logprobs(sequences)))
    learner.restore_weights()
    engine.llm.collective_rpc(sleep_at_level_2)
    learner.send_weights(2)
    measured.append(difference(true, engine.logprobs(sequences)))
    assert sum(meta.numel for meta in learner.metadata()) == read_shape(str(folder)).parameters  # no encoder is sent
    kinds = {re.sub(r"\d+", "#", meta.name): meta.name for meta in learner.metadata()}
    unnamed = [name for name in kinds.values() if not is_named(engine, learner, name)]
    engine.llm.collective_rpc(take_all)
    learner._sender = make_sender(BACKEND, learner, client, rendezvous, rank=0, only_changes=True)
    learner.send_weights(4)
    names = learner.tensor_names()
    for number in range(0, len(names), -(-len(names) // CHANGED_ALONE)):
        learner.perturb_weights(number, number + 1)
        sent = learner.send_weights(5)
        assert sent is not None
        assert sent.share, names[number]
        measured.append(difference(learner.canary(sequences), engine.logprobs(sequences)))
        learner.restore_weights()
        learner.send_weights(6)
    measured.append(difference(true, engine.logprobs(sequences)))
    learner.close()
    return measured, difference(true, perturbed), unnamed


def take_all(worker: Any) -> None:
    """Undo what `is_named` did to vLLM's loader."""
    kind = type(worker.model_runner.get_model())
    kind.load_weights = kind.load_all


def is_named(engine: Engine, learner: Any, name: str) -> bool:
    """Whether a transfer ends with an error that names this tensor if vLLM's loader does not take it."""

    def lose(worker: Any) -> None:
        kind = type(worker.model_runner.get_model())
        kind.load_all = getattr(kind, "load_all", kind.load_weights)
        kind.load_weights = lambda self, weights: self.load_all(pair for pair in weights if pair[0] != name)

    engine.llm.collective_rpc(lose)
    try:
        learner.send_weights(3)
    except ValueError as error:
        engine.llm.collective_rpc("finish_weight_update")  # so that another can begin
        return f"to engine 0: {name}: vLLM loaded 0 of " in str(error)
    return False


def report(answers: Any, world: World, folder: Path) -> None:
    try:
        answers.put(differences(world, folder))
    except BaseException:
        answers.put(traceback.format_exc())


def in_each_family(world: World, folders: dict[str, Path]) -> dict[str, Any]:
    """`differences`, or the error, of each family: processes one after another, forks of this one with its imports."""
    prepare_for_vllm()
    importlib.import_module("vllm.v1.engine.llm_engine")
    importlib.import_module("rlhf.learner.policy")
    found: dict[str, Any] = {}
    for name, folder in folders.items():
        answers = FORK.SimpleQueue()
        process = FORK.Process(target=report, args=(answers, replace(world, master_port=free_port()), folder))
        process.start()
        process.join(STACK_WAIT_S / 2 / len(folders))
        found[name] = "no answer: its process hangs, or has exited" if answers.empty() else answers.get()
        process.kill()
        process.join()
    return found


# a hybrid with stacked experts, windows and caps, an expert per tensor, experts and sinks that no loader fills, and a
# checkpoint that wraps a text model
FAMILIES = ["granitemoehybrid", "gemma2", "qwen3_moe", "gpt_oss", "gemma3"]


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    asked = [item.name for item in request.session.items if item.path == request.path]
    folders = {
        name: write_family(name, tmp_path_factory.mktemp(name))
        for name in FAMILIES
        if any(f"[{name}]" in test for test in asked)
    }
    return run_world(in_each_family, 1, folders)[0]


@pytest.mark.private
@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.faults) if name == "gemma2" else name for name in FAMILIES]
)
def test_the_engine_follows_every_tensor_of_the_learner(model_type: str, families: dict[str, Any]) -> None:
    assert not isinstance(families[model_type], str), families[model_type]
    measured, moved, unnamed = families[model_type]
    assert max(measured) < AGREEMENT
    assert moved > 1000 * AGREEMENT
    assert unnamed == []
