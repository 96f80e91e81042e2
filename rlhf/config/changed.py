"""The keys of a stored config that differ from the defaults: what a report, a model card and `rlhf show` begin with."""

from __future__ import annotations

import contextlib
from typing import Any

from rlhf.config.cli import PROGRAMS
from rlhf.config.load import validated
from rlhf.config.program import TrainingProgramConfig


def config_of_any_program(values: dict[str, Any]) -> TrainingProgramConfig | None:
    """The config as the program reads it that accepts all its keys; None if none does, as in another version."""
    for program in PROGRAMS.values():
        with contextlib.suppress(ValueError):
            if program.config is not None:
                return validated(program.config, values)
    return None


def changed_values(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a whole config that differ from the defaults of its program; they load to the same config.

    For a config of another version: all values except null.
    """
    config = config_of_any_program(values)
    return _without_nulls(values) if config is None else config.model_dump(mode="json", exclude_defaults=True)


def _without_nulls(values: Any) -> Any:
    """The values without null, and without the sections that this leaves empty."""
    if not isinstance(values, dict):
        return values
    kept = {key: _without_nulls(value) for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}
