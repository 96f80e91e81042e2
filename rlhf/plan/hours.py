"""How long a run takes, from the throughputs of `plan`; weight transfer, evaluation and checkpoints not included."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import CRITIC
from rlhf.plan.resources import count_gpus

FORWARD_SHARE = 1 / 3  # of forward and backward together: a backward pass costs two forward passes


@dataclass(frozen=True)
class Expected:
    """Tokens and seconds of a training step, and hours of the run.

    Attributes:
        tokens: of prompts and responses.
        sampled: of responses only.
        passes: before the update, for log-probs or values, whichever needs more; each costs FORWARD_SHARE of an epoch.
        epochs: of the update, for policy or critic, whichever needs more.
    """

    tokens: int
    sampled: int
    passes: int
    epochs: int
    sampling_s: float
    logprobs_s: float
    update_s: float
    step_s: float
    hours: float
    gpu_hours: float


def expected(config: GRPOConfig) -> Expected | None:
    """None unless both throughputs are given. Assumes that a critic runs with the policy, and as fast."""
    plan, cluster = config.plan, config.cluster
    if plan.engine_tokens_per_second is None or plan.learner_tokens_per_second is None:
        return None
    prompt = plan.prompt_tokens or config.data.max_prompt_tokens
    response = plan.response_tokens or config.rollout.max_response_tokens
    tokens, sampled = config.rollouts_per_step * (prompt + response), config.rollouts_per_step * response
    roles = config.roles()
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    passes = config.needs_old_logprobs_pass + config.needs_reference
    if any(role.name == CRITIC for role in roles):
        passes = max(passes, 1)  # the critic's pass, for its values
    learner_speed = cluster.learners * plan.learner_tokens_per_second
    sampling = sampled / (cluster.engines * plan.engine_tokens_per_second)
    logprobs, update = passes * FORWARD_SHARE * tokens / learner_speed, epochs * tokens / learner_speed
    step = max(sampling, logprobs + update) if config.rollout.max_policy_lag else sampling + logprobs + update
    hours = config.run.steps * step / 3600
    return Expected(tokens, sampled, passes, epochs, sampling, logprobs, update, step, hours, count_gpus(roles) * hours)
