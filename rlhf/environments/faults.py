"""Decides from an exception of a tool whether the user is warned of it. Standard library only.

The model reads every exception as the answer to its call. The user is warned of exceptions that the call may not have
caused: any but a ValueError, an error that names an argument of the call, and an error in a program of the model. A
NameError or ImportError counts whatever the tool wraps it in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.processes.raised import error_with_location, traceback_lines
from rlhf.processes.returned import as_utf8

MAX_CHARACTERS = 1000  # of an error in a warning
MAX_CAUSES = 10  # an error may be its own cause
MIN_NAME = 3  # characters of an argument that an error names; shorter texts stand in many errors


def fault_of(error: BaseException, arguments: Any) -> str | None:
    """`file:line: Type: text` of an exception; None if it only answers the call, whose `arguments` are given."""
    try:
        str(error)
        error = next((each for each in _with_causes(error) if isinstance(each, NameError | ImportError)), error)
    except Exception:  # its `__str__` is other people's
        return None
    lines = traceback_lines(error)
    if not lines or lines[-1].is_program or isinstance(error, ValueError) or _names_an_argument(error, arguments):
        return None
    return as_utf8(error_with_location(error))[:MAX_CHARACTERS]


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the members of its group, each with its causes if it shows them: by `from`, or with their text."""
    members = getattr(error, "exceptions", ())  # of an ExceptionGroup, since Python 3.11
    for shown in (error, *(each for each in members if isinstance(each, BaseException))):
        yield shown
        for _ in range(MAX_CAUSES):
            cause = shown.__cause__ or shown.__context__
            if cause is None or (cause is not shown.__cause__ and str(cause) not in str(shown)):
                break
            yield cause
            shown = cause


def _names_an_argument(error: BaseException, arguments: Any) -> bool:
    values = [*arguments.values()] if isinstance(arguments, Mapping) else []
    match error:
        case NameError():
            return False
        case ImportError():
            return error.name in values
        case OSError(filename=str() as file) if file in str(arguments):
            return True
        case LookupError(args=[str() | int() | float() as key, *_]) if key in values:
            return True
        case IndexError() if any(isinstance(value, int) for value in values):
            return True
    return any(isinstance(value, str) and len(value) >= MIN_NAME and value in str(error) for value in values)
