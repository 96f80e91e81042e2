"""YAML files and dotted overrides -> one frozen config; every problem is a message with its key and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from rlhf.config.base import Section, suggest
from rlhf.config.describe import Key, describe_keys

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

C = TypeVar("C", bound=Section)

REMOVED = {
    "rollout.top_p": "It had to be 1. Delete the line.",
    "reward.start_seconds": "It is 120 now. Delete the line.",
    "reward.cache_size": "It is 100,000 now. Delete the line.",
}


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
    try:
        return schema.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise ValueError(explain(schema, error)) from None


def resolved_yaml(config: Section) -> str:
    """The whole config with every default, as YAML that loads to the same config."""
    from omegaconf import OmegaConf

    # Text with ${ must not become a reference when it is read back; a backslash is two in JSON.
    text = config.model_dump_json().replace("${", r"\\${")
    return OmegaConf.to_yaml(OmegaConf.create(json.loads(text)))


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a config by its name with dots; sections in a list are counted: `reward.parts.0.name`."""
    if isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = {str(number): item for number, item in enumerate(values)}
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    flat = [flat_keys(value, f"{prefix}.{key}" if prefix else str(key)) for key, value in values.items()]
    return {key: value for part in flat for key, value in part.items()}


def _read(file: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--config {file}: there is no such file. Give the path of a YAML file.")
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # the YAML parser raises many types, all about the file
        raise ValueError(f"--config {file}: not readable as YAML: {error}") from error
    if isinstance(content, dict):
        return content
    raise ValueError(f"--config {file}: holds a {type(content).__name__}. Write sections, such as `run:`, with keys.")


def _parse_override(override: str) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, separator, _ = override.partition("=")
    if not separator or not key or any(not part for part in key.split(".")):
        raise ValueError(f"{override!r}: not an override. Write section.key=value, such as run.steps=10.")
    try:
        values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except OmegaConfBaseException as error:
        raise ValueError(f"{override!r}: {_first_line(error)}") from error
    except Exception as error:  # the YAML parser, about the value
        raise ValueError(
            f"{override!r}: the value is not readable as YAML ({_first_line(error)}). Quote it: {key}='\"...\"'."
        ) from error
    return values


def _merge(base: Any, overlay: Any) -> Any:
    """Merge mappings key by key; anything else, lists included, is replaced as a whole."""
    if not (isinstance(base, dict) and isinstance(overlay, dict)):
        return overlay
    return base | {key: _merge(base.get(key), value) for key, value in overlay.items()}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def explain(schema: type[Section], error: ValidationError) -> str:
    """One line for each problem that pydantic reports; unknown keys alone if there are any."""
    keys = {key.name: key for key in describe_keys(schema)}
    problems = error.errors()
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    return "\n".join(dict.fromkeys(line for problem in unknown or problems for line in _lines(problem, keys)))


def _lines(problem: ErrorDetails, keys: Mapping[str, Key]) -> Iterator[str]:
    """The messages about one problem.

    Args:
        keys: all keys of the schema by name.
    """
    key = ".".join(map(str, problem["loc"]))
    given = f"{key}={_short(problem['input'])}"
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden":
            yield f"{given}: {_unknown(key, keys)}"
        case "missing":
            below = [name for name in keys if f"{name}.".startswith(f"{key}.") and keys[name].default is None]
            for missing in below or [key]:
                yield f"{missing}: required and not set. Set it in the YAML or as {missing}=VALUE."
        case "value_error":
            yield message if not key or message.startswith(key.split(".")[0]) else f"{key}: {message}"
        case "string_type" if isinstance(problem["input"], bool | int | float):
            text = json.dumps(problem["input"])
            yield f"{given}: text is expected, and YAML reads this as another type. Quote it: {key}='\"{text}\"'."
        case "model_type" | "model_attributes_type":
            yield f"{given}: a section is expected. Set a key in it, such as {key}.KEY=VALUE."
        case "literal_error" if (described := keys.get(_general(key))) is not None:
            yield f"{given}: it has to be {problem['ctx']['expected']} ({described.description})."
        case _:
            yield f"{given}: {message[0].lower()}{message[1:]}. See --help for this key."


def _unknown(key: str, keys: Mapping[str, Key]) -> str:
    """Why a key is refused that the schema does not have, and the known key that may be meant."""
    if key in REMOVED:
        return f"this key was removed. {REMOVED[key]}"
    section, _, name = key.rpartition(".")
    if moved := [known for known in keys if known.endswith(f".{name}") and "[]" not in known]:
        return f"there is no such key. Did you mean {' or '.join(moved)}?"
    prefix, general = (f"{section}.", f"{_general(section)}.") if section else ("", "")
    names = [re.split(r"[.[]", known.removeprefix(general))[0] for known in keys if known.startswith(general)]
    return f"there is no such key. {suggest(name, dict.fromkeys(names), prefix)}"


def _general(key: str) -> str:
    """`data.train.0.path` -> `data.train[].path`, as the list of keys names it."""
    return re.sub(r"\.\d+", "[]", key)


def _short(value: Any) -> str:
    """A value as a message shows it, at most 80 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
