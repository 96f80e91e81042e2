"""The JSON schema of a tool from its signature, type hints and docstring, equal to transformers' `get_json_schema`.

It needs only the standard library, since the interpreter of an environment may lack transformers. The order of keys is
equal too: templates write schemas as JSON, so the order reaches the prompt.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

BASIC: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
BY_NAME = {"PIL.Image.Image": {"type": "image"}, "torch.Tensor": {"type": "audio"}}  # without an import of either
SECTIONS = re.compile(r"Args:|Returns:|Raises:")
LATER_SECTIONS = re.compile(r"Returns:|Raises:")
ARGS = re.compile(r"\n\s*Args:\n")
RETURNS = re.compile(r"\n\s*Returns:\n")
ARGUMENT = re.compile(r"\s*(\w+):\s*(.*)", re.DOTALL)
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The schema that a chat template gets for a tool: a function or bound method.

    Raises ValueError unless every argument has a type hint with a JSON schema, and a text in a Google-style docstring
    with any `(choices: ...)` as JSON.
    """
    name = getattr(function, "__name__", "operation")
    docstring = (inspect.getdoc(function) or "").strip()
    if not docstring:
        raise ValueError(f"{name} has no docstring. It tells the model what the tool does: write one.")
    parameters = _parameters(function, name)
    returned = parameters["properties"].pop("return", None)
    described = _arguments(docstring)
    for argument, schema in parameters["properties"].items():
        if argument not in described:
            raise ValueError(
                f"{name}: the docstring does not describe {argument}. Add `{argument}: ...` under `Args:`."
            )
        text = described[argument]
        if choices := CHOICES.search(text):
            schema["enum"] = [c.strip() if isinstance(c, str) else c for c in json.loads(choices[1])]
            text = text[: choices.start()].strip()
        schema["description"] = text
    description = SECTIONS.split(docstring, maxsplit=1)[0].strip()
    result: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if returned is not None:
        if start := RETURNS.search(docstring):
            returned["description"] = docstring[start.end() :].split("Raises:", 1)[0].strip()
        result["return"] = returned
    return {"type": "function", "function": result}


def _parameters(function: Callable[..., Any], name: str) -> dict[str, Any]:
    hints = get_type_hints(function)
    signature = list(inspect.signature(function).parameters.values())
    if signature and signature[0].name in ("self", "cls") and signature[0].annotation is inspect.Parameter.empty:
        hints.pop(signature.pop(0).name, None)
    for parameter in signature:
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(f"{name}: argument {parameter.name} has no type hint. Add one, such as `: str`.")
    schema: dict[str, Any] = {"type": "object", "properties": {key: _hint_schema(hint) for key, hint in hints.items()}}
    if required := [p.name for p in signature if p.default is inspect.Parameter.empty]:
        schema["required"] = required
    return schema


def _hint_schema(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None:
        by_name = BY_NAME.get(f"{getattr(hint, '__module__', '')}.{getattr(hint, '__qualname__', '')}")
        return dict(BASIC.get(hint) if hint in BASIC else by_name or {"type": "object"})  # type: ignore[arg-type]
    if origin is Union or origin is types.UnionType:
        return _union_schema(arguments)
    if origin is Literal and arguments:
        return _literal_schema(arguments)
    if origin is list:
        return {"type": "array", "items": _hint_schema(arguments[0])} if arguments else {"type": "array"}
    if origin is tuple:
        if not arguments:
            return {"type": "array"}
        if len(arguments) == 1 or ... in arguments:
            raise ValueError(f"{hint} has no JSON schema. Use list[...] for several values of one type.")
        return {"type": "array", "prefixItems": [_hint_schema(argument) for argument in arguments]}
    if origin is dict:
        values = {"additionalProperties": _hint_schema(arguments[1])} if len(arguments) == 2 else {}
        return {"type": "object", **values}
    raise ValueError(f"{hint} has no JSON schema. Use int, float, str, bool, list, dict, Literal, or a union of them.")


def _union_schema(arguments: tuple[Any, ...]) -> dict[str, Any]:
    schemas = [_hint_schema(argument) for argument in arguments if argument is not type(None)]
    if len(schemas) == 1:
        result = schemas[0]
    elif all(schema.keys() == {"type"} and isinstance(schema["type"], str) for schema in schemas):
        names = sorted({schema["type"] for schema in schemas})
        result = {"type": names[0] if len(names) == 1 else names}
    else:
        result = {"anyOf": schemas}
    return {**result, "nullable": True} if type(None) in arguments else result


def _literal_schema(values: tuple[Any, ...]) -> dict[str, Any]:
    if not all(type(value) in (int, float, str, bool, type(None)) for value in values):
        raise ValueError(f"Literal{list(values)}: a value is neither number, text, bool nor None.")
    names = list(dict.fromkeys(BASIC[type(value)]["type"] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _arguments(docstring: str) -> dict[str, str]:
    """Argument -> its text under `Args:`, with lines joined by a space."""
    start = ARGS.search(docstring)
    if start is None:
        return {}
    section = LATER_SECTIONS.split(docstring[start.end() :], maxsplit=1)[0]
    described: list[tuple[str, list[str]]] = []
    for line in filter(str.strip, section.split("\n")):
        entry = ARGUMENT.match(line)
        if entry and (not described or described[-1][1]):  # a name without a text takes the next line, whatever it is
            described.append((entry[1], [entry[2].strip()] if entry[2].strip() else []))
        elif described:
            described[-1][1].append(line.strip())
    return {name: " ".join(lines) for name, lines in described}
