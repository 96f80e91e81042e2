"""The keys of a config schema, from its JSON schema: name, default, type and one line, in the order of the YAML."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

TYPE_NAMES = {"string": "text", "boolean": "true | false", "object": "mapping"}
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@dataclass(frozen=True)
class Key:
    """One key of a config. `default` is None if the key is required."""

    name: str
    default: str | None
    kind: str
    description: str


@functools.cache
def describe_keys(schema: type[BaseModel], prefix: str = "") -> tuple[Key, ...]:
    """Every key of the schema; keys of a list of mappings as `section.list[].key`."""
    root = schema.model_json_schema()
    return tuple(_describe(root, root.get("$defs", {}), prefix))


def _describe(section: Mapping[str, Any], sections: Mapping[str, Any], prefix: str) -> Iterator[Key]:
    for name, field in section["properties"].items():
        choices = [choice for choice in field.get("anyOf", [field]) if choice.get("type") != "null"]
        entries = field.get("items", {})
        if "$ref" not in field:  # a section that may be null has a line of its own
            default = field.get("default")
            shown = default if isinstance(default, str) else json.dumps(default)
            required = name in section.get("required", ())
            yield Key(prefix + name, None if required else shown, _kind(field), field.get("description", ""))
        for nested, suffix in ((choices[0], "."), (entries, "[].")):
            if "$ref" in nested:
                yield from _describe(sections[nested["$ref"].split("/")[-1]], sections, prefix + name + suffix)


def _kind(field: Mapping[str, Any]) -> str:
    """The type and its bounds, as --help shows them: `integer > 0`, `text | null`, `ppo | gspo`."""
    match field:
        case {"$ref": _}:
            return "mapping"
        case {"anyOf": choices}:
            return " | ".join(map(_kind, choices))
        case {"enum": choices}:
            return " | ".join(map(str, choices))
        case {"const": choice}:
            return str(choice)
        case {"prefixItems": items}:
            return f"[{', '.join(map(_kind, items))}]"
        case {"items": items}:
            return f"list of {_kind(items)}"
    bounds = " and ".join(f"{sign} {field[bound]:g}" for bound, sign in BOUNDS.items() if bound in field)
    return f"{TYPE_NAMES.get(field['type'], field['type'])} {bounds}".rstrip()
