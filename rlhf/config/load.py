"""YAML files and dotted overrides -> one frozen config, with messages that a user can act on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhf.config.base import Section, short, unknown_keys
from rlhf.config.describe import describe_keys, submodel

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

C = TypeVar("C", bound=Section)

# Sections that accept several shapes normalize themselves, so their own models name what is unknown in them.
FREE_FORM_KEYS = ("reward", "data")


def load_config(schema: type[C], files: Sequence[str], overrides: Sequence[str] = ()) -> C:
    """Read the YAML files in order (later ones win), then the overrides, and validate.

    Args:
        schema: the config model of the program.
        files: paths of YAML files.
        overrides: `section.key=value` strings.

    Raises:
        ValueError: naming the key, the value, the reason and the remedy; one line for each problem.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    values: dict[str, Any] = {}
    for file in files:
        values = _merge(values, _read(file))
    for override in overrides:
        values = _merge(values, _parse_override(override))
    try:
        values = OmegaConf.to_container(OmegaConf.create(values), resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ValueError(
            f"{_first_line(error)}. In a value, ${{...}} stands for another key; write \\${{...}} where it is text."
        ) from None
    keys = [key.name for key in describe_keys(schema) if "[]" not in key.name]
    if unknown := list(_unknown_keys(schema, values, (), keys)):
        raise ValueError("\n".join(unknown))
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(_explain(schema, error)) from None


def resolved_yaml(config: Section) -> str:
    """The whole config with every default, as YAML that loads to the same config."""
    from omegaconf import OmegaConf

    # JSON's numbers are YAML's; text with ${ in it must not become a reference on the way back.
    plain = _escaped(config.model_dump(mode="json"))
    return OmegaConf.to_yaml(OmegaConf.create(plain))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _read(file: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--config {file}: there is no such file. Give the path of a YAML file.")
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # the YAML parser raises many types, all of them about the file
        raise ValueError(f"--config {file}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"--config {file}: holds a {type(content).__name__}. Write sections, such as `run:`, with keys."
        )
    return {str(key): value for key, value in content.items()}


def _parse_override(override: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, separator, _ = override.partition("=")
    if not separator or not key or any(not part for part in key.split(".")):
        raise ValueError(f"{override!r}: not an override. Write section.key=value, such as run.steps=10.")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except OmegaConfBaseException as error:
        raise ValueError(f"{override!r}: {_first_line(error)}") from error
    except Exception as error:  # the YAML parser, about what stands after the equals sign
        raise ValueError(
            f"{override!r}: the value is not readable as YAML ({_first_line(error)}). Quote it: {key}='\"...\"'."
        ) from error
    assert isinstance(parsed, dict)
    return {str(name): value for name, value in parsed.items()}


def _merge(base: Any, overlay: Any) -> Any:
    """Merge mappings key by key; anything else, lists included, is replaced as a whole."""
    if not (isinstance(base, dict) and isinstance(overlay, dict)):
        return overlay
    merged = dict(base)
    for key, value in overlay.items():
        merged[key] = _merge(base.get(key), value)
    return merged


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _unknown_keys(schema: type[BaseModel], values: Any, path: tuple[str, ...], keys: Sequence[str]) -> Iterator[str]:
    """A message for each key that the schema does not have, in this section and below; `keys` are those it has."""
    yield from unknown_keys(schema, values, ".".join(path), elsewhere=keys)
    for key, value in values.items() if isinstance(values, dict) else ():
        section = submodel(schema.model_fields[key]) if key in schema.model_fields else None
        if section is not None and key not in FREE_FORM_KEYS:
            yield from _unknown_keys(section, value, (*path, key), keys)


def _explain(schema: type[BaseModel], error: ValidationError) -> str:
    """One line for each problem that pydantic found."""
    lines = [line for problem in error.errors() for line in _problem(schema, problem)]
    return "\n".join(dict.fromkeys(lines))


def _problem(schema: type[BaseModel], problem: ErrorDetails) -> Iterator[str]:
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "missing":
            for missing in _required_below(schema, tuple(map(str, problem["loc"]))):
                yield f"{missing}: required and not set. Set it in the YAML or as {missing}=VALUE."
        case "value_error":
            yield message if not key or message.startswith(key.split(".")[0]) else f"{key}: {message}"
        case "string_type" if isinstance(problem["input"], bool | int | float):
            text = json.dumps(problem["input"])
            yield f"{key}={text}: text is expected, and YAML reads this as another type. Quote it: {key}='\"{text}\"'."
        case "model_type" | "model_attributes_type":
            yield f"{key}={short(problem['input'])}: a section is expected. Set a key in it, such as {key}.KEY=VALUE."
        case "literal_error":
            meaning = _field_at(schema, problem["loc"])
            yield f"{key}={short(problem['input'])}: it has to be {problem['ctx']['expected']} ({meaning})."
        case _:
            yield f"{key}={short(problem['input'])}: {message[0].lower()}{message[1:]}. See --help for this key."


def _field_at(schema: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """The description of the field at this place of the schema; see --help where a list or a mapping is on the way."""
    model: type[BaseModel] | None = schema
    field: FieldInfo | None = None
    for name in loc:
        field = model.model_fields.get(str(name)) if model is not None else None
        model = submodel(field) if field is not None else None
    return (field.description if field is not None else None) or "see --help for this key"


def _required_below(schema: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys without a default at or below a path of the schema."""
    model: type[BaseModel] | None = schema
    for name in path:
        field = model.model_fields.get(name) if model is not None else None
        model = submodel(field) if field is not None else None
    if model is None:
        return [".".join(path)]
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return [key for name in required for key in _required_below(schema, (*path, name))]
