"""Seconds of a step and of a run: from the throughputs in the config, else from the account of `speed`.

Weight transfer, evaluation and checkpoints are not included.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.check import speed
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import count_gpus, quantity
from rlhf.check.speed import FORWARD_SHARE, Lengths
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Role, Training
from rlhf.config.supervised import SupervisedConfig


@dataclass(frozen=True)
class Scale:
    """Measured throughput / estimated throughput, of learner and engine; used to scale layouts without measurements."""

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
    """Seconds of one training step, by part, and the tokens per second of one engine and one learner."""

    update: float
    sending: float  # gradients and weights between learners, only the part that does not overlap with computing
    host: float  # the optimizer, if it is in host memory
    logprobs: float = 0.0
    sampling: float = 0.0  # from the first to the last token of a step's responses
    tail: float = 0.0  # the part of `sampling` in which the longest response remains
    turns: float = 0.0  # swapping engines and learners on shared GPUs
    interrupted: float = 0.0  # prefill of the responses that were under way when the engines slept
    shared: bool = False  # sampling and training never run at the same time
    lag: int = 0
    engine_speed: float = 0.0
    learner_speed: float = 0.0
    exchanged: float = 0.0  # bytes that a learner sends per token of an update to those that share the sequence

    @property
    def total(self) -> float:
        """At best the engines are always full. The responses of a step may end up to `lag` steps later."""
        training, full = self.logprobs + self.update + self.host + self.sending, self.sampling - self.tail
        if self.shared:
            return self.turns + self.interrupted + training + max(full, self.sampling / (1 + self.lag))
        return max(full, training, (self.sampling + training) / (1 + self.lag))


def step_time(config: GRPOConfig, shape: ModelShape | None, scale: Scale | None = None) -> StepTime | None:
    """Seconds of a step; None on CPU and for models of unknown size, unless the config has the throughputs.

    Assumes that a critic runs together with the policy and as fast. The one with more passes and epochs counts.
    """
    plan, cluster, lengths = config.plan, config.cluster, Lengths.of(config)
    learner, engine = plan.learner_tokens_per_second, plan.engine_tokens_per_second
    tail = sending = turns = interrupted = exchanged = 0.0
    epoch = config.rollouts_per_step * lengths.sequence / cluster.learners  # tokens of one learner
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    if shape is not None and cluster.device == "cuda":
        scale = scale or Scale.of(config, shape)
        if engine is None:  # a measured throughput has the tail in it
            tail = speed.tail_s(shape, config)
        if learner is None:
            computing = epochs * epoch * speed.compute_s(shape, config)
            for role, training in config.trained_roles():
                microbatches = speed.microbatches_per_update(config, training)
                sending += _communication_s(config, shape, role, training, microbatches, computing)
        learner = scale.learner / speed.compute_s(shape, config)
        engine = scale.engine * speed.decode_tokens_per_second(shape, config)
        turns, interrupted = speed.swap_s(shape, config), speed.interrupted_s(shape, config)
        exchanged = speed.exchanged_bytes(shape, config)
    if learner is None or engine is None:
        return None
    passes = speed.forward_passes(config)
    return StepTime(
        update=epochs * epoch / learner,
        sending=sending,
        host=speed.host_optimizer_s(config),
        logprobs=passes * FORWARD_SHARE * epoch / learner,
        sampling=config.rollouts_per_step * lengths.response / (cluster.engines * engine) + tail,
        tail=tail,
        turns=turns,
        interrupted=interrupted,
        exchanged=exchanged,
        shared=cluster.placement == "colocated",
        lag=config.rollout.max_policy_lag,
        engine_speed=engine,
        learner_speed=learner,
    )


def update_time(config: SupervisedConfig, shape: ModelShape, tokens: int) -> StepTime | None:
    """Seconds of an optimizer step on sequences of `tokens` each; None on CPU."""
    if config.cluster.device == "cpu":
        return None
    ((role, training),) = config.trained_roles()
    lengths = Lengths(tokens, 0) if config.scalar_learner else Lengths(0, tokens)  # each token has logits, at most
    each = -(-config.examples_per_update * config.sequences_per_example * tokens // config.cluster.learners)
    computing = each * speed.compute_s(shape, config, lengths)
    microbatches = max(1, -(-each // config.learner.max_tokens_per_microbatch))
    sending = _communication_s(config, shape, role, training, microbatches, computing)
    return StepTime(computing, sending, speed.host_optimizer_s(config))


def _communication_s(
    config: GRPOConfig | SupervisedConfig,
    shape: ModelShape,
    role: Role,
    training: Training,
    microbatches: int,
    computing_s: float,
) -> float:
    """Seconds per step in which the learners of one role wait for data from each other.

    At stages 2 and 3 it overlaps with the `computing_s` of all but the last of an update's microbatches.
    """
    seconds = speed.communicated_bytes(role, training, config, shape, microbatches)
    seconds /= speed.link_bytes_per_second(config)
    if training.section.zero_stage >= 2:
        seconds = max(seconds / (training.updates_per_step * microbatches), seconds - computing_s)
    return seconds


def time_rows(config: GRPOConfig, time: StepTime) -> list[tuple[str, str]]:
    """Rows of --plan: each part of a step, with its arithmetic."""
    plan, cluster, roles, lengths = config.plan, config.cluster, config.roles(), Lengths.of(config)
    sampled = config.rollouts_per_step * lengths.response
    tokens = config.rollouts_per_step * lengths.sequence
    epochs = max(training.epochs_per_step for _, training in config.trained_roles())
    passes, each = speed.forward_passes(config), epochs * tokens / cluster.learners
    hours = config.run.steps * time.total / 3600
    engines = f"({quantity(cluster.engines, 'engine')} x {_rate_text(time.engine_speed)})"
    learners = f"({quantity(cluster.learners, 'learner')} x {_rate_text(time.learner_speed)})"
    assumed = [name for name in ("engine", "learner") if getattr(plan, f"{name}_tokens_per_second") is None]
    keys = " and ".join(f"plan.{name}_tokens_per_second" for name in assumed)
    forward = f"{quantity(passes, 'pass')}, each 1/{round(1 / FORWARD_SHARE)} of an epoch"
    how = "one after the other" if time.shared or not time.lag else "sampling at the same time as the rest"
    last = f" + {time.tail:,.1f} s of the longest response" + " alone" * (not time.lag) if time.tail else ""
    spread = f", which may extend over {time.lag + 1} steps" if time.tail and time.lag else ""
    return [
        *([("speeds", f"{speed.card_description(config)}; to use measured ones set {keys}")] if assumed else []),
        ("lengths", _lengths_text(config)),
        ("tokens per step", f"{tokens:,}, of which sampled {sampled:,}"),
        ("sampling", f"{sampled:,} / {engines}{last} = {time.sampling:,.1f} s{spread}"),
        ("log-probs", f"{forward} = {time.logprobs:,.1f} s" if passes else "none"),
        *([("exchanges in an update", f"{each:,.0f} tokens x {time.exchanged / 2**10:,.0f} KiB = "
           f"{each * time.exchanged / 2**30:,.0f} GiB from each learner, in its rate")] if time.exchanged else []),
        ("update", f"{tokens:,} x {quantity(epochs, 'epoch')} / {learners} = {time.update:,.1f} s"),
        *([("sent between learners", f"{time.sending:,.1f} s that do not overlap")] if time.sending else []),
        *([("optimizer in host memory", f"{time.host:,.1f} s")] if time.host else []),
        *([("taking turns", f"state and weights to host memory and back: {time.turns:,.1f} s")] if time.turns else []),
        *([("interrupted responses", f"keys and values computed again: {time.interrupted:,.1f} s")]
          if time.interrupted else []),
        ("one step", f"{time.total:,.1f} s, {how}; transfer, evaluation, checkpoints not included"),
        ("the run", f"{quantity(config.run.steps, 'step')} = {hours:,.1f} hours, {config.run.steps * tokens:,} tokens, "
         f"{count_gpus(roles) * hours:,.0f} GPU-hours"),
    ]  # fmt: skip


def _lengths_text(config: GRPOConfig) -> str:
    """The mean lengths, each with the key that sets it."""
    plan, lengths = config.plan, Lengths.of(config)
    given = {"prompt": plan.prompt_tokens, "response": plan.response_tokens}
    keys = (f"data.max_prompt_tokens={config.data.max_prompt_tokens}", config.rollout.longest_key)
    longest = dict(zip(given, keys, strict=True))
    sources = {name: f"plan.{name}_tokens" if given[name] else f"the most, {longest[name]}" for name in given}
    assumed = " and ".join(f"plan.{name}_tokens" for name, value in given.items() if not value)
    texts = [f"{name} {getattr(lengths, name):,} ({source})" for name, source in sources.items()]
    return " and ".join(texts) + (f"; set {assumed} to the mean of your data" if assumed else "")


def _rate_text(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:,.3g}"
