"""The attributes of an environment at the end of a rollout, as JSON, for reward functions in another process.

Reward functions in TRL's signature read `environments`: `[env.score for env in environments]`, private attributes too.
`said` writes down the attributes of an instance in its process; `EnvironmentView` reads them in another one. Tuples,
sets, dictionaries with any keys and integers of any length keep their type, since a reward that compares with a tuple
would otherwise be wrong without an error. Arrays of numpy come back as lists.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

from rlhf.processes.returned import as_utf8

MAX_CHARACTERS = 200_000  # largest attribute as JSON
MAX_REASON = 500  # characters
MAX_BITS = 10_000  # longer integers are sent in hexadecimal: Python writes at most 4300 decimal digits
SEQUENCES = {"@tuple": tuple, "@set": set, "@frozenset": frozenset}


def said(instance: Any) -> dict[str, Any]:
    """Attributes and properties: {"class": [module, name], "values": {name: value}, "unsaid": {name: reason}}."""
    values: dict[str, Any] = {}
    unsaid: dict[str, str] = {}
    for name in _names(instance):
        try:
            value = as_json(getattr(instance, name))
            if len(json.dumps(value)) > MAX_CHARACTERS:
                raise TypeError(f"it has over {MAX_CHARACTERS} characters as JSON")
            values[name] = value
        except MemoryError:
            raise
        except Exception as error:  # a property may raise anything
            unsaid[name] = str(error if isinstance(error, TypeError) else repr(error))[:MAX_REASON]
    return {"class": [type(instance).__module__, type(instance).__qualname__], "values": values, "unsaid": unsaid}


def _names(instance: Any) -> dict[str, None]:
    """The names of attributes and properties, in order, including those of the class, which may be defaults."""
    names: dict[str, None] = {}
    for cls in reversed(type(instance).__mro__[:-1]):
        for name, value in vars(cls).items():
            is_method = isinstance(value, classmethod | staticmethod) or inspect.isroutine(value)
            if not is_method and not (name.startswith("__") and name.endswith("__")):
                names[name] = None
    return names | dict.fromkeys(getattr(instance, "__dict__", ()))


def as_json(value: Any) -> Any:
    """The value in a form that JSON can write. Raises TypeError if there is none."""
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return as_json(value.tolist())
    if isinstance(value, int) and int.bit_length(value) > MAX_BITS:
        return {"@int": int.__format__(value, "x")}
    if value is None:
        return None
    for kind in (bool, int, float, str):  # without the subclass: an enumeration of numbers or text is its value
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("@") for key in value):
            return {str(key): as_json(item) for key, item in value.items()}
        return {"@dict": [[as_json(key), as_json(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    for tag, sequence in SEQUENCES.items():
        if isinstance(value, sequence):
            items = value if isinstance(value, tuple) else sorted(value, key=repr)
            return {tag: [as_json(item) for item in items]}
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} cannot be written as JSON")


def from_json(value: Any) -> Any:
    """The value from which `as_json` made this."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, items),) = value.items()
        if tag in SEQUENCES:
            return SEQUENCES[tag](from_json(item) for item in items)
        if tag == "@int":
            return int(items, 16)
        if tag == "@dict":
            return {from_json(key): from_json(item) for key, item in items}
    return {key: from_json(item) for key, item in value.items()}


class EnvironmentView:
    """The attributes of an environment that lives in another process.

    `isinstance(view, Class)` holds if the class has been imported. Reading an attribute that could not be written as
    JSON raises AttributeError with the reason.
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self.__dict__.update({name: from_json(value) for name, value in attributes["values"].items()})
        self.__dict__["__unsaid"] = dict(attributes["unsaid"])
        self.__dict__["__of"] = tuple(attributes["class"])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        module, name = self.__dict__["__of"]
        value: Any = sys.modules.get(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, type) else EnvironmentView

    def __getattr__(self, name: str) -> Any:
        class_name = self.__dict__["__of"][1]
        reason = self.__dict__["__unsaid"].get(name, "it is a method, or there was no such attribute at the end")
        raise AttributeError(
            f"{class_name}.{name} cannot be read here: {reason}. Keep values for the reward in attributes that are "
            "numbers, text, lists or dictionaries."
        )


def plain_json(value: Any) -> Any:
    """JSON without the marks of `as_json`: tuples and sets become lists, keys and all other values become text."""
    if isinstance(value, Mapping):
        return {as_utf8(str(key)): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_json(item) for item in (value if isinstance(value, list | tuple) else sorted(value, key=repr))]
    try:
        value = from_json(as_json(value))
    except TypeError:
        value = str(value)
    return as_utf8(value) if isinstance(value, str) else value
