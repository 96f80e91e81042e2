"""Checks of the run's engines and learners: they start, reduce gradients, transfer weights and agree."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rlhf.doctor.examination import Finding, NotCheckedError, Patient

if TYPE_CHECKING:
    from rlhf.cluster.engines import Engines

REDUCED_ELEMENTS = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # float32: 1 GiB, 64 MiB
SLOW_GB_PER_SECOND = 5.0  # between GPUs; NVLink and InfiniBand are much faster, TCP over a wrong interface is slower
SLOW_TRANSFER_S = 30.0


async def check_start(patient: Patient) -> Finding:
    """Start Ray, engines and learners of the config; later checks use them."""
    from rlhf.cluster.cluster import Cluster
    from rlhf.cluster.engines import Engines

    if patient.prompts is None:
        raise NotCheckedError("model or data could not be loaded")
    if patient.nodes is None:
        raise NotCheckedError("the nodes did not answer")
    config = patient.config.cluster
    cluster = Cluster(patient.config, compare_nodes=False)  # `check_nodes` has done so
    await patient.at_end.enter_async_context(cluster)
    patient.engines = await patient.at_end.enter_async_context(Engines(cluster, patient.config))
    return Finding("ok", f"{config.engines} engine(s), {config.learners} learner(s) on {config.device}")


def started(patient: Patient) -> Engines:
    if patient.engines is None:
        raise NotCheckedError("engines and learners did not start")
    return patient.engines


async def check_collective(patient: Patient) -> Finding:
    """Bandwidth of an all-reduce between the learners: 2 (n - 1) / n x bytes / seconds, as in NCCL's tests."""
    from rlhf.doctor import on_rank

    engines = started(patient)
    ranks = len(engines.learners.actors)
    if ranks == 1:
        return Finding("ok", "one learner: nothing to reduce")
    elements = REDUCED_ELEMENTS[patient.config.cluster.device]
    await engines.sleep_if_colocated()
    seconds = max(await engines.learners.call("apply", on_rank.time_all_reduce, elements))
    size = 4 * elements
    speed = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    text = f"{ranks} learners, all-reduce of {size / 1e6:.0f} MB in {seconds * 1e3:.1f} ms: {speed:.2f} GB/s"
    if patient.config.cluster.device == "cuda" and speed < SLOW_GB_PER_SECOND:
        remedy = (
            "check the network: NCCL_DEBUG=INFO prints which one is used, NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it"
        )
        return Finding("warn", text, remedy)
    return Finding("ok", text)


async def check_transfer(patient: Patient) -> Finding:
    """Seconds of a weight transfer into all engines, from pause to resume; a first transfer warms up."""
    engines = started(patient)
    metadata = (await engines.learners.call("metadata"))[0]
    size = sum(meta.bytes for meta in metadata)
    await engines.send_weights(0)
    began = time.monotonic()
    await engines.send_weights(0)
    seconds = time.monotonic() - began
    text = f"{size / 1e6:,.1f} MB by {engines.transport} in {seconds:.2f} s: {size / seconds / 1e9:.3f} GB/s"
    if seconds > SLOW_TRANSFER_S:
        return Finding("warn", text, "every step waits this long: use a faster network between learners and engines")
    return Finding("ok", text)


async def check_agreement(patient: Patient) -> Finding:
    """The canary of a run: engines and learners agree on log-probs, also after all weights were perturbed."""
    from rlhf.cluster.canary import Canary

    config = patient.config
    assert patient.prompts is not None
    canary = Canary(
        started(patient),
        patient.prompts,
        dtype=config.model.dtype,
        max_tokens=config.max_sequence_tokens,
        noise_seed=config.noise_seed,
    )
    await canary.measure_noise()
    metrics = await canary.check_start(0)
    difference, patient.canary = metrics["sync/canary_difference"], canary
    return Finding(
        "ok",
        f"{config.model.dtype}: mean |log-prob difference| {difference:.2g}, tolerance {canary.tolerance:.2g}; "
        "engines followed weights that were all perturbed, and back",
    )
