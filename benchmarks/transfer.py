"""Weights from a learner to an engine: seconds, and how many copies of the same bytes that is worth.

    python -m benchmarks.transfer [--device cuda] [--quick]

Weights of Qwen2.5-0.5B in bf16, 1 GB, to another process that copies them into tensors of its own. On CPU: one copy
within a process (the unit), ours through shared memory, ours through gloo, and one Ray call per tensor, all calls at
the same time; all four in one process and its receivers, in turn, round after round. The rows `whole` send through the
running trainer (Ray, DeepSpeed, vLLM, pause to resume). They take longer than the transport alone because of vLLM's
reload, which packs the weights of every layer again. On GPU only those are measured, and for comparison a copy of the
same bytes over the same link: nccl between two GPUs if there are two, ipc within one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import harness, models
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf.weights.parameters import ParameterMeta

COPY, MEMORY, GLOO, RAY = "copy in one process", "shared memory", "gloo", "Ray, a call per tensor, pipelined"


class Weights:
    """Parameters of a model of this size, named and shaped as in its checkpoint."""

    def __init__(self, size: str) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        with torch.device("meta"):
            config = Qwen2Config(**models.SIZES[size], tie_word_embeddings=True)  # type: ignore[arg-type]
            shapes = {name: p.shape for name, p in Qwen2ForCausalLM(config).named_parameters()}
        self.tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def metadata(self) -> list[ParameterMeta]:
        from rlhf.weights.parameters import ParameterMeta

        return [ParameterMeta(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors.items())

    def own_parts(self) -> list[tuple[Tensor, int]]:
        return [(tensor.view(-1), 0) for tensor in self.tensors.values()]


# --- transport alone: a receiving process that copies into tensors of its own ---


def receive(connection: Any, size: str) -> None:
    """The receiving process: does the work of an engine, with a plain copy instead of vLLM's reload."""
    import torch

    from rlhf.weights.host_copy import HostCopy

    torch.set_num_threads(1)
    own = Weights(size).tensors
    copy: HostCopy | None = None
    connection.send("ready")
    while True:
        answer: Any = None
        match connection.recv():
            case ("init_weight_transfer_engine", info):
                copy = copy if copy and copy.path == info["memory"] else HostCopy(info)
            case ("on_workers", "copy_path"):
                answer = [copy and copy.path]
            case ("on_workers", "receive", messages):
                answer = [copy and copy.receive(messages)]
            case ("update_weights", update):
                assert copy is not None
                for name, tensor in copy.tensors(update["names"]):
                    own[name].copy_(tensor)
            case ("loaded_weights",):
                answer = [{name: [tensor.nbytes, tensor.numel(), 0] for name, tensor in own.items()}]
        connection.send(answer)


class Receiver:
    """Such a process, as a learner reaches an engine."""

    def __init__(self, size: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=receive, args=(theirs, size), daemon=True)
        self.process.start()
        assert self._connection.recv() == "ready"

    def call(self, _: int, *question: Any) -> Callable[[], Any]:
        with self._lock:
            self._connection.send(question)
            answer = self._connection.recv()
        return lambda: answer


def transports(case: Case) -> Row:
    """All transports in turn, `rounds` times; the fastest of each."""
    import torch

    source = Weights(case["size"])
    target = {name: torch.zeros_like(tensor) for name, tensor in source}

    def copy() -> None:
        for name, tensor in source:
            target[name].copy_(tensor)

    senders: dict[str, Callable[[], None]] = {COPY: copy}
    receivers = []
    for name, one_node in ((MEMORY, True), (GLOO, False)):
        receivers.append(Receiver(case["size"]))
        senders[name] = _sender(source, receivers[-1], one_node)
    senders[RAY] = _ray_sender(source, case["size"])
    best = dict.fromkeys(senders, float("inf"))
    for _ in range(case["rounds"] + 1):  # the first touches every page for the first time
        for name, send in senders.items():
            started = time.perf_counter()
            send()
            best[name] = min(best[name], time.perf_counter() - started)
    for receiver in receivers:
        receiver.process.kill()
    import ray

    ray.shutdown()
    return {"bytes": source.bytes, "best": best}


def _sender(source: Weights, receiver: Receiver, one_node: bool) -> Callable[[], None]:
    from rlhf.learner.port import free_port
    from rlhf.weights.client import EngineClient
    from rlhf.weights.transfer import CPUSender, Rendezvous

    client = EngineClient(receiver.call, engines=["receiver"], workers_per_engine=1)
    nodes = ("here" if one_node else "there",)
    rendezvous = Rendezvous("127.0.0.1", free_port(), 2, 60.0, node="here", engine_nodes=nodes)
    sender = CPUSender(source, client, rendezvous, rank=0)
    return lambda: sender.send(1) and None


def _ray_sender(source: Weights, size: str) -> Callable[[], None]:
    import ray
    import torch

    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    @ray.remote
    class Holder:
        def __init__(self) -> None:
            self.own = Weights(size).tensors

        def load(self, name: str, values: Any) -> None:
            self.own[name].view(torch.uint8).view(-1).copy_(torch.from_numpy(values))

    holder = Holder.remote()
    arrays = {name: tensor.view(torch.uint8).view(-1).numpy() for name, tensor in source}

    def send() -> None:
        ray.get([holder.load.remote(name, values) for name, values in arrays.items()])

    return send


# --- whole: through the running trainer ---


def whole(case: Case) -> Row:
    """Fastest of several Engines.send_weights, from pause to resume."""
    from rlhf.cluster.engines import started_engines

    model = models.random_model(case["size"])
    device = case["device"]
    config = models.run_config(
        model,
        rollout={"gpu_memory_utilization": 0.4},
        learner={"optimizer": {"lr": 0.0}},
        cluster={"device": device, "placement": case["placement"], "step_deadline_s": 600.0},
    )

    async def run() -> float:
        async with started_engines(config) as engines:
            await engines.send_weights(0)
            times = []
            for version in range(1, case["rounds"] + 1):
                await engines.sleep_if_colocated()
                started = time.perf_counter()
                await engines.send_weights(version)
                times.append(time.perf_counter() - started)
            return min(times)

    weights = Path(model) / "model.safetensors"
    return {"seconds": asyncio.run(run()), "bytes": weights.stat().st_size}


def link(case: Case) -> Row:
    """Fastest of several plain copies of `bytes` within a GPU, or from one to another."""
    import torch

    source = torch.ones(case["bytes"], dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device=case["target"])
    times = []
    for _ in range(case["rounds"] + 1):
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize(case["target"])
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize(case["target"])
        times.append(time.perf_counter() - started)
    return {"seconds": min(times[1:])}


def cpu_rows(size: str, rounds: int) -> list[Row]:
    base = {"size": size, "rounds": rounds}
    result = harness.fresh("benchmarks.transfer", {"function": "transports", **base})
    unit, count = result["best"][COPY], result["bytes"]

    def row(way: str, seconds: float) -> Row:
        return {"way": way, "seconds": seconds, "GB/s": count / seconds / 1e9, "copies": seconds / unit}

    rows = [row(name, seconds) for name, seconds in result["best"].items()]
    case = {"function": "whole", **base, "device": "cpu", "placement": "separate"}
    seconds = harness.fresh("benchmarks.transfer", case)["seconds"]
    reload_s = seconds - result["best"][MEMORY]
    return [*rows, row("whole, separate", seconds), row("  of it vLLM's reload, Ray, pause", reload_s)]


def gpu_rows(size: str, rounds: int, gpus: int) -> list[Row]:
    """One row per placement, compared with the speed of its link; placements that do not fit get a row that says so."""
    rows: list[Row] = []
    for way, placement, needs in (("nccl", "separate", 2), ("ipc", "colocated", 1)):
        if gpus < needs:
            rows.append({"way": f"whole, {placement}, {way}", "not measured": f"needs {needs} GPUs, here are {gpus}"})
            continue
        base = {"size": size, "rounds": rounds, "placement": placement, "device": "cuda"}
        result = harness.fresh("benchmarks.transfer", {"function": "whole", **base})
        count, target = result["bytes"], "cuda:1" if needs == 2 else "cuda:0"
        copy_case = {"function": "link", "bytes": count, "target": target, "rounds": rounds}
        unit = harness.fresh("benchmarks.transfer", copy_case)["seconds"]
        for name, seconds in ((f"copy, cuda:0 to {target}", unit), (f"whole, {placement}, {way}", result["seconds"])):
            rows.append({
                "way": name, "seconds": seconds, "GB/s": count / seconds / 1e9, "copies": seconds / unit,
                "of the link": unit / seconds,
            })  # fmt: skip
    return rows


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"transports": transports, "whole": whole, "link": link})
    size = "0.1b" if options.quick else "0.5b"
    rounds = 2 if options.quick else 7
    rows = cpu_rows(size, rounds) if options.device == "cpu" else gpu_rows(size, rounds, models.gpus())
    harness.report("transfer", f"weights of {size}, bf16", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
