"""Checks of the run's own engines and learners: they start, exchange gradients, take weights and agree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rlhf.doctor.examination import Finding, NotCheckedError, Patient
from rlhf.plan.memory import BYTES

if TYPE_CHECKING:
    from rlhf.cluster.cluster import Cluster

REDUCED_ELEMENTS = 16 * 2**20  # float32: 64 MiB, what bandwidth and not latency decides
SLOW_GB_A_SECOND = 5.0  # between GPUs; NVLink and InfiniBand carry many times that, TCP over a wrong interface less
SLOW_TRANSFER_S = 30.0


async def check_start(patient: Patient) -> Finding:
    """Ray, engines and learners of the config start; later checks use them."""
    from rlhf.cluster.cluster import Cluster

    if patient.prompts is None:
        raise NotCheckedError("model or data could not be loaded")
    if patient.nodes is None:
        raise NotCheckedError("the nodes did not answer")
    config = patient.config.cluster
    cluster = Cluster(patient.config, compare_nodes=False)  # `check_nodes` has done so
    patient.cluster = await patient.at_end.enter_async_context(cluster)
    return Finding("ok", f"{config.engines} engine(s), {config.learners} learner(s) on {config.device}")


def _started(patient: Patient) -> Cluster:
    if patient.cluster is None:
        raise NotCheckedError("engines and learners did not start")
    return patient.cluster


async def check_collective(patient: Patient) -> Finding:
    """Bandwidth of an all-reduce between the learners: 2 (n - 1) / n x bytes / seconds, as NCCL's tests count it."""
    cluster = _started(patient)
    ranks = len(cluster.learners.actors)
    if ranks == 1:
        return Finding("ok", "one learner: nothing to exchange")
    seconds = max(await cluster.learners.call("time_all_reduce", REDUCED_ELEMENTS))
    size = 4 * REDUCED_ELEMENTS
    speed = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    found = f"{ranks} learners, all-reduce of {size / 1e6:.0f} MB in {seconds * 1e3:.1f} ms: {speed:.2f} GB/s"
    if patient.config.cluster.device == "cuda" and speed < SLOW_GB_A_SECOND:
        remedy = "the wrong network? NCCL_SOCKET_IFNAME, NCCL_IB_HCA; NCCL_DEBUG=INFO says what it uses"
        return Finding("warn", found, remedy)
    return Finding("ok", found)


async def check_transfer(patient: Patient) -> Finding:
    """Time of a weight transfer into all engines, from pause to resume, after one that warms up."""
    cluster = _started(patient)
    metadata = (await cluster.learners.call("metadata"))[0]
    size = sum(meta.numel * BYTES[meta.dtype] for meta in metadata)
    await cluster.send_weights(0)
    began = time.monotonic()
    await cluster.send_weights(0)
    seconds = time.monotonic() - began
    found = f"{size / 1e6:,.1f} MB by {cluster.transfer_backend} in {seconds:.2f} s: {size / seconds / 1e9:.3f} GB/s"
    if seconds > SLOW_TRANSFER_S:
        return Finding("warn", found, "every step waits this long: a faster network between learners and engines")
    return Finding("ok", found)


async def check_agreement(patient: Patient) -> Finding:
    """The canary of a run: log-probs of engines and learners on the model, and after weights that all moved."""
    from rlhf.cluster.canary import Canary

    cluster, config = _started(patient), patient.config
    assert patient.prompts is not None
    canary = Canary(patient.prompts, dtype=config.model.dtype, max_tokens=config.max_sequence_tokens)
    await canary.measure_noise(cluster)
    metrics = await canary.check_start(cluster, 0)
    difference = metrics["sync/canary_difference"]
    return Finding(
        "ok",
        f"{config.model.dtype}: mean |log-prob difference| {difference:.2g}, tolerance {canary.tolerance:.2g}; "
        "engines followed weights that were all perturbed, and back",
    )
