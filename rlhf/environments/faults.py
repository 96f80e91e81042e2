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
    """The error, and its causes as far as it shows them: by `raise ... from`, or with their text."""
    yield error
    for _ in range(MAX_CAUSES):
        cause = error.__cause__ or error.__context__
        if cause is None or (cause is not error.__cause__ and str(cause) not in str(error)):
            return
        yield cause
        error = cause


def _names_an_argument(error: BaseException, arguments: Any) -> bool:
    values = arguments.values() if isinstance(arguments, Mapping) else ()
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename in str(arguments):
        return True
    return any(isinstance(value, str) and len(value) >= MIN_NAME and value in str(error) for value in values)
