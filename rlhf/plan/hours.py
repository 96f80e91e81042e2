"""How long a run takes, from the throughputs of `plan`; weight transfer, evaluation and checkpoints not included."""

from __future__ import annotations

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import CRITIC
from rlhf.plan.resources import count_gpus, counted

FORWARD_SHARE = 1 / 3  # of forward and backward together: a backward pass costs two forward passes


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
    passes = config.needs_old_logprobs_pass + config.needs_reference + (teacher is not None and teacher.computed)
    if any(role.name == CRITIC for role in roles):
        passes = max(passes, 1)  # the critic's pass, for its values
    epoch = tokens / (cluster.learners * plan.learner_tokens_per_second)
    sampling = sampled / (cluster.engines * plan.engine_tokens_per_second)
    logprobs, update = passes * FORWARD_SHARE * epoch, epochs * epoch
    overlap = config.rollout.max_policy_lag > 0
    step = max(sampling, logprobs + update) if overlap else sampling + logprobs + update
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
        ("one step", f"{step:,.1f} s, {how}; transfer, evaluation, checkpoints not included"),
        ("the run", f"{counted(config.run.steps, 'step')} = {hours:,.1f} hours, {config.run.steps * tokens:,} tokens, "
         f"{count_gpus(roles) * hours:,.0f} GPU-hours"),
    ]  # fmt: skip
