"""vLLM's own nccl and ipc transfers between real learners and real engines, on a stand-in for the device.

Two learners, two engines of one GPU and one engine of two, each worker a process with its part of the model.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import device_stand_in
import numpy as np
import pytest
from test_stack_families import AGREEMENT, Engine
from waiting import STACK_WAIT_S, free_port
from worlds import make_config, run_world

from rlhf.types import World

pytestmark = pytest.mark.stack

BUCKET_BYTES = 2**15  # the model has 0.5 MB
SEQUENCES = [np.random.default_rng(0).integers(0, 256, length).astype(np.int32) for length in (48, 13, 70)]
FORK = multiprocessing.get_context("fork")

# name -> transport, engines
CASES = {
    "nccl, one engine": ("nccl", ["a"]),
    "nccl, two engines": ("nccl", ["a", "b"]),
    "nccl, tensor parallel 2": ("nccl", ["c"]),
    "ipc, two engines": ("ipc", ["a", "b"]),
    "ipc, one engine of two GPUs": ("ipc", ["c"]),
}
GPUS = {"a": [0], "b": [1], "c": [0, 1]}


@dataclass
class Worker:
    """A process of an engine, as the sending learner reaches it."""

    questions: Any
    answers: Any

    def answer(self) -> Any:
        try:
            value = self.answers.get(timeout=STACK_WAIT_S)
        except queue.Empty:
            raise AssertionError("a worker does not answer") from None
        if isinstance(value, str):
            raise AssertionError(value)
        return value[0]


@dataclass
class Case:
    """What rank 0 saw in one case: log-prob differences of the engines, and how far perturbing moved the learner's."""

    differences: list[float]
    moved: float


class WorkerEngine(Engine):
    """vLLM in this process; with tensor parallelism it is one of several that are given the same calls."""

    def __init__(self, folder: Path, gpu: int, rank: int, workers: int, port: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "RANK": str(rank),
            "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        device_stand_in.install(gpu)
        # Without its own shared memory: outside a launcher of vLLM its files have a fixed name, and stay.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _: False
        parallel = {"tensor_parallel_size": workers, "distributed_executor_backend": "external_launcher"}
        super().__init__(folder, backend="nccl", num_gpu_blocks_override=32, **(parallel if workers > 1 else {}))

    def answer(self, method: str, *arguments: Any) -> Any:
        if method == "logprobs":
            return self.logprobs(SEQUENCES)
        if method == "use_backend":
            return self.use_backend(*arguments)
        (answer,) = self.call(0, method, *arguments)()
        return answer

    def use_backend(self, backend: str) -> None:
        """Give the worker a receiving end of this transport; in a run it has one from its start."""
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from rlhf.weights.transfer import RECEIVERS

        def change(wrapper: Any) -> None:
            worker = wrapper.worker
            worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=RECEIVERS[backend]),
                worker.vllm_config,
                worker.device,
                worker.model_runner.model,
            )

        self.llm.collective_rpc(change)


def serve(worker: Worker, *arguments: Any) -> None:
    """The life of a worker's process: an engine, and calls until there is none."""
    try:
        engine = WorkerEngine(*arguments)
    except BaseException:
        worker.answers.put(traceback.format_exc())
        return
    while (question := worker.questions.get(timeout=STACK_WAIT_S)) is not None:
        try:
            worker.answers.put((engine.answer(*question),))
        except BaseException:
            worker.answers.put(traceback.format_exc())


def learn(world: World, folder: Path, engines: dict[str, list[Worker]]) -> dict[str, Case]:
    """A learner that goes through all cases; rank 0 reports."""
    device_stand_in.install(world.rank)
    from rlhf.learner.policy import Learner
    from rlhf.weights import transfer
    from rlhf.weights.client import EngineClient

    transfer.BUCKET_BYTES = BUCKET_BYTES
    learner = Learner(make_config(folder, cluster={"device": "cpu", "learners": world.size}), world)
    true, found = learner.canary(SEQUENCES), {}
    for name, (backend, chosen) in CASES.items():
        groups = [engines[engine] for engine in chosen]
        ask = caller(groups)
        if world.rank == 0:
            wait_for_all(ask(i, "use_backend", backend) for i in range(len(groups)))
        client = EngineClient(ask, engines=chosen, workers_per_engine=len(groups[0]))
        workers = sum(len(group) for group in groups)
        learner.connect(backend, client, transfer.Rendezvous("127.0.0.1", free_port(), 1 + workers, STACK_WAIT_S))
        differences, moved = [], []
        for version, change in enumerate((learner.perturb_weights, learner.restore_weights)):
            change()
            expected = learner.canary(SEQUENCES)
            moved.append(difference(expected, true))
            learner.send_weights(version)
            if world.rank == 0:
                answers = wait_for_all(ask(i, "logprobs") for i in range(len(groups)))
                differences += [difference(expected, own) for group in answers for own in group]
        found[name] = Case(differences, moved[0])
    learner.close()
    return found


def caller(groups: Sequence[list[Worker]]) -> Callable[..., Callable[[], Any]]:
    def call(engine: int, method: str, *arguments: Any) -> Callable[[], Any]:
        for worker in groups[engine]:
            worker.questions.put((method, *arguments))
        return lambda: [worker.answer() for worker in groups[engine]]

    return call


def wait_for_all(waits: Any) -> list[Any]:
    return [wait() for wait in list(waits)]


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())


def all_processes(world: World, folder: Path) -> dict[str, Case]:
    """Start workers and learners as forks of a process that has imported vLLM; the report of rank 0."""
    import vllm  # noqa: F401

    processes, engines = [], {}
    for name, gpus in GPUS.items():
        port = free_port()
        engines[name] = [Worker(FORK.Queue(), FORK.Queue()) for _ in gpus]
        for rank, gpu in enumerate(gpus):
            arguments = (engines[name][rank], folder, gpu, rank, len(gpus), port)
            processes.append(FORK.Process(target=serve, args=arguments))
    reports, port = FORK.Queue(), free_port()
    for rank in range(2):
        learner_place = World(rank, 2, rank, "127.0.0.1", port, threads=1)
        processes.append(FORK.Process(target=report, args=(reports, learner_place, folder, engines)))
    for process in processes:
        process.start()
    try:
        found = [reports.get(timeout=STACK_WAIT_S) for _ in range(2)]
    finally:
        for worker in itertools.chain(*engines.values()):
            worker.questions.put(None)
        for process in processes:
            process.join(timeout=20)
            process.kill()
    (failure, *_) = [*(x for x in found if isinstance(x, str)), None]
    assert failure is None, failure
    return next(cases for rank, cases in found if rank == 0)


def report(reports: Any, world: World, *arguments: Any) -> None:
    try:
        reports.put((world.rank, learn(world, *arguments)))
    except BaseException:
        reports.put(traceback.format_exc())


@pytest.fixture(scope="module")
def cases(tiny_model_dir: Path) -> dict[str, Case]:
    (found,) = run_world(all_processes, 1, tiny_model_dir / "model")
    return found


@pytest.mark.parametrize("name", CASES)
def test_every_engine_follows_perturbed_weights_and_the_true_ones(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    workers = sum(len(GPUS[engine]) for engine in CASES[name][1])
    assert len(case.differences) == 2 * workers  # tensor parallel workers each report
    assert max(case.differences) < AGREEMENT
    assert case.moved > 1000 * AGREEMENT
