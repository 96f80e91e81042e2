"""Warnings about a config that is valid but likely wrong: idle parts, and sequences or memory that do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import ENGINE, LEARNER
from rlhf.data.model_checks import model_problems
from rlhf.data.read import too_few_prompts
from rlhf.plan.memory import GIB, RoleMemory, kv_cache, planned_problems, total
from rlhf.plan.model_shape import ModelShape, config_at
from rlhf.plan.resources import counted


def arithmetic_warnings(config: GRPOConfig, prompts: int | str) -> Iterator[str]:
    """Warnings that need no model: those of the config, idle learners or engines, too few prompts.

    Args:
        prompts: rows per epoch, or why they are not known.
    """
    cluster, rollout, learner = config.cluster, config.rollout, config.learner
    yield from config.warnings()
    for role, training in config.trained_roles():
        smallest = config.rollouts_per_step // training.minibatches_per_epoch
        if smallest < role.count:
            yield (
                f"{role.section}.minibatches_per_epoch={training.minibatches_per_epoch}: a minibatch has {smallest} "
                f"rollouts (rollout.prompts_per_step x rollout.samples_per_prompt / minibatches_per_epoch), so "
                f"{role.count - smallest} of {counted(role.count, role.name)} are idle. Use fewer cluster.learners or "
                "minibatches, or more rollouts."
            )
    if rollout.prompts_per_step < cluster.engines:
        yield (
            f"cluster.engines={cluster.engines}: a step has rollout.prompts_per_step={rollout.prompts_per_step} "
            f"groups, and a group stays on one engine, so {cluster.engines - rollout.prompts_per_step} engines are "
            "idle. Use fewer engines or more prompts."
        )
    if cluster.device == "cuda" and cluster.tensor_parallel > cluster.gpus_per_node:
        yield (
            f"cluster.tensor_parallel={cluster.tensor_parallel}: an engine does not fit on a node of cluster."
            f"gpus_per_node={cluster.gpus_per_node} GPUs. Lower it, or set gpus_per_node to what a node has."
        )
    if config.algo.kl_coef > 0 and learner.optimizer.lr == 0:
        yield "learner.optimizer.lr=0 with algo.kl_coef above 0: the policy will not change. Set lr."
    if isinstance(prompts, int) and (problem := too_few_prompts(prompts, rollout.prompts_per_step)):
        yield f"{problem} The run will be refused."


def model_warnings(config: GRPOConfig) -> Iterator[str]:
    """Warnings from the model's config.json: why the run will be refused, by its checks or by an engine."""
    if (model := config_at(config.model.path)) is None:
        return
    yield from (f"{problem} The run will be refused." for problem in model_problems(config, policy=model))
    heads = model.get("num_attention_heads")
    if heads is not None and heads % config.cluster.tensor_parallel:
        yield (
            f"cluster.tensor_parallel={config.cluster.tensor_parallel} does not divide the model's {heads} attention "
            "heads, so vLLM will refuse it. Use a divisor."
        )


def memory_warnings(
    config: GRPOConfig, estimates: Sequence[RoleMemory], shape: ModelShape, host_gib: float
) -> Iterator[str]:
    """Warnings from the estimate: roles that do not fit, and a KV cache that is too small.

    Args:
        shape: of model.path.
        host_gib: memory of this machine, for runs on CPU.
    """
    cluster, rollout = config.cluster, config.rollout
    (_, kv_tokens), longest = kv_cache(shape, config), config.max_sequence_tokens
    per_group = rollout.samples_per_prompt * longest
    keys = "rollout.kv_cache_gib"
    if cluster.device == "cuda":
        keys = "rollout.gpu_memory_utilization or cluster.tensor_parallel"
    if kv_tokens < longest:
        yield (
            f"KV cache: an engine holds {kv_tokens:,} tokens, not even one sequence of {longest:,} "
            f"(data.max_prompt_tokens + rollout.max_response_tokens). Raise {keys}, or shorten sequences."
        )
    elif kv_tokens < per_group:
        yield (
            f"KV cache: an engine holds {kv_tokens:,} tokens, less than one group at full length "
            f"(rollout.samples_per_prompt={rollout.samples_per_prompt} x {longest:,} = {per_group:,}): sequences will "
            f"be preempted and computed again. Raise {keys}, or shorten sequences."
        )
    if cluster.device == "cpu":
        need = sum(estimate.role.count * total(estimate.parts) for estimate in estimates) / GIB
        if need > host_gib:
            yield (
                f"memory: {', '.join(counted(e.role.count, e.role.name) for e in estimates)} need about {need:.1f} "
                f"GiB, this machine has {host_gib:.1f}. Use a smaller model, learner.max_tokens_per_microbatch or "
                "rollout.kv_cache_gib."
            )
        return
    have = cluster.gpu_memory_gib
    for estimate in estimates:
        role, need = estimate.role, total(estimate.parts) / GIB
        if role.name != ENGINE and need > have:
            remedy = f"Use a smaller {role.section}.path, or fewer tokens at once."
            if role.name == LEARNER:
                remedy = _learner_remedy(config)
            yield (
                f"memory: a {role.name} needs about {need:.1f} GiB, a GPU has cluster.gpu_memory_gib={have:g}. {remedy}"
            )
    if cluster.placement == "colocated":
        yield from planned_problems(config, estimates, shape)


def _learner_remedy(config: GRPOConfig) -> str:
    """The keys that can still lower a learner's memory."""
    learner, longest = config.learner, config.max_sequence_tokens
    remedies = {
        "model.gradient_checkpointing=true": not config.model.gradient_checkpointing,
        f"learner.max_tokens_per_microbatch down to {longest}": learner.max_tokens_per_microbatch > longest,
        "learner.zero_stage=3": learner.zero_stage < 3,
        "learner.offload_optimizer=true": not learner.offload_optimizer,
        "more cluster.learners": True,
    }
    return f"Try {', '.join(remedy for remedy, helps in remedies.items() if helps)}."
