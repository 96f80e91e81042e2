"""The base of every section of the YAML: strict types, no unknown keys, nothing changes after validation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of the config; every field has a default (or is required), a unit and a one-line description."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
