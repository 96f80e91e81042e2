"""--plan of rlhf.sft and rlhf.reward_model: whether a run on fixed examples starts and fits, its steps and hours.

Memory and seconds are those of a learner of GRPO, without rollouts: `memory` and `speed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from rlhf.check import speed
from rlhf.check.fit import on_cpu
from rlhf.check.layouts import CHECKPOINTING, NODES, changed, keys_of, with_adapters
from rlhf.check.memory import GIB, memory_of_roles, total
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import counted
from rlhf.check.speed import Lengths
from rlhf.check.verdict import Verdict
from rlhf.config.supervised import SupervisedConfig
from rlhf.data.read import check_source, config_sources, count_rows, local_path

BYTES_PER_TOKEN = 4  # assumed: the bytes of JSON's markup stand for the tokens of the template


class Examples(NamedTuple):
    """What is known of data.train before it is read.

    Attributes:
        rows: of one pass; None: not known here.
        tokens: mean of a sequence.
        how: where `tokens` comes from.
    """

    rows: int | None
    tokens: int
    how: str

    @classmethod
    def of(cls, config: SupervisedConfig) -> Examples:
        """Count rows and bytes of local files; for other data assume that every sequence has full length.

        Raises:
            ValueError: a file cannot be read.
        """
        most, rows, size, texts = config.data.max_tokens, 0, 0, True
        longest = f"the most, data.max_tokens={most}"
        for key, source in config_sources(config.data, "train").items():
            check_source(source, key)
            try:
                path, count = local_path(source), count_rows(source)
            except (OSError, ValueError) as error:
                raise ValueError(f"{key}={source.path}: {error}") from None
            if path is None or count is None:
                return cls(None, most, longest)
            rows, size, texts = rows + count, size + path.stat().st_size, texts and path.suffix != ".parquet"
        if not texts or not rows:
            return cls(rows, most, longest)
        each = size / rows / config.sequences_per_example
        tokens = max(1, min(most, round(each / BYTES_PER_TOKEN)))
        return cls(rows, tokens, f"{each:,.0f} bytes of data.train / {BYTES_PER_TOKEN}, at most data.max_tokens={most}")


class UpdateTime(NamedTuple):
    """Seconds of an update.

    Attributes:
        sending: between learners, as far as it does not overlap with computing.
        host: of an optimizer in host memory.
    """

    computing: float
    sending: float
    host: float

    @property
    def total(self) -> float:
        return self.computing + self.sending + self.host


def update_time(config: SupervisedConfig, shape: ModelShape, tokens: int) -> UpdateTime | None:
    """Seconds of an optimizer step on sequences of `tokens` each; None on CPU."""
    if config.cluster.device == "cpu":
        return None
    ((role, training),) = config.trained_roles()
    lengths = Lengths(tokens, 0) if config.scalar_learner else Lengths(0, tokens)  # each token has logits, at most
    each = -(-config.examples_per_update * config.sequences_per_example * tokens // config.cluster.learners)
    computing = each * speed.compute_s(shape, config, lengths)
    microbatches = max(1, -(-each // config.learner.max_tokens_per_microbatch))
    sent = speed.communicated_bytes(role, training, config, shape, each=microbatches) / speed.link(config)
    if config.learner.zero_stage >= 2:  # overlaps with all but the last microbatch
        sent = max(sent / microbatches, sent - computing)
    return UpdateTime(computing, sent, speed.host_optimizer(config)[0])


def fit_problem(config: SupervisedConfig, shape: ModelShape) -> str | None:
    """Why a learner does not fit by the estimate; None if it fits."""
    estimates = memory_of_roles(config, shape)
    if config.cluster.device == "cpu":
        need, text = on_cpu(estimates)
        return text if need > 1 else None
    need, have = total(estimates[0].parts) / GIB, config.cluster.gpu_memory_gib
    return f"a learner needs {need:.1f} of {have:g} GiB" if need > have else None


def economies(config: SupervisedConfig) -> Iterator[list[SupervisedConfig]]:
    """Configs that take less memory, in groups from which the fastest that fits is taken.

    Tried in this order: the run's own learners, adapters, more nodes. Each is tried with the configured microbatch and
    then with one example per microbatch, because the estimate does not know how much slower small microbatches are.
    """
    cluster, own = config.cluster, config.cluster.learners
    least = config.sequences_per_example * config.max_sequence_tokens
    budgets = dict.fromkeys((config.learner.max_tokens_per_microbatch, least))
    bases = [(config, own)]
    if config.model.lora is None and not config.scalar_learner:
        bases.append((with_adapters(config), own))
    if cluster.device == "cuda":
        nodes = (count * cluster.gpus_per_node for count in NODES)
        bases += [(config, learners) for learners in nodes if learners > own]
    for (base, learners), tokens in product(bases, budgets):
        yield list(_savings(base, learners, tokens))


def _savings(config: SupervisedConfig, learners: int, tokens: int) -> Iterator[SupervisedConfig]:
    """The config on this number of learners, with checkpointing, ZeRO-3 and an optimizer in host memory."""
    learner = config.learner
    for offload, stage, checkpointing in product(
        dict.fromkeys((learner.offload_optimizer, learner.zero_stage > 0)),
        dict.fromkeys((learner.zero_stage, 3 if learners > 1 else learner.zero_stage)),
        CHECKPOINTING[config.model.gradient_checkpointing],
    ):
        section = {"max_tokens_per_microbatch": tokens, "offload_optimizer": offload, "zero_stage": stage}
        model = {"gradient_checkpointing": checkpointing}
        yield changed(config, learner=section, model=model, cluster={"learners": learners})


def supervised_verdict(config: SupervisedConfig, shape: ModelShape, examples: Examples) -> Verdict[SupervisedConfig]:
    """Judge the memory of a run."""
    if (problem := fit_problem(config, shape)) is None:
        estimates = memory_of_roles(config, shape)
        need = f"a learner {total(estimates[0].parts) / GIB:.1f} of {config.cluster.gpu_memory_gib:g} GiB"
        need = on_cpu(estimates)[1] if config.cluster.device == "cpu" else need
        return Verdict(True, [(f"fits: {need}{_hours(config, shape, examples)}.", "")], config)
    for candidates in economies(config):
        fitting = [each for each in candidates if fit_problem(each, shape) is None]
        if not fitting:
            continue
        times = [update_time(each, shape, examples.tokens) for each in fitting]
        best = min(zip(times, fitting, strict=True), key=lambda pair: pair[0].total if pair[0] else 0.0)[1]
        who = counted(best.cluster.learners, "learner")
        who += " with adapters (model.lora)" if best.model.lora != config.model.lora else ""
        says = f"does not fit: {problem}. The best that fits: {who}{_hours(best, shape, examples)}:"
        return Verdict(False, [(says, keys_of(config, best))], best)
    remedy = f"Use a smaller model, or shorter sequences ({config.sequence_keys})."
    return Verdict(False, [(f"does not fit: {problem}. {remedy}", "")], None)


def _hours(config: SupervisedConfig, shape: ModelShape, examples: Examples) -> str:
    time = update_time(config, shape, examples.tokens)
    if time is None or config.run.steps is None:
        return ""
    hours = config.steps * time.total / 3600
    return f", {time.total:,.2f} s per step, {counted(config.steps, 'step')} = {hours:,.2f} hours"


def batch_rows(config: SupervisedConfig, examples: Examples) -> Iterator[tuple[str, str]]:
    """Rows of --plan about examples, updates and tokens."""
    each, sequences = config.examples_per_update, config.sequences_per_example
    yield "examples per update", f"learner.{config.examples_key}={each:,}"
    if examples.rows is None:
        yield "data", "not counted here"
    else:
        passes = config.updates_per_epoch(examples.rows)
        yield "data", f"{examples.rows:,} rows / {each:,} = {counted(passes, 'optimizer step')} per pass"
        if config.run.steps:
            yield "optimizer steps", f"{config.steps:,} = {config.steps / max(1, passes):,.2f} passes"
    yield "sequences", f"{sequences} per example, of {examples.tokens:,} tokens on average ({examples.how})"


def time_rows(config: SupervisedConfig, shape: ModelShape, examples: Examples) -> Iterator[tuple[str, str]]:
    """Rows of --plan about the seconds of an update; none on CPU."""
    if (time := update_time(config, shape, examples.tokens)) is None:
        return
    tokens = config.examples_per_update * config.sequences_per_example * examples.tokens
    yield "speeds", f"an account, at best, of {speed.described_card(config)}"
    yield "update", f"{tokens:,} tokens / {counted(config.cluster.learners, 'learner')} = {time.computing:,.2f} s"
    if time.sending:
        yield "sent between learners", f"{time.sending:,.2f} s that do not overlap"
    if how := speed.host_optimizer(config)[1]:
        yield "optimizer in host memory", how
    yield "one step", f"{time.total:,.2f} s; evaluation and checkpoints not included"
