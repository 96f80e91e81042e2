"""The text of --plan: the resolved config, then what follows from it. Plain aligned lines, at most 100 columns."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rlhf.algo.schedules import learning_rate
from rlhf.config.load import resolved_yaml
from rlhf.config.ppo import PPOConfig
from rlhf.config.run import GRPOConfig
from rlhf.data.model_files import local_model_config, looks_local
from rlhf.model_files import local_model_config, looks_local, window_problems
from rlhf.plan.checks import arithmetic_warnings, memory_warnings, model_warnings
from rlhf.plan.hours import FORWARD_SHARE, Expected, expected
from rlhf.plan.layout import draw, place
from rlhf.plan.memory import (
    GIB,
    Beside,
    EngineMemory,
    Part,
    checkpoint_bytes,
    critic_memory,
    engine_memory,
    learner_memory,
    reward_model_memory,
    total,
)
from rlhf.plan.model import ModelShape, model_shape
from rlhf.plan.text import counted, rows, wrapped


def print_plan(config: GRPOConfig) -> None:
    """Print the resolved config and the plan; a reader that closes the pipe early, such as `head`, is no error."""
    try:
        sys.stdout.write(resolved_yaml(config) + "\n" + plan_text(config))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plan_text(config: GRPOConfig, *, model: dict[str, Any] | None = None) -> str:
    """Everything after the config.

    Args:
        model: the model's config.json, where it is not to be looked up at `model.path`.
    """
    model = local_model_config(config.model.path) if model is None else model
    warnings = arithmetic_warnings(config)
    warnings += [f"{problem} The run will be refused." for problem in window_problems(config, model)]
    sections = [
        ("Batches", _batches(config)),
        ("Learning rate", _learning_rate(config)),
        ("Placement", _placement(config)),
    ]
    if (hours := expected(config)) is not None:
        sections.append(("Time, expected", _hours(config, hours)))
    if model is None:
        sections.append(("Memory", wrapped("  ", _no_model(config.model.path))))
    else:
        warnings += model_warnings(config, model)
        try:
            shape = model_shape(model)
        except ValueError as error:
            sections.append(("Memory", wrapped("  ", f"no estimate: {error}.")))
        else:
            estimates, engine = memory_of_roles(config), engine_memory(shape, config)
            sections.append(("Memory, estimated", _memory(config, shape, estimates, engine)))
            state = total(learner_state(shape, config))
            warnings += memory_warnings(config, estimates, engine, state, _host_gib())
    if warnings:
        sections.append(("Warnings", [line for warning in warnings for line in wrapped("  - ", warning)]))
    return "\n\n".join(f"{title}\n" + "\n".join(lines) for title, lines in sections) + "\n"


def _batches(config: GRPOConfig) -> list[str]:
    rollout, learner = config.rollout, config.learner
    per_step, longest = config.rollouts_per_step, config.max_sequence_tokens
    minibatch = -(-per_step // learner.minibatches_per_epoch)
    budget = learner.max_tokens_per_microbatch
    microbatches = -(-minibatch // (budget // longest))
    an_update = f"{counted(learner.epochs_per_step, 'epoch')} x {counted(learner.minibatches_per_epoch, 'minibatch')}"
    critic = []
    if isinstance(config, PPOConfig):
        steps, alone = config.run.steps, config.critic.warmup_steps
        and_alone = f"; alone in the first {counted(alone, 'step')}" if alone else ""
        its = f"{counted(config.critic_epochs_per_step, 'epoch')} x "
        its += counted(config.critic_minibatches_per_epoch, "minibatch")
        updates = f"{counted(steps, 'step')} x {its} = {config.critic_total_updates:,}{and_alone}"
        critic.append(("optimizer steps, critic", updates))
    passes = [name for name, on in (("old", config.needs_old_logprobs_pass), ("ref", config.needs_reference)) if on]
    return rows(
        ("rollouts a step", f"{rollout.prompts_per_step:,} prompts x {rollout.samples_per_prompt} = {per_step:,}"),
        ("rollouts in all", f"{counted(config.run.steps, 'step')} x {per_step:,} = {config.run.steps * per_step:,}"),
        ("minibatch", f"{per_step:,} / {learner.minibatches_per_epoch} = {per_step / learner.minibatches_per_epoch:,g}"
         " rollouts, one optimizer step each"),
        ("optimizer steps", f"{counted(config.total_updates // config.updates_per_step, 'step')} x {an_update} = "
         f"{config.total_updates:,}"),
        *critic,
        ("longest sequence", f"{config.data.max_prompt_tokens:,} prompt + {rollout.max_response_tokens:,} response = "
         f"{longest:,} tokens"),
        ("tokens a step, at most", f"{per_step:,} x {longest:,} = {per_step * longest:,}, of them sampled "
         f"{per_step * rollout.max_response_tokens:,}"),
        ("microbatches, at most", f"{microbatches:,} of {budget:,} tokens a minibatch, "
         f"{-(-microbatches // config.cluster.learners):,} a learner"),
        ("passes before the update", f"log-probs of {' and '.join(passes)} policy" if passes else "none"),
    )  # fmt: skip


def _learning_rate(config: GRPOConfig) -> list[str]:
    schedule, last = config.learner.schedule, config.total_updates
    shape = f"{schedule.name}, peak {config.learner.optimizer.lr:g}"
    if config.warmup_updates:
        shape += f", warm-up of {config.warmup_updates:,} optimizer steps"
    lines = [("schedule", shape)]
    if isinstance(config, PPOConfig):
        critic = config.critic
        lines.append(("schedule, critic", f"{critic.schedule.name}, peak {critic.optimizer.lr:g}"))
    for name, update in (("first", 1), ("middle", -(-last // 2)), ("last", last)):
        lr = learning_rate(
            update,
            total_updates=last,
            lr=config.learner.optimizer.lr,
            name=schedule.name,
            warmup_steps=config.warmup_updates,
            num_cycles=schedule.num_cycles,
            min_lr=schedule.min_lr,
            power=schedule.power,
        )
        lines.append((f"{name} optimizer step", f"{lr:.4g}  (step {update:,})"))
    return rows(*lines)


def _placement(config: GRPOConfig) -> list[str]:
    cluster = config.cluster
    if cluster.device == "cpu":
        ranks = cluster.learners + config.critics + config.reward_model_copies
        cpus = ranks * cluster.cpus_per_learner + cluster.engines * cluster.cpus_per_engine
        who = ", ".join(
            counted(number, name)
            for number, name in (
                (cluster.learners, "learner"), (config.critics, "critic"), (config.reward_model_copies, "reward model"),
                (cluster.engines, "engine"),
            ) if number
        )  # fmt: skip
        return rows(("on CPU", f"{who}; CPU cores reserved: {cpus:g}"))
    nodes = place(cluster, critics=config.critics, reward_models=config.reward_model_copies)
    gpus = cluster.learners + config.critics + config.reward_model_copies
    gpus += cluster.engines * cluster.tensor_parallel * (cluster.placement == "separate")
    kinds = [
        ("GPUs", f"{gpus} on {counted(len(nodes), 'node')} of {cluster.gpus_per_node}"),
        ("learners", f"{cluster.learners}, one a GPU, ZeRO stage {config.learner.zero_stage}"),
    ]
    if isinstance(config, PPOConfig):
        kinds.append(("critics", f"{config.critics}, one a GPU, ZeRO stage {config.critic.zero_stage}"))
    if config.reward_model_copies:
        kinds.append(("reward models", f"{config.reward_model_copies}, one a GPU"))
    lines = rows(*kinds, ("engines", f"{cluster.engines}, tensor parallel {cluster.tensor_parallel}"))
    if cluster.placement == "separate" and config.rollout.max_policy_lag == 0:
        note = "rollout.max_policy_lag=0: engines and learners take turns, so one kind of GPU is always idle."
        lines += wrapped("  ", note)
    return [*lines, *draw(nodes)]


def _hours(config: GRPOConfig, hours: Expected) -> list[str]:
    cluster, plan = config.cluster, config.plan
    learned = f"({counted(cluster.learners, 'learner')} x {plan.learner_tokens_per_second:,g})"
    how = "sampling and the rest side by side" if config.rollout.max_policy_lag else "one after the other"
    forward = f"{counted(hours.passes, 'pass')}, each 1/{round(1 / FORWARD_SHARE)} of an epoch"
    return rows(
        ("tokens a step", f"{hours.tokens:,}, of them sampled {hours.sampled:,}"),
        ("sampling", f"{hours.sampled:,} / ({counted(cluster.engines, 'engine')} x "
         f"{plan.engine_tokens_per_second:,g}) = {hours.sampling_s:,.1f} s"),
        ("log-probs", f"{forward} = {hours.logprobs_s:,.1f} s" if hours.passes else "none"),
        ("update", f"{hours.tokens:,} x {counted(hours.epochs, 'epoch')} / {learned} = {hours.update_s:,.1f} s"),
        ("a step", f"{hours.step_s:,.1f} s, {how}; transfer, evaluation, checkpoints not counted"),
        ("the run", f"{counted(config.run.steps, 'step')} = {hours.hours:,.1f} hours, "
         f"{config.run.steps * hours.tokens:,} tokens, {hours.gpu_hours:,.0f} GPU-hours"),
    )  # fmt: skip


def _memory(config: GRPOConfig, shape: ModelShape, learner: tuple[Part, ...], engine: EngineMemory) -> list[str]:
    cluster, rollout = config.cluster, config.rollout
    longest = config.max_sequence_tokens
    at_once = min(rollout.max_concurrent_sequences, -(-config.rollouts_per_step // cluster.engines))
    own = "one GPU" if cluster.device == "cuda" else "processes"
    return [
        *rows(
            ("model", f"{shape.model_type}, {shape.parameters:,} parameters"),
            ("checkpoint on disk", _checkpoint(config, shape)),
        ),
        *_parts(f"a learner, {own}", learner),
        *[
            line
            for model in _more_models(config, shape)
            for line in (_parts(f"a {model.name}, {own}", model.parts) if model.parts else _unknown(f"a {model.name}"))
        ],
        *_parts(f"an engine, {own}", engine.parts),
        *rows(
            ("the KV cache holds", f"{engine.kv_tokens:,} tokens of {engine.kv_bytes_per_token / 1024:,.1f} KiB = "
             f"{engine.kv_tokens // longest:,} sequences of {longest:,}; {at_once:,} at once"),
        ),
    ]  # fmt: skip


def _checkpoint(config: GRPOConfig, shape: ModelShape) -> str:
    critic = _critic_shape(config, shape) if isinstance(config, PPOConfig) else None
    size = checkpoint_bytes(config, shape, critic)
    if size is None:
        return "no estimate"
    more = ", the critic's too" if critic else ""
    more += ", a reference that moves" if config.reference_moves else ""
    every = config.checkpoint_every
    when = (
        "none is saved"
        if every is None
        else f"one every {f'{every:,} steps' if every > 1 else 'step'}, {config.checkpoint.keep} are kept"
    )
    return f"{size / GIB:.1f} GiB (float32 weights and moments{more}); {when}"


def _critic_shape(config: PPOConfig, shape: ModelShape) -> ModelShape | None:
    return shape if config.critic.path is None else _shape_at(config.critic.path)


def _more_models(config: GRPOConfig, shape: ModelShape) -> list[Beside]:
    """Critic and reward model, from their own config.json where they start from another model."""
    found = []
    if isinstance(config, PPOConfig):
        its = _critic_shape(config, shape)
        found.append(Beside("critic", config.critics, critic_memory(its, config) if its else ()))
    if config.reward_model_copies and config.reward_model is not None:
        its = _shape_at(config.reward_model.path or "")
        parts = reward_model_memory(its, config) if its else ()
        found.append(Beside("reward model", config.reward_model_copies, parts))
    return found


def _shape_at(path: str) -> ModelShape | None:
    model = local_model_config(path)
    try:
        return None if model is None else model_shape(model)
    except ValueError:
        return None


def _unknown(name: str) -> list[str]:
    return [f"  {name}: no estimate, its config.json is not at hand or of an unknown kind"]


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


def _host_gib() -> float | None:
    """Memory of this machine, GiB; None where /proc does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    kib = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:")).split()[1]
    return int(kib) * 1024 / GIB
