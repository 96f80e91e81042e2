"""Checks of the nodes: all answer, with the same packages and the GPUs that the config asks for.

    python -m rlhf.check.doctor.nodes ADDRESS SECONDS  describe every node of that Ray cluster, as JSON

A separate process asks the cluster; it can be killed if Ray does not answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.check.doctor.runner import Finding, Patient
from rlhf.check.resources import count_gpus, joins_a_cluster
from rlhf.cluster import node_report
from rlhf.run.threads import in_thread

LEFT_ON_PURPOSE = (1, 4)  # Ray's NodeDeathInfo: expected termination, idle node drained by the autoscaler
ANSWER_S = 60.0  # a node imports nothing heavy for its answer
MIN_DRIVER, MIN_CAPABILITY = 580, 8.0  # CUDA 13; bfloat16 and flash attention
ACTIVE = "ACTIVE"  # the state of a port of a network card that works
DIED, SILENT = "died", "silent"


def describe() -> dict[str, Any]:
    """The installed packages, GPUs and network cards of the node that this runs on."""
    return {"installed": node_report.report(), "gpus": node_report.gpus(), "cards": node_report.cards()}


async def check_nodes(patient: Patient) -> Finding:
    """Every node answers and has the package versions of this machine; dead nodes are named."""
    here = await in_thread(describe)
    patient.nodes = {here["installed"]["node"]: here}
    if not joins_a_cluster(patient.config):
        return Finding("ok", "this machine alone: the run starts a Ray of its own")
    address = patient.config.cluster.ray_address or os.environ["RAY_ADDRESS"]
    answers = await _ask_nodes(address)
    patient.nodes = {name: answer for name, answer in answers.items() if "installed" in answer}
    installed = [{**answer["installed"], "node": name} for name, answer in patient.nodes.items()]
    driver = {**here["installed"], "node": f"{here['installed']['node']} (driver)"}
    problems = [
        f"node {name} does not answer: {answer[SILENT]}" for name, answer in answers.items() if SILENT in answer
    ]
    problems += node_report.differences([driver, *installed])
    if problems:
        remedy = "install the package on all nodes from one checkout (make setup-gpu)"
        return Finding("fail", "\n".join(problems), remedy)
    text = f"{len(installed)} node(s) at {address}, all with rlhf {driver['rlhf']} and ray {driver['ray']}"
    if lost := [f"node {name} died: {answer[DIED]}" for name, answer in answers.items() if DIED in answer]:
        remedy = "start Ray again there, unless another node has taken its place"
        return Finding("warn", "\n".join([text, *lost]), remedy)
    return Finding("ok", text)


async def _ask_nodes(address: str) -> dict[str, dict[str, Any]]:
    """The answer of every node of a cluster, from a process that ends with this call."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlhf.check.doctor.nodes", address, str(ANSWER_S), stdout=pipe, stderr=pipe
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        raise RuntimeError(f"Ray at {address} is not reached: {lines[-1]}")
    answers: dict[str, dict[str, Any]] = json.loads(output.splitlines()[-1])
    return answers


async def check_gpus(patient: Patient) -> Finding:
    """The nodes have the GPUs of the config; GPUs and drivers are new enough; drivers agree, network cards are up."""
    by_node = {name: node["gpus"] for name, node in patient.nodes.items()}
    gpu_count = sum(len(gpus) for gpus in by_node.values())
    if patient.config.cluster.device == "cpu":
        needs = f"a GPU of compute capability {MIN_CAPABILITY} or higher and driver {MIN_DRIVER} or newer"
        return Finding("skip", f"cluster.device=cpu: this needs {needs}; {gpu_count} found")
    need = count_gpus(patient.config.roles())
    listed = "; ".join(
        f"{name}: {', '.join(f'{count} x {gpu}' for gpu, count in Counter(gpus).items()) or 'none'}"
        for name, gpus in by_node.items()
    )
    if gpu_count < need:
        remedy = "run `nvidia-smi` on each node to see why; or ask for fewer, or use configs/cpu.yaml"
        return Finding("fail", f"the config asks for {need} GPUs, there are {gpu_count} ({listed})", remedy)
    _, drivers, _, capabilities = map(set, zip(*(gpu.split(", ") for x in by_node.values() for gpu in x), strict=True))
    if old := [driver for driver in drivers if int(driver.split(".")[0]) < MIN_DRIVER]:
        return Finding("fail", listed, f"driver {old[0]} is too old for CUDA 13: install {MIN_DRIVER} or newer")
    if old := [capability for capability in capabilities if float(capability) < MIN_CAPABILITY]:
        remedy = f"compute capability {old[0]} is below {MIN_CAPABILITY}: use an A100 or newer, or hide it from Ray"
        return Finding("fail", listed, remedy)
    if len(drivers) > 1:
        return Finding("warn", f"drivers differ: {listed}", "install one driver on all nodes")
    if len(patient.nodes) > 1 and (problems := list(_card_problems(patient.nodes))):
        remedy = "`ibstat` on each node; repair its cards, or leave them out: NCCL_IB_HCA"
        return Finding("warn", "\n".join([listed, *problems]), remedy)
    return Finding("ok", listed)


def _card_problems(nodes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Nodes whose InfiniBand or RoCE cards are down, or that have none."""
    for name, node in nodes.items():
        down = [f"{card} ({state})" for card, state in node["cards"].items() if ACTIVE not in state]
        if len(down) == len(node["cards"]):
            yield f"{name} has no network card that is up, so NCCL uses TCP"
        elif down:
            yield f"{name}: {', '.join(down)}; its GPUs share the other cards"


def ask_cluster(address: str, deadline_s: float) -> dict[str, dict[str, Any]]:
    """Node name -> the result of `describe`, or `silent` or `died` with the reason."""
    import ray

    from rlhf.cluster.actors import check_address

    check_address(address)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    alive = [node for node in ray.nodes() if node["Alive"]]
    answers = asyncio.run(node_report.ask_nodes(alive, describe, deadline_s=deadline_s))
    nodes = ray.nodes()  # read after the answers: Ray lists a dead node as alive until it has missed five health checks
    names = node_report.node_names(nodes)
    gone = [node for node in nodes if not node["Alive"] and node["DeathReason"] not in LEFT_ON_PURPOSE]
    by_node = {names[node["NodeID"]]: {DIED: node["DeathReasonMessage"] or "no reason given"} for node in gone}
    for key, (answer, problem) in answers.items():
        by_node.setdefault(names[key], {SILENT: problem} if problem else answer)
    ray.shutdown()
    return by_node


if __name__ == "__main__":
    print(json.dumps(ask_cluster(sys.argv[1], float(sys.argv[2]))))
