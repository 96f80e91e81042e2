"""The base of every section of the YAML, and parts of error messages."""

from __future__ import annotations

import difflib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

T = TypeVar("T")

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
# `package.module:name` or `path/to/file.py:name`: a function or class of the user
GIVEN = "__main__:"  # begins the name of an object that a Python program gave (rlhf.api)
USER_CODE = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|[^:]+\.py):[A-Za-z_]\w*")

Resume = Literal["fixed", "free", "rounding"]
REQUIRED: Any = ...  # the default of a key that must be set


class Section(BaseModel):
    """One section of the config; every field has a default (or is required), a unit and a one-line description.

    Types are strict, unknown keys are refused, and nothing changes after validation.

    Attributes:
        resume: whether a resumed run may change the keys of this section; None: as in the section around it. `free`:
            they change where, how fast and how watched the run is, not what it learns. `rounding`: they change how sums
            are rounded, and stay as they are in a deterministic run. A key may have its own value.
    """

    resume: ClassVar[Resume | None] = None
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


def key(default: T, description: str, *, resume: Resume | None = None, **constraints: Any) -> T:
    """A key of a section; --help shows the description, one line with its unit. `resume`: as that of `Section`."""
    if resume is not None:
        constraints["json_schema_extra"] = {"resume": resume}
    field: T = Field(default, description=description, **constraints)
    return field


def with_home(path: str) -> str:
    """The path with a leading `~` or `~user` replaced by the home folder; ValueError if that is not known."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ValueError(f"{path}: the home folder of {path.split('/')[0]} is not known. Write the whole path.")
    return expanded


FilePath = Annotated[str, AfterValidator(with_home)]  # of a file or folder, the name of a repository, or an address

MAX_LISTED = 50  # names in a message


def suggest(name: str, known: Iterable[str], prefix: str = "", *, cutoff: float = 0.5) -> str:
    """The known name that is spelled most like `name`, or all known names unless they are many."""
    known = list(known)
    if nearest := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
        return f"Did you mean {prefix}{nearest[0]}?"
    if len(known) > MAX_LISTED:
        return f"None of the {len(known)} known names is like it. Remove it."
    return f"Known: {', '.join(known) or 'none'}."


def first_line(error: Exception) -> str:
    """The first line of an exception's text; its type if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def error_text(error: BaseException) -> str:
    """One line about an error: `FILE: reason` for an OSError, otherwise `Type: text`."""
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


def short_value(value: Any) -> str:
    """A value as a message shows it, at most 80 characters; text keeps its quotes where YAML needs them."""
    text = value if isinstance(value, str) and not reads_as_another_type(value) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def reads_as_another_type(text: Any) -> bool:
    """True if YAML reads this text, without its quotes, as a number, true, false or null."""
    try:
        return isinstance(text, str) and not isinstance(json.loads(text), str)
    except ValueError:
        return False


MISSING = "there is no such file"
KINDS = {
    stat.S_IFDIR: "it is a folder", stat.S_IFIFO: "it is a pipe", stat.S_IFSOCK: "it is a socket",
    stat.S_IFCHR: "it is a device", stat.S_IFBLK: "it is a device",
}  # fmt: skip


def file_problem(path: Path) -> str:
    """The reason why a path is no readable file: it is missing, a folder, a pipe, ... Empty if it is a file."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode), "")
    except (OSError, ValueError) as error:  # ValueError: of a null byte in a name
        return MISSING if isinstance(error, FileNotFoundError | NotADirectoryError) else error_text(error)


def check_user_code(name: str) -> str:
    """The name of a function or class of the user, with its home folder; ValueError if it has another form."""
    if not USER_CODE.fullmatch(name):
        raise ValueError(f"{name!r} is not of the form package.module:name or path/to/file.py:name.")
    return with_home(name)


UserCode = Annotated[str, AfterValidator(check_user_code)]


class OwnOr:
    """Type of a key that is one of our names or a user function: `Annotated[str, OwnOr("ppo", "gspo")]`."""

    def __init__(self, *known: str) -> None:
        self._known = known

    def _check(self, value: str) -> str:
        if value in self._known:
            return value
        if ":" not in value:
            expected = f"{', '.join(map(repr, self._known))}, or MODULE:FUNCTION"
            raise PydanticCustomError("literal_error", "not known", {"expected": expected})
        return check_user_code(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"enum": [*self._known]}, {"type": "string", "pattern": r":|\$\{"}]}
