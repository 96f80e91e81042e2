"""Checks of what goes between GPUs: network cards, all-reduce, weight transfer, and their share of a step."""

from __future__ import annotations

import math
import time

from rlhf.check import speed as account
from rlhf.check.doctor.runner import Finding, Patient, Status, slowest_of
from rlhf.check.model_shape import ModelShape, shape_at
from rlhf.config.grpo import GRPOConfig

REDUCED_ELEMENTS = {"cuda": 256 * 2**20, "cpu": 16 * 2**20}  # float32: 1 GiB, 64 MiB
SLOW_GB_PER_SECOND = 5.0  # between GPUs; NVLink and InfiniBand are much faster, TCP over a wrong interface is slower
SLOW_TRANSFER_S = 30.0
MUCH, TOO_MUCH = 0.1, 0.5  # of a step, for gradients or for weights on their way: warns, fails
ACTIVE = "ACTIVE"  # the state of a port of a network card that works
REMEDY = "check the network: NCCL_DEBUG=INFO prints which one is used, NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose it"


async def check_cards(patient: Patient) -> Finding:
    """On several nodes: all InfiniBand or RoCE cards of each have a port that is up."""
    if patient.config.cluster.device == "cpu" or len(patient.nodes) == 1:
        return Finding("ok", "no network card is needed: one node, or learners on CPU")
    lines, problems = [], []
    for name, node in patient.nodes.items():
        up = [card for card, state in node["cards"].items() if ACTIVE in state]
        down = {card: state for card, state in node["cards"].items() if ACTIVE not in state}
        lines.append(f"{name}: {len(up)} of {len(node['cards'])} InfiniBand or RoCE cards are up")
        if not up:
            problems.append(f"{name} has no card that is up, so NCCL uses TCP")
        elif down:
            listed = ", ".join(f"{card} ({state})" for card, state in down.items())
            problems.append(f"{name}: {listed}; GPUs share what is up. Repair them, or leave them out: NCCL_IB_HCA")
    return Finding("warn" if problems else "ok", "\n".join(lines), "; ".join(problems))


async def check_collective(patient: Patient) -> Finding:
    """Bandwidth of an all-reduce between the learners: 2 (n - 1) / n x bytes / seconds, as in NCCL's tests."""
    from rlhf.check.doctor import on_rank

    engines = patient.engines
    ranks = len(engines.learners.actors)
    if ranks == 1:
        patient.gb_per_second = math.inf
        return Finding("ok", "one learner: nothing to reduce")
    elements = REDUCED_ELEMENTS[patient.config.cluster.device]
    await engines.sleep_if_colocated()
    by_rank = await engines.learners.call("apply", on_rank.time_all_reduce, elements)
    seconds = max(by_rank)
    size = 4 * elements
    speed = 2 * (ranks - 1) / ranks * size / seconds / 1e9
    patient.gb_per_second = speed
    text = f"{ranks} learners, all-reduce of {size / 1e6:.0f} MB in {slowest_of(by_rank)}: {speed:.2f} GB/s"
    if patient.config.cluster.device == "cuda" and speed < SLOW_GB_PER_SECOND:
        return Finding("warn", text, REMEDY)
    return Finding("ok", text)


async def check_transfer(patient: Patient) -> Finding:
    """Seconds of a weight transfer into all engines, from pause to resume.

    A first transfer warms up, except where a second one would send nothing, because nothing has changed.
    """
    engines = patient.engines
    size = sum(meta.bytes for meta in (await engines.learners.call("metadata"))[0])
    if not patient.config.sends_changes:
        await engines.send_weights(0)
    began = time.monotonic()
    await engines.send_weights(0)
    seconds = patient.transfer_s = time.monotonic() - began
    text = f"{size / 1e6:,.1f} MB by {engines.transport} in {seconds:.2f} s: {size / seconds / 1e9:.3f} GB/s"
    if seconds > SLOW_TRANSFER_S:
        return Finding("warn", text, "every step waits this long: use a faster network between learners and engines")
    return Finding("ok", text)


async def check_step(patient: Patient) -> Finding:
    """The share of a step in which this run's gradients and weights are on their way, at the measured speeds."""
    config, shape = patient.config, shape_at(patient.config.model.path)
    if config.cluster.device == "cpu" or shape is None:
        return Finding("ok", "not judged: on CPU, or the model's sizes are not known")
    return judged_step(
        config, shape, microbatch_s=patient.microbatch_s, gb_per_second=patient.gb_per_second,
        transfer_s=patient.transfer_s,
    )  # fmt: skip


def judged_step(
    config: GRPOConfig, shape: ModelShape, *, microbatch_s: float, gb_per_second: float, transfer_s: float
) -> Finding:
    """What learners send, as if nothing overlapped, and the transfer over the seconds of a step without sampling.

    Args:
        microbatch_s: forward and backward of a full microbatch.
        gb_per_second: bytes that a learner sends per second of an all-reduce.
    """
    computing = sending = 0.0
    for role, training in config.trained_roles():
        microbatches = account.microbatches_per_update(config, training) * training.minibatches_per_epoch
        passes = training.epochs_per_step + account.FORWARD_SHARE * account.forward_passes(config)
        computing = max(computing, passes * microbatches * microbatch_s)
        sending += account.communicated_bytes(role, training, config, shape) / gb_per_second / 1e9
    step = computing + sending + transfer_s
    shares = {"gradients": sending / step, "weights": transfer_s / step}
    text = (
        f"a step computes {computing:,.1f} s; gradients between learners {sending:,.1f} s ({shares['gradients']:.0%}), "
        f"weights to the engines {transfer_s:,.1f} s ({shares['weights']:.0%})"
    )
    stage = (
        "" if config.learner.zero_stage == 1 else "learner.zero_stage=1 sends the fewest bytes if it fits (--plan); "
    )
    remedies = {
        "gradients": f"{stage}larger minibatches; {REMEDY}",
        "weights": f"larger steps, or a faster network between learners and engines; {REMEDY}",
    }
    worst = max(shares, key=lambda name: shares[name])
    status: Status = "fail" if shares[worst] > TOO_MUCH else "warn" if shares[worst] > MUCH else "ok"
    return Finding(status, text, "" if status == "ok" else remedies[worst], shares)
