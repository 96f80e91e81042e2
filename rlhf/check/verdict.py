"""The first lines of --plan: whether the run fits and its hours; if it does not fit, layouts that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from rlhf.check.hours import StepTime, step_time
from rlhf.check.layouts import (
    Search,
    changed_keys,
    economies,
    first_problem,
    search_layouts,
    smaller_budgets,
    with_adapters,
)
from rlhf.check.memory import GIB, RoleMemory, memory_problems, memory_share_on_cpu, total, with_article
from rlhf.check.model_shape import ModelShape
from rlhf.check.resources import quantity
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.supervised import SupervisedConfig

C = TypeVar("C", bound=GRPOConfig | SupervisedConfig)


class Verdict(NamedTuple):
    """Whether a config fits."""

    fits: bool
    sentences: list[tuple[str, str]]  # a sentence, and the keys that it announces as one line to paste, if any
    # The config itself if it fits, else the best layout that fits; the plan shows its hours.
    config: GRPOConfig | SupervisedConfig | None

    @property
    def text(self) -> str:
        """All sentences, each followed by its keys on a line of their own."""
        return "\n".join(f"{sentence}\n  {keys}".rstrip() for sentence, keys in self.sentences)


def fit_verdict(
    config: C,
    shape: ModelShape,
    estimates: Sequence[RoleMemory],
    time: Callable[[C], StepTime | None],
    searched: Sequence[Search] = (),
) -> Verdict:
    """Judge the memory of a run; `searched` has the layouts of its GPUs, if it has engines and GPUs."""
    problems = list(memory_problems(config, estimates, shape))
    if not problems:
        return Verdict(True, [(f"fits{_needs(config, estimates)}{_hours(config, time(config))}.", "")], config)
    refusal = f"does not fit: {'; '.join(problems)}."
    remedy = f"Use a smaller model, or shorter sequences ({config.sequence_keys})."
    if not searched:
        fitting = next((each for each in economies(config, shape) if first_problem(each, shape) is None), None)
        if fitting is None:
            return Verdict(False, [(f"{refusal} {remedy}", "")], None)
        sentence = f"{refusal} This fits{_hours(fitting, time(fitting))}:"
        return Verdict(False, [(sentence, changed_keys(config, fitting))], fitting)
    assert isinstance(config, GRPOConfig)
    ways = list(_fitting_layouts(config, shape, searched))
    says = [(f"{way}{_hours(layout, step_time(layout, shape))}:", changed_keys(config, layout)) for way, layout in ways]
    if searched[0].best(0):
        return Verdict(False, [(f"{refusal} The best that fits: {says[0][0]}", says[0][1])], ways[0][1])
    refusal += f" No layout of {quantity(searched[0].gpus, 'GPU')} does."
    if not ways:
        adapters = ", adapters" * (config.model.lora is None)
        gpus, given = searched[-1].gpus, config.cluster.sequence_parallel
        shared = ", more learners per sequence" * any(each > given for _, each in smaller_budgets(config, gpus))
        tried = f"up to {gpus} GPUs{adapters}, smaller microbatches{shared}"
        return Verdict(False, [(f"{refusal} Also tried: {tried}. {remedy}", "")], None)
    return Verdict(False, [(f"{refusal} What would fit:", ""), *says], ways[0][1])


def _needs(config: TrainingProgramConfig, estimates: Sequence[RoleMemory]) -> str:
    """The memory of one process of each role; on CPU, of all processes together."""
    unknown = dict.fromkeys(f"{each.role.model_key}={each.role.model}" for each in estimates if not each.parts)
    but = f" but for {', '.join(unknown)}, whose size is not known here" if unknown else ""
    if config.cluster.device == "cpu":
        return f"{but}: {memory_share_on_cpu(estimates)[1]}"
    known = [f"{with_article(each.role.name)} {total(each.parts) / GIB:.1f}" for each in estimates if each.parts]
    turns = ", in turns" if isinstance(config, GRPOConfig) and config.cluster.placement == "colocated" else ""
    return f"{but}: {', '.join(known)} of {config.cluster.gpu_memory_gib:g} GiB{turns}"


def _hours(config: GRPOConfig | SupervisedConfig, time: StepTime | None) -> str:
    """Seconds per step and hours of the run; an empty string where they are not known."""
    if time is None or config.run.steps is None:
        return ""
    full, digits, hours = "", 2, config.steps * time.total / 3600
    if isinstance(config, GRPOConfig):
        full, digits = ", every response at full length" * (config.plan.response_tokens is None), 1
    steps = quantity(config.steps, "step")
    return f", {time.total:,.{digits}f} s per step, {steps} = {hours:,.{digits}f} hours{full}"


def _fitting_layouts(
    config: GRPOConfig, shape: ModelShape, searched: Sequence[Search]
) -> Iterator[tuple[str, GRPOConfig]]:
    """Layouts that fit, in words and as a config: the best on the run's GPUs, or on more; one with adapters."""
    lag, own, last = config.rollout.max_policy_lag, searched[0], searched[-1]
    if best := last.best(lag):
        yield quantity(last.gpus, "GPU"), best.config
    adapted = with_adapters(config) if config.model.lora is None else None
    if own.best(lag) is None and adapted and (best := search_layouts(adapted, shape, own.gpus).best(lag)):
        yield f"{quantity(own.gpus, 'GPU')} with adapters (model.lora)", best.config
