"""The keys of a config schema for --help: name, default, type and one line, in the order of the YAML."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "true | false", type(None): "null", dict: "mapping"}


@dataclass(frozen=True)
class Key:
    """One key of the list; `default` is None if the key is required."""

    name: str
    default: str | None
    kind: str
    description: str


def describe_keys(schema: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[Key]:
    """Every key of the schema; entries of a list of mappings as `section.list[].key`, once for each kind of mapping."""
    yield from _describe(schema, path, set())


def _describe(schema: type[BaseModel], path: tuple[str, ...], seen: set[type[BaseModel]]) -> Iterator[Key]:
    for name, field in schema.model_fields.items():
        key = ".".join((*path, name))
        section = submodel(field)
        if section is not field.annotation:  # a section that may be null has a line of its own
            yield Key(key, _default(field), kind_of(field), field.description or "")
        if section is not None:
            yield from _describe(section, (*path, name), seen)
            continue
        entry = _entry_model(field.annotation)
        if entry is not None and entry not in seen:
            seen.add(entry)
            yield from _describe(entry, (*path, f"{name}[]"), seen)


def describe_options(schemas: Mapping[str, type[BaseModel]]) -> Iterator[Key]:
    """The options of every named part, as `name: option`."""
    for part, schema in schemas.items():
        for name, field in schema.model_fields.items():
            yield Key(f"{part}: {name}", _default(field), kind_of(field), field.description or "")


def submodel(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a nested section (or of a section that may be null); None for any other field."""
    union = get_origin(field.annotation) in (Union, types.UnionType)
    kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)] if union else [field.annotation]
    first = kinds[0]
    return first if len(kinds) == 1 and isinstance(first, type) and issubclass(first, BaseModel) else None


def kind_of(field: FieldInfo) -> str:
    """The type and its bounds, as --help shows them: `integer > 0`, `text | null`, `ppo | gspo`."""
    return _with_bounds(_name(field.annotation), field.metadata)


def _name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [item.metadata if isinstance(item, FieldInfo) else [item] for item in arguments[1:]]
        return _with_bounds(_name(arguments[0]), [bound for bounds in nested for bound in bounds])
    if origin in (Union, types.UnionType):
        return " | ".join(_name(part) for part in arguments)
    if origin is Literal:
        return " | ".join(str(choice) for choice in arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {_name(arguments[0])}"
    if origin is tuple:
        return f"[{', '.join(map(_name, arguments))}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return TYPE_NAMES.get(origin or annotation, str(annotation))


def _with_bounds(name: str, metadata: list[Any]) -> str:
    """`integer | null` with the bound gt=0 -> `integer > 0 | null`."""
    bounds = []
    for item in metadata:
        match item:
            case Gt(gt=limit):
                bounds.append(f"> {limit:g}")
            case Ge(ge=limit):
                bounds.append(f">= {limit:g}")
            case Lt(lt=limit):
                bounds.append(f"< {limit:g}")
            case Le(le=limit):
                bounds.append(f"<= {limit:g}")
    first, *rest = name.split(" | ")
    return " | ".join([f"{first} {' and '.join(bounds)}" if bounds else first, *rest])


def _entry_model(annotation: Any) -> type[BaseModel] | None:
    arguments = get_args(annotation) if get_origin(annotation) in (tuple, list) else ()
    first = arguments[0] if arguments else None
    return first if isinstance(first, type) and issubclass(first, BaseModel) else None


def _default(field: FieldInfo) -> str | None:
    if field.is_required():
        return None
    value = _plain(field.get_default(call_default_factory=True))
    return value if isinstance(value, str) else json.dumps(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.model_dump(mode="json", exclude_defaults=True) if isinstance(value, BaseModel) else value
