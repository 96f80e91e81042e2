"""Values of a config that come from the environment: the program gets the value, every file the reference to it.

A config that was written has its stored form: `${oc.env:NAME}`, also in the middle of a text, stands for a variable,
and `\\${` for these two characters of a text. A reference to a key that is a reference itself is written as the latter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.config.base import with_home

Path = tuple[str, ...]

VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*['\"]?(\w+)")
# A reference that is not followed, but written again; the mark stands for its `$`.
_WRITTEN = re.compile(r"(?<!\\)\$\{\s*(oc\.(?:env|decode|create))\s*:")
_MARK = "\x01"
_PLAIN_ARGUMENT = re.compile(rf"[\w./%@+-]+|{_MARK}\{{.*\}}")

_references: dict[Path, tuple[Any, str]] = {}  # by their path in a whole config: the value, and its stored form


class Reference(str):
    """A text in stored form."""


def nodes(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of a config with its path. Sections and lists come before their entries."""
    yield path, values
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for name, value in items:
        yield from nodes(value, (*path, str(name)))


def note_references(written: dict[str, Any], resolved: dict[str, Any], config: dict[str, Any]) -> None:
    """Remember which values come from environment variables, until this program ends or reads another config.

    Args:
        written: the values as the user wrote them. resolved: the same values without references.
        config: all values of the config, in their long forms.
    """
    values, config_values = dict(nodes(resolved)), dict(nodes(config))
    for path in [path for path, (value, _) in _references.items() if config_values.get(path) == value]:
        del _references[path]
    for path, text in _from_environment(written):
        for config_path in _config_paths(path, values.get(path), config_values):
            _references[config_path] = config_values[config_path], text


def variables(values: Any) -> set[str]:
    """The names of the variables to which values refer."""
    return {name for _, text in nodes(values) if isinstance(text, str) for name in VARIABLE.findall(text)}


def with_variables(values: Any, path: Path = ()) -> Any:
    """The values of a whole config, with a `Reference` for each that comes from the environment."""
    value, text = _references.get(path, (None, ""))
    if text and value == values:
        return Reference(text)
    if isinstance(values, Mapping):
        return {name: with_variables(value, (*path, str(name))) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [with_variables(value, (*path, str(number))) for number, value in enumerate(values)]
    return values


def from_environment(values: Any) -> Any:
    """Stored values with their references resolved. A reference to a variable that is not set stays text."""
    if isinstance(values, Mapping):
        return {name: from_environment(value) for name, value in values.items()}
    if isinstance(values, list):
        return [*map(from_environment, values)]
    if not isinstance(values, str) or "${" not in values:
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.create({"value": values}), resolve=True)["value"]  # type: ignore
    except (OmegaConfBaseException, RecursionError):
        return values


def _from_environment(written: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Path and stored form of each value that comes from an environment variable."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not variables(written):
        return
    OmegaConf.register_new_resolver("rlhf.written", _written_again, replace=True)
    config = OmegaConf.create(_marked(written))
    for path, text in nodes(written):
        if not isinstance(text, str) or "${" not in text:
            continue
        try:
            read: Any = config
            for name in path:
                read = read[int(name) if OmegaConf.is_list(read) else name]
            read = OmegaConf.to_container(read, resolve=True) if OmegaConf.is_config(read) else read
        except OmegaConfBaseException:  # a variable has the name of a key
            read = text.replace("$", _MARK)
        for below, value in nodes(read):
            if isinstance(value, str) and VARIABLE.search(stored := value.replace("${", r"\${").replace(_MARK, "$")):
                yield (*path, *below), stored


def _marked(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _marked(value) for name, value in values.items()}
    if isinstance(values, list):
        return [*map(_marked, values)]
    return _WRITTEN.sub(r"${rlhf.written:'\1',", values) if isinstance(values, str) else values


def _written_again(name: str, *arguments: Any) -> str:
    def text(argument: Any) -> str:
        if isinstance(argument, dict):
            return f"{{{','.join(f'{text(name)}:{text(value)}' for name, value in argument.items())}}}"
        if isinstance(argument, list):
            return f"[{','.join(map(text, argument))}]"
        if not isinstance(argument, str):
            return {"None": "null", "True": "true", "False": "false"}.get(str(argument), str(argument))
        quoted = argument.replace("\\", r"\\").replace("'", r"\'")
        return argument if _PLAIN_ARGUMENT.fullmatch(argument) else f"'{quoted}'"

    return f"{_MARK}{{{name}:{','.join(map(text, arguments))}}}"


def _config_paths(path: Path, value: Any, config_values: Mapping[Path, Any]) -> Sequence[Path]:
    """The paths in a config of a value that the user wrote at `path`, maybe in a short form."""
    read, composite = config_values.get(path), isinstance(value, dict | list)
    if path in config_values and (type(read) is type(value) or not (composite or isinstance(read, dict | list))):
        return [path]
    candidates = (value, _expanded(value))
    below = [each for each, read in config_values.items() if _is_within(path, each) and read in candidates]
    return below or ([path] if path in config_values and composite else [])


def _is_within(path: Path, longer: Path) -> bool:
    """True if the longer path has all names of the path, in their order."""
    names = iter(longer)
    return all(name in names for name in path)


def _expanded(value: Any) -> Any:
    return with_home(value) if isinstance(value, str) and os.environ.get("HOME") else value
