"""All reasons why a run cannot start on this machine, in one list, before anything is created."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from rlhf.config.grpo import GRPOConfig
from rlhf.config.model_folder import looks_local
from rlhf.config.program import TrainingProgramConfig
from rlhf.data.model_checks import check_model_files, model_problems
from rlhf.data.model_files import hub_silence, local_model_config
from rlhf.data.read import check_source, config_sources
from rlhf.plan.local_machine import machine_problems
from rlhf.plan.memory import BYTES, GIB, checkpoint_bytes
from rlhf.plan.model_shape import shape_at
from rlhf.plan.resources import check_resources, joins_a_cluster, local_resources
from rlhf.plan.reward_trial import reward_problems


def start_problems(config: GRPOConfig) -> list[str]:
    """Reasons to refuse a training run with rollouts: those of any run, and the user's rewards."""
    return run_problems(config) + reward_problems(config)


def run_problems(config: TrainingProgramConfig) -> list[str]:
    """Reasons to refuse a training run: data, models, run folder and its disk, CPUs and GPUs."""
    machine = _gather(lambda: _check_run_folder(config), lambda: _check_local_resources(config))
    return input_problems(config) + machine


def evaluation_problems(config: GRPOConfig) -> list[str]:
    """Reasons to refuse an evaluation, which starts only engines."""
    resources = _gather(lambda: _check_local_resources(config, trains=False))
    return input_problems(config, trains=False) + resources + reward_problems(config, trains=False)


def input_problems(config: TrainingProgramConfig, *, trains: bool = True, with_data: bool = True) -> list[str]:
    """Data and models that are missing, or that do not fit the config."""
    kinds = (("eval", "train") if trains else ("eval",)) if with_data else ()
    sources = {key: source for which in kinds for key, source in config_sources(config.data, which).items()}
    problems = _gather(*(partial(check_source, source, key) for key, source in sources.items()))
    for role in config.roles(trains=trains):
        problems += _gather(partial(check_model_files, role.model, key=role.model_key, generates=not role.scalar))
    problems += _gather(lambda: _check_models(config, trains=trains))
    problems += _hub_problems({role.model_key: role.model for role in config.roles(trains=trains)})
    return list(dict.fromkeys(problems))


def _hub_problems(models: Mapping[str, str]) -> list[str]:
    """A message for each model, by its key, that only the hub has, if the hub does not answer."""
    absent = {key: name for key, name in models.items() if not looks_local(name) and local_model_config(name) is None}
    if not absent or not (reason := hub_silence()):
        return []
    return [
        f"{key}={name}: there is no such folder, the cache of this machine does not have it, and the hub cannot be "
        f"asked ({reason}). Name a local folder, or fetch it where the hub answers: hf download {name}"
        for key, name in absent.items()
    ]


def _gather(*checks: Callable[[], None]) -> list[str]:
    """The messages of all checks that raise ValueError."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems += str(error).splitlines()
    return problems


def _check_models(config: TrainingProgramConfig, *, trains: bool) -> None:
    if problems := model_problems(config, trains=trains):  # raises where a config.json is not JSON
        raise ValueError("\n".join(problems))


def _check_local_resources(config: TrainingProgramConfig, *, trains: bool = True) -> None:
    if joins_a_cluster(config):
        return
    resources = _gather(lambda: check_resources(config, local_resources(), trains=trains))
    if problems := [*machine_problems(), *resources]:
        raise ValueError("\n".join(problems))


def existing_folder(config: TrainingProgramConfig) -> Path:
    """run.dir, or the nearest folder above it that exists."""
    run_dir = Path(config.run.dir).absolute()
    return next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())


def run_bytes(config: TrainingProgramConfig, *, written: int = 0) -> int | None:
    """The most that a run writes: its checkpoints (`checkpoint.most`) and the exported model.

    Args:
        written: number of checkpoints that exist already.

    Returns:
        None if the model's config.json is not found or not supported.
    """
    policy = shape_at(config.model.path)
    checkpoint = checkpoint_bytes(config, policy)
    if checkpoint is None or policy is None:
        return None
    checkpoints = 0 if config.checkpoint_every is None else max(1, config.checkpoint.most - written)
    return checkpoints * checkpoint + config.run.export * BYTES[config.model.dtype] * policy.parameters


def _check_run_folder(config: TrainingProgramConfig) -> None:
    """Raises ValueError if the run folder cannot be written, or if its disk has no room for the checkpoints."""
    folder = existing_folder(config)
    if not folder.is_dir():
        raise ValueError(f"run.dir={config.run.dir}: {folder} is a file. Name a folder.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir={config.run.dir}: {folder} cannot be written. Name a folder that can be.")
    written = len(list(Path(config.run.dir).glob("checkpoints/step-" + 6 * "[0-9]")))  # by a run that is resumed
    needed, free = run_bytes(config, written=written) or 0, shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"run.dir={config.run.dir}: checkpoints and export need {needed / GIB:.1f} GiB (checkpoint.keep="
            f"{config.checkpoint.keep}, and those being written and copied), but {folder} has {free / GIB:.1f} GiB "
            "free. Make room, keep fewer, or write to another disk."
        )
