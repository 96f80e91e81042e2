"""A config from files, mappings, keys and objects, with the checks and messages of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.api.objects import GivenObjects
from rlhf.config import cli
from rlhf.config.base import with_home
from rlhf.config.load import load_config as load_files
from rlhf.config.load import merged, read_values, resolved
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.references import nodes
from rlhf.processes.objects import keep
from rlhf.run.folder import GIVEN, why_unusable

# Arguments of public functions are Any: a type checker holds the values of `**{"run.steps": 20}` against each of them.
Layer = str | os.PathLike[str] | Mapping[str, Any] | TrainingProgramConfig
Layers = Layer | Sequence[Layer]

# arguments of `train` and the keys that they set
OBJECT_KEYS = {
    "reward": "reward",
    "tools": "tools",
    "environment": "environment",
    "policy_loss": "algo.policy_loss",
    "advantage": "algo.advantage",
    "callbacks": "run.callbacks",
}
AS_LISTS = ("reward", "tools", "callbacks")  # of which one may stand without its list
MADE = ("model", "tokenizer", "data", "eval_data")  # rows and models that exist in memory become files


def load_config(config: Any = (), *, program: Any = "grpo", **given: Any) -> Any:
    """Read a config, as the command line does with `--config` and overrides; ValueError with all its problems.

    Args:
        config: a YAML file, a mapping, another config, or several of these; later ones win. The keys of a mapping are
            sections, or names with dots: `{"run.steps": 10}`.
        program: grpo, ppo, sft or reward-model.
        given: keys and objects, as for `rlhf.train`; they win over `config`.

    Returns:
        The frozen config, a `GRPOConfig` for grpo. It was compared with itself alone: `rlhf.train` and `rlhf.Trainer`
        check what it names.
    """
    return read_config(config, program=program, given=given)


def check_alone(*, in_main_thread: bool = True) -> None:
    """Raise a ValueError if this program cannot start a run now."""
    if in_main_thread:
        cli.check_main_thread()
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise ValueError(
            "this Python program uses Ray already: a run has not ended, or ray.init() was called. Leave the context of "
            "the Trainer, or call ray.shutdown() if you started Ray yourself."
        )


def schema_of(program: str) -> type[TrainingProgramConfig]:
    known = {name: each.config for name, each in cli.PROGRAMS.items() if each.config is not None}
    if program not in known:
        raise ValueError(f"program={program!r}: there is no such program. Use one of {', '.join(known)}.")
    return known[program]


def read_config(
    config: Layers,
    *,
    program: str,
    given: Mapping[str, Any],
    resume: bool = False,
    folder: Callable[[], Path] | None = None,
    contradictions: Callable[[Any], Iterable[str]] = lambda config: config.contradictions(),
    **settings: Any,
) -> Any:
    """The config of a program; `contradictions` and `settings` as for `rlhf.config.load.load_config`.

    Rows and models are written to `folder`, by default one in run.dir, once nothing contradicts the config. ValueError
    if run.dir holds a run already, unless it is resumed.
    """

    def written(config: Any) -> list[str]:
        problems = [*contradictions(config)]
        if not problems:
            made.write()
        return problems

    schema = schema_of(program)
    made = GivenObjects(folder or (lambda: _run_folder(files, given, resume=resume)), resume=resume)
    files = [_layer(layer, made) for layer in as_layers(config)]
    own = {OBJECT_KEYS.get(name, name): _listed(name, value) for name, value in given.items() if name not in MADE}
    values = nested({key: made.as_value(value, key) for key, value in own.items()})
    for name, which, label in (("data", "train", "train"), ("eval_data", "eval", "test")):
        if name in given:
            values = merged({"data": {which: made.data(given[name], f"data.{which}", label)}}, values)
    if model := made.model(given.get("model"), given.get("tokenizer")):
        values = merged({"model": {"path": model}}, values)
    checked = load_files(schema, [*files, values], contradictions=written, **settings)
    keep(checked, {value for _, value in nodes(checked.model_dump(mode="json")) if isinstance(value, str)})
    return checked


def as_layers(config: Layers) -> list[Layer]:
    """The layers of a config, of which later ones win, where one or several are given."""
    return [config] if isinstance(config, str | os.PathLike | Mapping | TrainingProgramConfig) else [*config]


def _listed(name: str, value: Any) -> Any:
    alone = name in AS_LISTS and value is not None and not isinstance(value, list | tuple)
    is_section = name == "reward" and isinstance(value, Mapping) and "name" not in value
    return [value] if alone and not is_section else value


def _layer(layer: Layer, made: GivenObjects) -> str | dict[str, Any]:
    if isinstance(layer, TrainingProgramConfig):
        return made.of_config(layer)
    if isinstance(layer, str | os.PathLike):
        return os.fspath(layer)
    if not isinstance(layer, Mapping):
        raise ValueError(f"config={layer!r:.80}: not a YAML file, a mapping, or a list of them.")
    return nested({str(key): made.as_value(value, str(key)) for key, value in layer.items()})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections from names with dots: `{"run.steps": 3}` -> `{"run": {"steps": 3}}`."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        result = merged(result, value)
    return result


def _run_folder(files: Sequence[str | Mapping[str, Any]], given: Mapping[str, Any], *, resume: bool) -> Path:
    """The folder for the rows and models of a run."""
    keys = nested({key: value for key, value in given.items() if key.startswith("run")})
    values = resolved(merged(read_values(files, []), keys), "config")
    run = values.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("dir"), str | os.PathLike):
        raise ValueError("run.dir: required and not set. Set it in the YAML or as run.dir=VALUE.")
    path = Path(with_home(os.fspath(run["dir"])))
    if not resume and (problem := why_unusable(path)):
        raise ValueError(problem)
    return path / GIVEN
