"""Checks of the run's engines and learners: start, agreement, kernels, the parts of a step, memory, a checkpoint."""

from __future__ import annotations

import asyncio
import math
import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from rlhf.check.doctor.runner import Finding, NotCheckedError, Patient
from rlhf.check.memory import GIB, learner_memory, total
from rlhf.check.model_shape import shape_at
from rlhf.check.resources import quantity
from rlhf.check.start_checks import existing_run_folder, run_folder_problems
from rlhf.config.grpo import GRPOConfig
from rlhf.config.library_options import changes_numbers
from rlhf.config.program import with_values
from rlhf.log.reductions import merge_metrics
from rlhf.rollout.worker import to_rollout
from rlhf.sampling.requests import SamplingSettings
from rlhf.step.batch import broadcast_to_tokens, make_batch
from rlhf.step.minibatches import plan_epochs
from rlhf.types import (
    PolicyTargets,
    Prompt,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepBatch,
    TokenSequence,
    VersionSpan,
)

if TYPE_CHECKING:
    from rlhf.cluster.engines import Engines

HEADS = (8, 2, 64)  # heads, key heads, width of a head; for models whose sizes are not known
VOCABULARY, HIDDEN = 32_768, 1024
SAMPLES, RESPONSE_TOKENS = 4, 64  # of each prompt of the examined step
CYCLES = 2
MICROBATCHES = 2  # of each learner: the second one adds to the gradients of the first
LONGEST_ON_CPU, BUDGET_ON_CPU = 256, 512  # tokens of a sequence and of a microbatch
PEAK_FACTOR = 1.25  # times --plan's estimate: a peak above it shows that the estimate is wrong
LITTLE_MEMORY = 0.05  # of the host's memory


async def check_start(patient: Patient) -> Finding:
    """Start Ray, engines and learners of the config; later checks use them."""
    from rlhf.cluster.cluster import Cluster
    from rlhf.cluster.engines import Engines

    config, _ = patient.config.cluster, patient.prompts  # later checks need prompts
    cluster = Cluster(patient.config, compare_nodes=False)  # `check_nodes` has done so
    await patient.cleanup.enter_async_context(cluster)
    patient.engines = await patient.cleanup.enter_async_context(Engines(cluster, patient.config))
    started = ", ".join(quantity(role.count, role.name) for role in patient.config.roles())
    return Finding("ok", f"{started} on {config.device}")


async def check_agreement(patient: Patient) -> Finding:
    """The canary of a run: engines and learners agree on log-probs, also after all weights are perturbed.

    Where engines sleep, they agree on what the engines sample after that too.
    """
    from rlhf.cluster.canary import Canary

    config = patient.config
    canary = Canary(
        patient.engines, patient.prompts, dtype=config.model.dtype, max_tokens=config.max_sequence_tokens,
        noise_seed=config.noise_seed, own_options=changes_numbers(config.rollout.engine),
        return_support=bool(config.rollout.restriction),
    )  # fmt: skip
    await canary.measure_noise()
    metrics = await canary.check_start(0)
    difference, patient.canary = metrics["sync/canary_difference"], canary
    text = f"{config.model.dtype}: mean |log-prob difference| {difference:.2g}, tolerance {canary.tolerance:.2g}; "
    text += "engines followed weights that were all perturbed, and back"
    if (sampled := metrics.get("sync/sampled_difference")) is not None:
        text += f"; on tokens that they sampled after a sleep {sampled:.2g}"
    return Finding("ok", text)


async def check_kernels(patient: Patient) -> Finding:
    """The kernels of every learner, forward and backward, against float32.

    Packed attention of the model's sizes with shared beginnings, the fused head at its vocabulary, and tiny packed
    models (dense, gated delta rule, Mamba 2, short convolution) against single sequences.
    """
    from rlhf.check.doctor import on_rank

    engines, dtype = patient.engines, patient.config.model.dtype
    shape = shape_at(patient.config.model.path)
    heads = HEADS if shape is None else (shape.heads, shape.kv_heads, shape.head_dim)
    head = (VOCABULARY, HIDDEN) if shape is None else (shape.vocabulary, shape.hidden)
    cases: dict[str, tuple[Callable[..., float], tuple[int | str, ...]]] = {
        f"attention ({heads[0]} heads of {heads[2]}, {heads[1]} for keys)": (on_rank.attention_error, heads),
        f"head (vocabulary {head[0]:,}, hidden {head[1]:,})": (on_rank.head_error, head),
        **{kind: (on_rank.model_error, (kind,)) for kind in on_rank.TINY_MODELS},
    }
    await engines.sleep_if_colocated()
    errors = {}
    for text, (function, sizes) in cases.items():
        by_rank = await engines.learners.call(lambda learner: learner.apply(function, *sizes, dtype))  # noqa: B023
        errors[text] = max(by_rank, key=lambda error: math.inf if math.isnan(error) else error)
    bound = on_rank.TOLERANCE[dtype]
    text = f"{dtype} against float32, relative errors, tolerance {bound:g}: "
    text += ", ".join(f"{name} {error:.2g}" for name, error in errors.items())
    if not all(error <= bound for error in errors.values()):
        remedy = "make setup-gpu; a kernel of another build or version computes something else here"
        return Finding("fail", text, remedy)
    return Finding("ok", text)


def _targets(batch: StepBatch, old: np.ndarray) -> PolicyTargets:
    advantages = np.where(np.arange(len(batch.rewards)) % 2, -1.0, 1.0)
    return PolicyTargets(broadcast_to_tokens(batch, advantages), old, None)


def _step_batch(patient: Patient, rollouts: list[Rollout]) -> StepBatch:
    """The rollouts as the group of one prompt of the data; its row is that of them all for a loss that reads rows."""
    samples = tuple(ScoredRollout(rollout, "", "", 0.0, {}, "ok") for rollout in rollouts)
    group = RolloutGroup(patient.prompts[0], samples)
    return make_batch([group], mask_truncated=False, policy_loss=patient.config.algo.policy_loss)


async def _sample(engines: Engines, prompts: Sequence[Prompt], settings: SamplingSettings) -> list[Rollout]:
    """SAMPLES rollouts of each prompt, over all engines."""

    async def sample(prompt: Prompt) -> list[Rollout]:
        completions = await engines.choice.generate(prompt.token_ids, settings, samples=SAMPLES, what=prompt.id)
        return [to_rollout(prompt, sample, completion) for sample, completion in enumerate(completions)]

    return [rollout for group in await asyncio.gather(*map(sample, prompts)) for rollout in group]


async def check_update(patient: Patient) -> Finding:
    """Every ratio of sampled rollouts is exactly 1 before the update, and a learning rate of 0 moves no weight.

    If the old policy is the engine's, the ratio contains the engine's rounding and is not judged.
    """
    from rlhf.check.doctor import on_rank

    engines, config = patient.engines, patient.config
    length = min(RESPONSE_TOKENS, config.rollout.max_response_tokens)
    settings = SamplingSettings(config.rollout.temperature, length, **config.rollout.restriction)
    await engines.wake_if_asleep(0)
    batch = _step_batch(patient, await _sample(engines, patient.prompts, settings))
    await engines.sleep_if_colocated()
    await engines.learners.start_step(batch, plan_epochs(batch, config, step=0)[:1])
    (old,) = await engines.learners.compute(lambda learner: learner.apply(on_rank.old_logprobs))
    assert old is not None
    patient.targets = _targets(batch, old)
    by_rank = await engines.learners.call(lambda learner: learner.apply(on_rank.update, patient.targets, 0.0))
    metrics = {name: m.value() for name, m in merge_metrics([updated.metrics for updated in by_rank]).items()}
    ratio, kl, engine_kl = (metrics[f"policy/{name}"] for name in ("ratio_max", "kl_old", "engine_kl"))
    text = f"{len(batch.rewards)} rollouts: largest ratio {ratio:.9g}, KL to the engines {engine_kl:.2g}"
    if config.algo.old_policy == "learner" and (ratio != 1.0 or kl != 0.0):
        remedy = "the same microbatch gives other log-probs in a second pass: a kernel is not deterministic forward"
        return Finding("fail", f"{text}, KL to the old policy {kl:.2g}, before any update", remedy)
    if moved := by_rank[0].moved:
        remedy = "an update must not change weights by itself: is a buffer of the model updated in its forward?"
        return Finding("fail", f"{text}; a learning rate of 0 moves {', '.join(moved[:3])}", remedy)
    return Finding("ok", f"{text}; a learning rate of 0 moves no bit")


async def check_cycle(patient: Patient) -> Finding:
    """The parts of a step, twice: sleep, update, wake, send, canary; with the free memory after each.

    Here an update has used the memory that sleeping engines gave up, so they sample for the canary once more.
    """
    from rlhf.check.doctor import on_rank

    engines, config, canary, targets = patient.engines, patient.config, patient.canary, patient.targets
    lr = config.learner.optimizer.lr

    async def free() -> str:
        return f"{min(await engines.learners.call(lambda learner: learner.apply(on_rank.free_bytes))) / GIB:.1f}"

    lines: list[str] = []
    moved: tuple[str, ...] = ()
    for cycle in range(1, CYCLES + 1):
        await engines.sleep_if_colocated()
        asleep = await free()
        (updated, *_) = await engines.learners.call(lambda learner: learner.apply(on_rank.update, targets, lr))
        moved, after_update = updated.moved, await free()
        await engines.send_weights(cycle)
        difference = (await canary.check(cycle))["sync/canary_difference"]
        sampled = f", on sampled tokens {await canary.check_sampled(cycle):.2g}" if engines.sleeps else ""
        lines.append(
            f"{cycle}: GiB free {asleep} before the update, {after_update} after it, {await free()} after the send; "
            f"{len(moved)} of {updated.tensors} tensors moved; canary {difference:.2g}{sampled}"
        )
    sleeps = "engines slept" if config.cluster.placement == "colocated" else "no sleep: cluster.placement=separate"
    text = "\n".join([f"{sleeps}; update at {lr:g}, {engines.transport}, canary", *lines])
    if lr and not moved:
        return Finding("fail", text, f"updates at learner.optimizer.lr={lr:g} do not reach the model's weights")
    return Finding("ok", text)


def _full_microbatches(config: GRPOConfig, ids: np.ndarray) -> tuple[GRPOConfig, list[Rollout]]:
    """A config with one minibatch, and its rollouts: full microbatches of the longest sequences, drawn from `ids`."""
    each, longest = config.learner.max_tokens_per_microbatch, config.max_sequence_tokens
    if config.cluster.device == "cpu":
        each, longest = min(each, BUDGET_ON_CPU), min(longest, LONGEST_ON_CPU)
    budget = each * config.cluster.sequence_parallel
    longest = min(longest, budget)
    prompt = max(1, longest - config.rollout.longest)
    mask, zeros = np.arange(longest) >= prompt, np.zeros(longest, np.float32)
    rng, rollouts = np.random.default_rng(0), []
    for sample in range(MICROBATCHES * config.cluster.data_shards * (budget // longest)):
        tokens = rng.choice(ids, longest).astype(np.int32)
        sequence = TokenSequence(tokens, mask, zeros, (VersionSpan(prompt, longest, 0),))
        rollouts.append(Rollout("doctor", 0, sample, (sequence,), "stop"))
    learner = {"max_tokens_per_microbatch": each, "minibatches_per_epoch": 1}
    return with_values(config, learner=learner), rollouts


async def check_microbatch(patient: Patient) -> Finding:
    """Full microbatches fit in memory, with a peak that is about the one that --plan estimates."""
    from rlhf.check.doctor import on_rank

    engines, ids = patient.engines, np.concatenate([prompt.token_ids for prompt in patient.prompts])
    config, rollouts = _full_microbatches(patient.config, ids)
    batch = _step_batch(patient, rollouts)
    await engines.sleep_if_colocated()
    await engines.learners.start_step(batch, plan_epochs(batch, config, step=0)[:1])
    zeros = np.zeros(len(batch.tokens.token_ids), np.float32)
    by_rank = await engines.learners.call(lambda learner: learner.apply(on_rank.update, _targets(batch, zeros), 0.0))
    peak = max(updated.peak_bytes for updated in by_rank) / GIB
    text = f"{config.row_tokens:,} tokens: peak memory {peak:.1f} GiB"
    shape = shape_at(config.model.path)
    if shape is None:
        return Finding("ok", f"{text}; the model's sizes are not known")
    # the last part, memory of CUDA and NCCL, is not in torch's peak
    parts = learner_memory(shape, config)
    planned = total(parts if config.cluster.device == "cpu" else parts[:-1]) / GIB
    text += f", --plan {planned:.1f}"
    if peak > PEAK_FACTOR * planned:
        return Finding("warn", text, "--plan estimates too little here: report it, with this table")
    return Finding("ok", text)


async def check_checkpoint(patient: Patient) -> Finding:
    """Write a checkpoint where the run would, read it back, and remove it."""
    engines, config = patient.engines, patient.config
    for problem in run_folder_problems(config):
        raise NotCheckedError(problem)
    existing = existing_run_folder(config)
    folder = Path(tempfile.mkdtemp(prefix="rlhf-doctor-", dir=existing))
    try:
        await engines.cluster.checkpoints.save(folder)
        await engines.cluster.checkpoints.finish_save()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9
        await engines.sleep_if_colocated()
        await engines.cluster.load(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Finding("ok", f"{size:.2f} GB written to {existing} and read back")


async def check_memory(patient: Patient) -> Finding:
    """Host memory: total, lowest free amount between the checks, and how much may be locked."""
    have, least = psutil.virtual_memory().total, min(patient.least_free, psutil.virtual_memory().available)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    text = f"{have / GIB:.1f} GiB, at least {least / GIB:.1f} free; memlock "
    text += "unlimited" if unlimited else f"{locked / 2**20:.2g} MiB"
    if least < LITTLE_MEMORY * have:
        remedy = "the run may be killed: use fewer engines or learners, or a smaller model"
        return Finding("warn", text, remedy)
    if patient.config.cluster.device == "cuda" and len(vars(patient).get("nodes", ())) > 1 and not unlimited:
        remedy = "InfiniBand needs unlimited locked memory: `ulimit -l unlimited` on all nodes (docker/README.md)"
        return Finding("warn", text, remedy)
    return Finding("ok", text)
