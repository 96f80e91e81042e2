"""The keys of a stored config that differ from the defaults, for the report and the model card."""

from __future__ import annotations

import contextlib
from typing import Any

from rlhf.config.cli import PROGRAMS
from rlhf.config.load import validated
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.references import from_environment

# Keys of version 0.1.0, which its stored configs have.
REMOVED_KEYS = (
    "environment.accept_changed_code", "environment.try_tools", "logging.mlflow", "reward.accept_changed_code"
)  # fmt: skip


def config_of_any_program(values: dict[str, Any]) -> TrainingProgramConfig | None:
    """The config of the first program that accepts these stored values. None if another version wrote them."""
    values = {
        section: {key: value for key, value in keys.items() if f"{section}.{key}" not in REMOVED_KEYS}
        if isinstance(keys, dict)
        else keys
        for section, keys in from_environment(values).items()
    }
    for program in PROGRAMS.values():
        with contextlib.suppress(ValueError):
            if program.config is not None:
                return validated(program.config, values)
    return None


def non_default_values(values: dict[str, Any]) -> dict[str, Any]:
    """The stored values that differ from their program's defaults.

    All values except null if another version wrote the config.
    """
    config = config_of_any_program(values)
    if config is None:
        return _without_nulls(values)
    changed: dict[str, Any] = _as_stored(config.model_dump(mode="json", exclude_defaults=True), values)
    return changed


def _as_stored(changed: Any, stored: Any) -> Any:
    """The part of the stored values that has the keys of the changed ones."""
    if isinstance(changed, dict) and isinstance(stored, dict):
        return {name: _as_stored(value, stored.get(name, value)) for name, value in changed.items()}
    if isinstance(changed, list) and isinstance(stored, list) and len(changed) == len(stored):
        return [_as_stored(*pair) for pair in zip(changed, stored, strict=True)]
    return stored


def _without_nulls(values: Any) -> Any:
    """The values without null, and without the sections that this leaves empty."""
    if not isinstance(values, dict):
        return values
    kept = {key: _without_nulls(value) for key, value in values.items()}
    return {key: value for key, value in kept.items() if value is not None and value != {}}
