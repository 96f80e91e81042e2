"""How long a step and a run take: from throughputs that the config gives, else from the account of `speed`.

Weight transfer, evaluation and checkpoints are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.check import speed
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import count_gpus, counted
from rlhf.check.speed import FORWARD_SHARE, Lengths
from rlhf.config.grpo import GRPOConfig


@dataclass(frozen=True)
class Scale:
    """What was measured over the account, of learner and engine; layouts that were not measured are scaled by it."""

    learner: float = 1.0
    engine: float = 1.0

    @classmethod
    def of(cls, config: GRPOConfig, shape: ModelShape) -> Scale:
        plan = config.plan
        learner, engine = plan.learner_tokens_per_second, plan.engine_tokens_per_second
        return cls(
            1.0 if learner is None else learner * speed.compute_s(shape, config),
            1.0 if engine is None else engine / speed.decode_tokens_per_second(shape, config),
        )


@dataclass(frozen=True)
class StepTime:
    """Seconds of one training step, by part, and the tokens per second of one engine and one learner.

    Attributes:
        tail: of `sampling`, in which the longest response is alone.
        sending: gradients and weights between learners, as far as they do not overlap with computing.
        turns: engines and learners change places on shared GPUs.
    """

    engine_speed: float
    learner_speed: float
    sampling: float
    tail: float
    logprobs: float
    update: float
    host: float
    sending: float
    turns: float
    overlaps: bool

    @property
    def total(self) -> float:
        training = self.logprobs + self.update + self.host + self.sending
        return self.turns + (max(self.sampling, training) if self.overlaps else self.sampling + training)


def step_time(config: GRPOConfig, shape: ModelShape | None, scale: Scale | None = None) -> StepTime | None:
    """Seconds of a step; None without a throughput, where the account does not give it: on CPU, of unknown models.

    Assumes that a critic runs with the policy, and as fast: passes and epochs are those of whichever needs more.
    """
    plan, cluster, lengths = config.plan, config.cluster, Lengths.of(config)
    learner, engine = plan.learner_tokens_per_second, plan.engine_tokens_per_second
    tail = sending = turns = 0.0
    overlaps = config.rollout.max_policy_lag > 0
    epoch = config.rollouts_per_step * lengths.sequence / cluster.learners  # tokens of one learner
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    if shape is not None and cluster.device == "cuda":
        scale = scale or Scale.of(config, shape)
        if engine is None and not overlaps:  # a measured throughput has the tail in it
            tail = speed.tail_s(shape, config)
        if learner is None:
            sending = _sending_s(config, shape, epochs * epoch * speed.compute_s(shape, config))
        learner = scale.learner / speed.compute_s(shape, config)
        engine = scale.engine * speed.decode_tokens_per_second(shape, config)
        turns = speed.turns_s(shape, config)
    if learner is None or engine is None:
        return None
    sampling = config.rollouts_per_step * lengths.response / (cluster.engines * engine) + tail
    passes = speed.forward_passes(config)
    return StepTime(
        engine, learner, sampling, tail, passes * FORWARD_SHARE * epoch / learner, epochs * epoch / learner,
        speed.host_optimizer(config)[0], sending, turns, overlaps,
    )  # fmt: skip


def _sending_s(config: GRPOConfig, shape: ModelShape, computing_s: float) -> float:
    """Seconds in which learners wait for what they send each other.

    At stages 2 and 3 it overlaps with the computation of all but the last microbatch.
    """
    waiting = 0.0
    for role, training in config.trained_roles():
        seconds = speed.communicated_bytes(role, training, config, shape) / speed.link(config)
        if training.section.zero_stage >= 2:
            last = seconds / (training.updates_per_step * speed.microbatches_per_update(config, training))
            seconds = max(last, seconds - computing_s)
        waiting += seconds
    return waiting


def expected_time(config: GRPOConfig, shape: ModelShape | None) -> list[tuple[str, str]]:
    """Rows of --plan, each with its arithmetic; none where `step_time` has none."""
    if (time := step_time(config, shape)) is None:
        return []
    plan, cluster, roles, lengths = config.plan, config.cluster, config.roles(), Lengths.of(config)
    sampled = config.rollouts_per_step * lengths.response
    tokens = config.rollouts_per_step * lengths.sequence
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    passes = speed.forward_passes(config)
    hours = config.run.steps * time.total / 3600
    engines = f"({counted(cluster.engines, 'engine')} x {_rate(time.engine_speed)})"
    learners = f"({counted(cluster.learners, 'learner')} x {_rate(time.learner_speed)})"
    assumed = [name for name in ("engine", "learner") if getattr(plan, f"{name}_tokens_per_second") is None]
    keys = " and ".join(f"plan.{name}_tokens_per_second" for name in assumed)
    source = f"an account, at best, of {speed.described_card(config)}; to use measured ones set {keys}"
    forward = f"{counted(passes, 'pass')}, each 1/{round(1 / FORWARD_SHARE)} of an epoch"
    how = "sampling at the same time as the rest" if time.overlaps else "one after the other"
    last = f" + {time.tail:,.1f} s of the longest response alone" if time.tail else ""
    host_how = speed.host_optimizer(config)[1]
    return [
        *([("speeds", source)] if assumed else []),
        ("lengths", _lengths(config)),
        ("tokens per step", f"{tokens:,}, of which sampled {sampled:,}"),
        ("sampling", f"{sampled:,} / {engines}{last} = {time.sampling:,.1f} s"),
        ("log-probs", f"{forward} = {time.logprobs:,.1f} s" if passes else "none"),
        ("update", f"{tokens:,} x {counted(epochs, 'epoch')} / {learners} = {time.update:,.1f} s"),
        *([("sent between learners", _sent(config, shape, time.sending))] if shape and time.sending else []),
        *([("optimizer in host memory", host_how)] if host_how else []),
        *([("taking turns", f"state and weights to host memory and back: {time.turns:,.1f} s")] if time.turns else []),
        ("one step", f"{time.total:,.1f} s, {how}; transfer, evaluation, checkpoints not included"),
        ("the run", f"{counted(config.run.steps, 'step')} = {hours:,.1f} hours, {config.run.steps * tokens:,} tokens, "
         f"{count_gpus(roles) * hours:,.0f} GPU-hours"),
    ]  # fmt: skip


def _lengths(config: GRPOConfig) -> str:
    """The mean lengths that are used, each with the key it comes from."""
    plan, lengths = config.plan, Lengths.of(config)
    from_keys = {
        "prompt_tokens": (lengths.prompt, "prompt", f"data.max_prompt_tokens={config.data.max_prompt_tokens}"),
        "response_tokens": (lengths.response, "response", config.rollout.longest_key),
    }
    texts, assumed = [], []
    for name, (tokens, of, most) in from_keys.items():
        given = getattr(plan, name) is not None
        texts.append(f"{of} {tokens:,} ({f'plan.{name}' if given else f'the most, {most}'})")
        assumed += [] if given else [f"plan.{name}"]
    return " and ".join(texts) + (f"; set {' and '.join(assumed)} to the mean of your data" if assumed else "")


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.3g}"


def _sent(config: GRPOConfig, shape: ModelShape, waiting_s: float) -> str:
    sent = [
        f"{speed.communicated_bytes(role, training, config, shape) / 1e9:,.1f} GB per {role.name} at ZeRO stage "
        f"{training.section.zero_stage}"
        for role, training in config.trained_roles()
    ]
    return f"{', '.join(sent)}, {speed.link(config) / 1e9:g} GB/s = {waiting_s:,.1f} s that do not overlap"
