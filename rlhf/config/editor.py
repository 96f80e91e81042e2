"""JSON Schema of config files, with which an editor completes keys, shows descriptions and marks mistakes.

It describes a file as it may be written: any key may be left out, since another file or the command line can give it;
short forms are allowed, such as a path in place of a mapping with `path`; and `${...}` may stand for any value.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}  # to another key, or to a variable of the environment
NOTHING: Schema = {"type": "null"}


def editor_schema(config: type[BaseModel]) -> Schema:
    """The schema of the files of a program whose whole config is `config`."""
    schema = config.model_json_schema()
    sections = schema["$defs"]
    if "RewardPart" in sections:
        sections["RewardPart"]["additionalProperties"] = True  # the options of each reward stand next to its name
    for section in (schema, *sections.values()):
        section.pop("required", None)
        section["properties"] = {name: _as_written(field) for name, field in section["properties"].items()}
    if "RewardConfig" in sections:
        parts = {"type": "array", "items": {"$ref": "#/$defs/RewardPart"}}
        sections["RewardConfig"] = {"anyOf": [sections["RewardConfig"], parts]}
    for name, short in {
        "SourceConfig": [TEXT], "DatasetConfig": [TEXT], "RewardPart": [TEXT], "EnvironmentPart": [TEXT],
        "EnvironmentConfig": [TEXT, NOTHING],
    }.items():  # fmt: skip
        if name in sections:
            sections[name] = {"anyOf": [sections[name], *short]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _as_written(field: Schema) -> Schema:
    """The schema of one key, with its short forms."""
    field = {name: value for name, value in field.items() if name != "resume"}
    entries = field.get("items", {})
    described: Schema = {name: field[name] for name in ("description", "default") if name in field}
    match field:
        case {"$ref": section}:  # the defaults of a whole section are those of its keys
            return {"$ref": section}
        case {"type": "array"} if "$ref" in entries or entries == TEXT:
            return {**described, "anyOf": [{"type": "array", "items": entries}, entries, NOTHING]}
    choices = field.get("anyOf", [field])
    if any(choice.get("type") == "string" and "enum" not in choice for choice in choices):
        return field
    return {**described, "anyOf": [*({k: v for k, v in c.items() if k not in described} for c in choices), REFERENCE]}
