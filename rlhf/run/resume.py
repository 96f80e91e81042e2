"""Checks of a resumed run: it may not change anything that would make it another run.

A key of the config may change only if its field, or a section around it, is declared with `resume="free"`. The start
models and the data are compared by their fingerprints, so that their folders may move.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from rlhf.config.base import Resume, Section, short_value
from rlhf.config.cli import NothingToDoError
from rlhf.config.grpo import GRPOConfig
from rlhf.config.non_defaults import config_of_any_program
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.references import from_environment
from rlhf.config.secrets import hidden
from rlhf.data.model_files import model_fingerprint
from rlhf.log.sinks import read_summary
from rlhf.processes.code import Sources, changed_sources
from rlhf.run.checkpoint_files import LATEST, checkpoint_step, read_line
from rlhf.run.folder import STATE_FILE, RunFolder
from rlhf.run.state import RunState


class Change(NamedTuple):
    """A key whose values differ in two configs; `resume`: whether a resumed run may change it, as in `Section`."""

    key: str
    before: Any
    now: Any
    resume: Resume


def changed_keys(kind: Any, before: Any, now: Any, key: str = "", resume: Resume = "fixed") -> Iterator[Change]:
    """The keys whose values differ in two configs; keys that only one of the two has are ignored.

    Args:
        kind: the type of the values: the class of the whole config, or the annotation of the field `key`.
        before, now: values as JSON.
    """
    section = _section_in(kind)
    both_lists = isinstance(before, list) and isinstance(now, list) and len(before) == len(now)
    if section is None or not (both_lists or (isinstance(before, dict) and isinstance(now, dict))):
        if before != now:
            yield Change(key, before, now, resume)
    elif both_lists:
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from changed_keys(section, *pair, f"{key}.{number}", resume)
    elif get_origin(kind) is dict:  # its names are the user's: one that is new or gone is a change
        for name in sorted(before.keys() | now.keys()):
            yield from changed_keys(get_args(kind)[1], before.get(name), now.get(name), f"{key}.{name}", resume)
    else:
        for name in sorted(before.keys() & now.keys() & section.model_fields.keys()):
            field = section.model_fields[name]
            extra: Any = field.json_schema_extra or {}
            own = extra.get("resume") or section.resume or resume
            yield from changed_keys(field.annotation, before[name], now[name], f"{key}.{name}".lstrip("."), own)


def _section_in(kind: Any) -> type[Section] | None:
    """The section that a field holds, alone or in a list or mapping; None if it holds none."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next(filter(None, map(_section_in, get_args(kind))), None)


def check_not_finished(config: TrainingProgramConfig) -> None:
    """Raise NothingToDoError if the run in run.dir has taken all its steps, saved the last and written its summary.

    ValueError if it is another run, as in `check_resumed_state`.
    """
    steps, path = config.steps, Path(config.run.dir)
    latest = path / "checkpoints" / read_line(path / "checkpoints" / LATEST)
    try:
        saved = config.checkpoint_every is None or checkpoint_step(latest.name) == steps
        finished = saved and read_summary(path).get("steps") == steps
    except ValueError:  # a summary that cannot be read: RunFolder warns of it
        return
    if not finished:
        return
    if (latest / STATE_FILE).is_file():
        check_resumed_state(config, path, RunFolder.read_state(latest))
    raise NothingToDoError(
        f"run.dir={path}: the run is finished, all {steps} steps of it. Raise run.steps to train on."
    )


def check_resumed_state(config: TrainingProgramConfig, path: Path, state: RunState) -> None:
    """ValueError if the run in the folder `path` is past run.steps, or has another program, config or start models."""
    steps = config.steps
    if state.step > steps:
        raise ValueError(
            f"run.steps={steps}: the newest checkpoint is of step {state.step}, so nothing is left to do. Raise "
            "run.steps, or start another run.dir."
        )
    began = state.program or config.program
    if began != config.program:
        raise ValueError(
            f"run.dir={path}: its checkpoints were written by rlhf.{began}, but this is rlhf.{config.program}. "
            f"Resume with python -m rlhf.{began}, or start a new run from its model in another run.dir."
        )
    before, now = state.updates or config.update_plan, config.update_plan
    changes = [Change(key, before[key], now.get(key), "fixed") for key in before if before[key] != now.get(key)]
    began_with = from_environment(state.config)
    deterministic = config.run.deterministic and began_with.get("run", {}).get("deterministic", False)
    kind, plan = type(config), before.keys()  # a null in the keys of the plan stands for the value of another key
    written = [change.key for change in changed_keys(kind, state.config, config.stored())]
    changes += [
        change
        for change in changed_keys(kind, hidden(began_with), config.shown())
        if change.key not in plan
        and any(f"{change.key}.".startswith(f"{key}.") for key in written)  # else a validator changed the value
        and change.resume in (("fixed", "rounding") if deterministic else ("fixed",))
    ]
    problems = [
        f"{key}={short_value(now)}: the run began with {short_value(before)}. Resume with {key}={short_value(before)}, "
        + ("or run.deterministic=false, " if resume == "rounding" else "")
        + "or start another run.dir from this one's model."
        for key, before, now, resume in sorted(changes)
    ]
    if problems := problems + list(_other_models(config, state)):
        raise ValueError("\n".join(problems))


def resume_warnings(config: TrainingProgramConfig, state: RunState) -> Iterator[str]:
    """Warnings for a resumed run that is no longer on its curve: other run.steps, or another evaluation metric."""
    steps, before = config.steps, from_environment(state.config).get("run", {}).get("steps", config.steps)
    for role, training in config.trained_roles():
        schedule = training.section.schedule
        if steps != before and (schedule.name != "constant" or schedule.warmup_fraction):
            yield (
                f"run.steps={steps}: the run began with {before}, and {role.section}.schedule={schedule.name} spans "
                f"the whole run. The learning rate goes on along the curve of {steps} steps."
            )
    if isinstance(config, GRPOConfig):
        yield from _other_metrics(config, state)


def _other_metrics(config: GRPOConfig, state: RunState) -> Iterator[str]:
    """A warning for each data set that was measured by another metric; none if another version wrote the config."""
    began = config_of_any_program(state.config)
    if not isinstance(began, GRPOConfig):
        return
    evaluated = config.data.eval if state.evaluations else ()
    by_pass_rate = config.data.train if config.data.curriculum else ()
    for key, sources in (("data.eval", evaluated), ("data.train", by_pass_rate)):
        for label in (source.label for source in sources):
            before, now = (each.metric_of(label, trains=key == "data.train") for each in (began, config))
            if before not in ("", now):
                yield (
                    f"{key} {label}: its metric was {before} up to step {state.step}, but is {now} from here on. "
                    "Values of the two cannot be compared, also not by checkpoint.best or data.curriculum. Resume with "
                    f"evaluation.metric={before} to go on as before."
                )


def code_warnings(noun: str, before: Sources, now: Sources, *, restarted: bool) -> list[str]:
    """A warning for each user function, class or tool whose code has changed since the run began.

    Raises ValueError if code has changed and the run restarts itself.
    """
    warnings = [f"{name} has changed since the run began." for name in changed_sources(before, now, noun=noun)]
    if warnings and restarted:
        remedy = "Go on with --resume, which accepts other code."
        raise ValueError("\n".join(f"{warning} A run that restarts keeps its code. {remedy}" for warning in warnings))
    return warnings


def model_fingerprints(config: TrainingProgramConfig) -> dict[str, dict[str, str]]:
    """A fingerprint of the start model of each role, by the role's name, and of further models, by their key."""
    models = {role.name: role.model for role in config.roles()} | config.further_models
    by_path = {path: model_fingerprint(path) for path in set(models.values())}
    return {name: by_path[path] for name, path in models.items()}


def _other_models(config: TrainingProgramConfig, state: RunState) -> Iterator[str]:
    """A problem for each start model that the run did not begin with, as far as both models can be read."""
    if not state.models:
        return
    fingerprints = model_fingerprints(config)
    role_models = {role.model_key: (role.name, role.model) for role in config.roles()}
    further_models = {key: (key, path) for key, path in config.further_models.items()}
    for key, (name, model) in {**role_models, **further_models}.items():
        now = fingerprints[name]
        before = state.models.get(name) or dict.fromkeys(now, "none")
        for part in [part for part in before if before[part] and now.get(part) and before[part] != now[part]][:1]:
            yield (
                f"{key}={model}: the fingerprint of its {part} is {now[part]}, but the run began with "
                f"{before[part]}. Resume with the same model, or start another run.dir."
            )
