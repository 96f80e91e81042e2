"""Decides from an exception of a tool whether the user should hear of it. Standard library only.

The model reads every exception as the answer to its call. The user is warned of exceptions that the call may not have
caused: any but a ValueError, an error that names an argument of the call, or an error in a program of the model. A tool
is *broken* if no argument causes the exception: a NameError, an ImportError, an AttributeError of a module or of an
object that is no JSON value, or a refusal of the confinement (network, a file, an environment variable).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf.processes.confinement import NO_NETWORK, remedy
from rlhf.processes.raised import error_text, location_of, traceback_lines
from rlhf.processes.returned import as_utf8

MAX_CHARACTERS = 1000  # of an error in a warning
JSON_TYPES = str | int | float | list | dict | None  # arguments have these types, whatever the schema says
MIN_NAME = 3  # characters of an argument that an error names; shorter texts stand in many errors


class Fault(NamedTuple):
    """An exception of a tool that the model may not have caused.

    Attributes:
        said: `file:line: Type: text`.
        is_broken: True if the tool is broken; False if the arguments may be the cause too.
    """

    tool: str
    said: str
    is_broken: bool


def fault_of(error: BaseException, tool: str, arguments: Any) -> Fault | None:
    """Judge an exception of a tool; None if it only answers the call. `arguments`: of the model's call."""
    try:
        text = str(error)
    except Exception:  # its `__str__` is other people's
        return None
    lines = traceback_lines(error)
    if not lines or lines[-1].is_program or isinstance(error, ValueError) or _names_an_argument(error, arguments):
        return None
    is_broken = (
        isinstance(error, NameError | ImportError)
        or (isinstance(error, AttributeError) and not isinstance(error.obj, JSON_TYPES))
        or NO_NETWORK in text
        or bool(remedy(error))
    )
    return Fault(tool, as_utf8(location_of(error) + error_text(error))[:MAX_CHARACTERS], is_broken)


def _names_an_argument(error: BaseException, arguments: Any) -> bool:
    values = arguments.values() if isinstance(arguments, Mapping) else ()
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename in str(arguments):
        return True
    return any(isinstance(value, str) and len(value) >= MIN_NAME and value in str(error) for value in values)
