"""The text of --plan: what follows from a config. Plain aligned lines, at most 100 columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import psutil

from rlhf.algo.schedules import learning_rate
from rlhf.config.grpo import GRPOConfig
from rlhf.config.load import resolved_yaml
from rlhf.config.model_folder import looks_local
from rlhf.config.printing import printable
from rlhf.config.roles import Training
from rlhf.plan.data_rows import prompts_per_epoch
from rlhf.plan.gpus import with_gpus_here
from rlhf.plan.hours import expected_time
from rlhf.plan.layout import draw, example_layout
from rlhf.plan.memory import (
    GIB,
    EngineMemory,
    Part,
    RoleMemory,
    checkpoint_bytes,
    engine_memory,
    memory_of_roles,
    total,
)
from rlhf.plan.model_shape import ModelShape, config_at, model_shape, source_at, stored_tensors
from rlhf.plan.plan_warnings import arithmetic_warnings, memory_warnings, model_warnings
from rlhf.plan.resources import count_gpus
from rlhf.plan.text import counted, rows, wrapped


def print_plan(config: GRPOConfig, *, plan: bool = True, whole_config: bool = False) -> None:
    """Print the plan, and the config with every default."""
    title = f"Plan of run.dir={config.run.dir}; --print-config prints every key with its value\n\n"
    parts = ([title + plan_text(config)] if plan else []) + ([resolved_yaml(config)] if whole_config else [])
    print_text("\n".join(parts))


def print_text(text: str) -> None:
    """Print a page; a pipe that is closed early, as by `head`, is no error."""
    try:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plan_text(config: GRPOConfig, *, model: dict[str, Any] | None = None) -> str:
    """All sections of the plan.

    Args:
        model: config.json of the model, instead of the one at `model.path`.
    """
    config, gpu_memory = with_gpus_here(config) if config.cluster.device == "cuda" else (config, "")
    stored = stored_tensors(config.model.path) if model is None else None
    model = config_at(config.model.path) if model is None else model
    prompts = prompts_per_epoch(config.data)
    warnings = list(arithmetic_warnings(config, prompts))
    sections = [
        ("Batches", _batches(config, prompts)),
        ("Learning rate", _learning_rate(config)),
        ("Placement", _placement(config, gpu_memory)),
    ]
    if time := expected_time(config):
        sections.append(("Time, expected", rows(*time)))
    if model is None:
        sections.append(("Memory", wrapped("  ", _no_model(config.model.path))))
    else:
        warnings += model_warnings(config, model)
        try:
            shape = model_shape(model, stored)
        except ValueError as error:
            sections.append(("Memory", wrapped("  ", f"no estimate: {error}.")))
        else:
            estimates, engine = memory_of_roles(config, shape), engine_memory(shape, config)
            sections.append(("Memory, estimated", _memory(config, shape, estimates, engine)))
            warnings += memory_warnings(config, estimates, engine, shape, psutil.virtual_memory().total / GIB)
    if warnings:
        sections.append(("Warnings", [line for warning in warnings for line in wrapped("  - ", warning)]))
    return "\n\n".join(f"{title}\n" + "\n".join(lines) for title, lines in sections) + "\n"


def _batches(config: GRPOConfig, prompts: int | str) -> list[str]:
    rollout, learner = config.rollout, config.learner
    per_step, longest = config.rollouts_per_step, config.max_sequence_tokens
    minibatch = -(-per_step // learner.minibatches_per_epoch)
    budget = learner.max_tokens_per_microbatch
    microbatches = -(-minibatch // (budget // longest))
    by_role = [_updates(role.name, training) for role, training in config.trained_roles()]
    passes = [name for name, on in (("old", config.needs_old_logprobs_pass), ("ref", config.needs_reference)) if on]
    return rows(
        ("rollouts per step", f"{rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt} = {per_step:,}"),
        ("rollouts in total", f"{counted(config.run.steps, 'step')} x {per_step:,} = {config.run.steps * per_step:,}"),
        ("minibatch", f"{per_step:,} / {learner.minibatches_per_epoch} = {per_step / learner.minibatches_per_epoch:,g}"
         " rollouts, one optimizer step each"),
        *by_role,
        ("data", _epochs(config, prompts)),
        ("longest sequence", f"{config.data.max_prompt_tokens:,} prompt + {rollout.max_response_tokens:,} response = "
         f"{longest:,} tokens"),
        ("tokens per step, at most", f"{per_step:,} x {longest:,} = {per_step * longest:,}, of which sampled "
         f"{per_step * rollout.max_response_tokens:,}"),
        ("microbatches, at most", f"{microbatches:,} of {budget:,} tokens per minibatch, "
         f"{-(-microbatches // config.cluster.learners):,} per learner"),
        ("passes before the update", f"log-probs of {' and '.join(passes)} policy" if passes else "none"),
    )  # fmt: skip


def _epochs(config: GRPOConfig, prompts: int | str) -> str:
    if isinstance(prompts, str):
        return prompts
    if not prompts:
        return "no rows"
    each, steps = config.rollout.prompts_per_step, config.run.steps
    return (
        f"{prompts:,} rows / {each:,} = {prompts / each:,.1f} steps per epoch; "
        f"{counted(steps, 'step')} = {steps * each / prompts:,.2f} epochs"
    )


def _updates(name: str, training: Training) -> tuple[str, str]:
    steps = counted(training.steps - training.idle_steps, "step")
    epochs = counted(training.epochs_per_step, "epoch")
    minibatches = counted(training.minibatches_per_epoch, "minibatch")
    note = f"; none in the first {counted(training.idle_steps, 'step')}" if training.idle_steps else ""
    return f"optimizer steps, {name}", f"{steps} x {epochs} x {minibatches} = {training.total_updates:,}{note}"


def _learning_rate(config: GRPOConfig) -> list[str]:
    lines = []
    for role, training in config.trained_roles():
        schedule, lr = training.section.schedule, training.section.optimizer.lr
        warmup, last = training.warmup_updates, training.total_updates
        shape = f"{schedule.name}, peak {lr:g}"
        lines.append((f"schedule, {role.name}", shape + (f", warm-up of {warmup:,} optimizer steps" if warmup else "")))
        for name, update in (("first", 1), ("middle", -(-last // 2)), ("last", last)):
            rate = learning_rate(update, **training.schedule_arguments)
            lines.append((f"{name} optimizer step", f"{rate:.4g}  (step {update:,})"))
    return rows(*lines)


def _placement(config: GRPOConfig, gpu_memory: str) -> list[str]:
    cluster, roles = config.cluster, config.roles()
    if cluster.device == "cpu":
        cpus = sum(role.count * role.cpus for role in roles)
        who = ", ".join(counted(role.count, role.name) for role in roles)
        return rows(("on CPU", f"{who}; CPU cores reserved: {cpus:g}"))
    nodes = example_layout(roles, cluster)
    kinds = [("GPUs", f"{count_gpus(roles)} on {counted(len(nodes), 'node')} of {cluster.gpus_per_node}")]
    kinds.append(("memory of a GPU", gpu_memory))
    for role in roles:
        each = f"{counted(role.gpus, 'GPU')} each" if role.gpus else "on the GPUs of the learners"
        stage = f", ZeRO stage {role.training.section.zero_stage}" if role.training is not None else ""
        kinds.append((f"{role.name}s", f"{role.count}, {each}{stage}"))
    lines = rows(*kinds)
    if cluster.placement == "separate" and config.rollout.max_policy_lag == 0:
        lines.append("  rollout.max_policy_lag=0: engines and learners take turns, so one of the two is always idle.")
    lines.append("  One possible layout. Ray chooses the nodes at the start; the GPUs of one engine are on one node:")
    return [*lines, *draw(nodes)]


def _memory(config: GRPOConfig, shape: ModelShape, estimates: Sequence[RoleMemory], engine: EngineMemory) -> list[str]:
    cluster, longest = config.cluster, config.max_sequence_tokens
    at_once = min(config.rollout.max_concurrent_sequences, -(-config.rollouts_per_step // cluster.engines))
    each = "one GPU" if cluster.device == "cuda" else "processes"
    lines = rows(
        ("model", f"{shape.model_type}, {shape.parameters:,} parameters"),
        *_sources(config),
        ("checkpoint on disk", _checkpoint(config, shape)),
    )
    for estimate in estimates:
        title = f"{'an' if estimate.role.name[0] in 'aeiou' else 'a'} {estimate.role.name}"
        lines += _parts(f"{title}, {each}", estimate.parts) if estimate.parts else _unknown(title)
    return [
        *lines,
        *rows(
            ("the KV cache holds", f"{engine.kv_tokens:,} tokens of {engine.kv_bytes_per_token / 1024:,.1f} KiB = "
             f"{engine.kv_tokens // longest:,} sequences of {longest:,}; {at_once:,} at once"),
        ),
    ]  # fmt: skip


def _sources(config: GRPOConfig) -> list[tuple[str, str]]:
    """A row for each place that the sizes of the models come from, with the names of hub models."""
    sources: dict[str, list[str]] = {}
    for path in dict.fromkeys(role.model for role in config.roles()):
        sources.setdefault(source_at(path), []).extend([] if looks_local(path) else [path])
    named = {source: f" ({', '.join(names)})" if names else "" for source, names in sources.items() if source}
    return [("sizes from", f"{source}{names}") for source, names in named.items()]


def _checkpoint(config: GRPOConfig, policy: ModelShape) -> str:
    size, every = checkpoint_bytes(config, policy), config.checkpoint_every
    if size is None:
        return "no estimate"
    reference = ", and a changing reference" if config.reference_moves else ""
    interval = "step" if every == 1 else f"{every} steps"
    when = f"one every {interval}, {config.checkpoint.kept} are kept" if every else "none is saved"
    return f"{size / GIB:.1f} GiB (float32 weights and moments of all trained models{reference}); {when}"


def _unknown(name: str) -> list[str]:
    return [f"  {name}: no estimate, its config.json is not found or not supported"]


def _parts(title: str, parts: tuple[Part, ...]) -> list[str]:
    lines = [f"  {title}"]
    for part in parts:
        lines += wrapped(f"    {part.name:<34}{part.size / GIB:8.2f} GiB  ", part.how)
    return [*lines, f"    {'total':<34}{total(parts) / GIB:8.2f} GiB"]


def _no_model(path: str) -> str:
    if looks_local(path):
        return f"no estimate: there is no config.json in model.path={path}. Give a folder in Hugging Face format."
    return (
        f"no estimate: config.json of model.path={path} is not in the hub cache of this machine. "
        f"Fetch it with `hf download {path} config.json`, or give a local folder."
    )
