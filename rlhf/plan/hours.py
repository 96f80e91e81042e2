"""How long a run takes, from the throughputs of `plan`; weight transfer, evaluation and checkpoints not included."""

from __future__ import annotations

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import CRITIC
from rlhf.plan.memory import parameters_of
from rlhf.plan.model_shape import shape_at
from rlhf.plan.resources import count_gpus, counted, local_resources

FORWARD_SHARE = 1 / 3  # of forward and backward together: a backward pass costs two forward passes
# Seconds per parameter of clipping, torch's fused AdamW and the copy to bfloat16 in host memory, one thread; 2.8 to 3.8
# nanoseconds were measured on two processors.
HOST_ADAM_S = 3.8e-9


def expected_time(config: GRPOConfig) -> list[tuple[str, str]]:
    """Rows of --plan, each with its arithmetic; none unless both throughputs are given.

    Assumes that a critic runs with the policy, and as fast: passes and epochs are those of whichever needs more.
    """
    plan, cluster = config.plan, config.cluster
    if plan.engine_tokens_per_second is None or plan.learner_tokens_per_second is None:
        return []
    response = plan.response_tokens or config.rollout.longest
    sampled = config.rollouts_per_step * response
    tokens = sampled + config.rollouts_per_step * (plan.prompt_tokens or config.data.max_prompt_tokens)
    roles = config.roles()
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    teacher = config.algo.teacher
    passes = config.needs_old_logprobs_pass + config.needs_reference
    if teacher is not None and teacher.computed:
        passes += epochs if teacher.in_loss else 1
    if any(role.name == CRITIC for role in roles):
        passes = max(passes, 1)  # the critic's pass, for its values
    epoch = tokens / (cluster.learners * plan.learner_tokens_per_second)
    sampling = sampled / (cluster.engines * plan.engine_tokens_per_second)
    logprobs, update = passes * FORWARD_SHARE * epoch, epochs * epoch
    overlap = config.rollout.max_policy_lag > 0
    host, host_how = _host_optimizer(config)
    training = logprobs + update + host
    step = max(sampling, training) if overlap else sampling + training
    hours = config.run.steps * step / 3600
    engines = f"({counted(cluster.engines, 'engine')} x {plan.engine_tokens_per_second:,g})"
    learners = f"({counted(cluster.learners, 'learner')} x {plan.learner_tokens_per_second:,g})"
    forward = f"{counted(passes, 'pass')}, each 1/{round(1 / FORWARD_SHARE)} of an epoch"
    how = "sampling at the same time as the rest" if overlap else "one after the other"
    return [
        ("tokens per step", f"{tokens:,}, of which sampled {sampled:,}"),
        ("sampling", f"{sampled:,} / {engines} = {sampling:,.1f} s"),
        ("log-probs", f"{forward} = {logprobs:,.1f} s" if passes else "none"),
        ("update", f"{tokens:,} x {counted(epochs, 'epoch')} / {learners} = {update:,.1f} s"),
        *([("optimizer in host memory", host_how)] if host_how else []),
        ("one step", f"{step:,.1f} s, {how}; transfer, evaluation, checkpoints not included"),
        ("the run", f"{counted(config.run.steps, 'step')} = {hours:,.1f} hours, {config.run.steps * tokens:,} tokens, "
         f"{count_gpus(roles) * hours:,.0f} GPU-hours"),
    ]  # fmt: skip


def _host_optimizer(config: GRPOConfig) -> tuple[float, str]:
    """Seconds per training step of the slowest optimizer in host memory, and their arithmetic; "" without any.

    What goes over PCIe is not counted. Threads are those of the actors if their nodes are like this machine.
    """
    cluster, trained = config.cluster, config.trained_roles()
    ranks = sum(role.count for role, _ in trained)
    on_node = min(ranks, cluster.gpus_per_node) if cluster.device == "cuda" else ranks
    threads = cluster.threads_per_learner or max(1, int(local_resources()["CPU"]) // on_node)
    times = [(0.0, "")]
    for role, training in trained:
        count = parameters_of(role, config, shape_at(config.model.path))
        if training.section.offload_optimizer and count is not None:
            updates = training.updates_per_step
            seconds = updates * count / role.count * HOST_ADAM_S / threads
            product = f"{counted(updates, 'update')} x {count / 1e9:.2f} B / {counted(role.count, role.name)}"
            each = f"{HOST_ADAM_S * 1e9:g} ns / {counted(threads, 'thread')}"
            times.append((seconds, f"{product} x {each} = {seconds:,.1f} s"))
    return max(times)
