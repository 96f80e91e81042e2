"""Decides from an exception of a tool whether the tool is broken or the model's call was wrong. Standard library only.

A tool is broken if arguments that fit its schema cannot avoid the exception, so that no model can learn to avoid it:

    NameError               in the user's code
    ImportError             and whatever else an imported module raises
    AttributeError          in the user's code, if the arguments fit the schema; not of a None that a call returned
    TypeError               likewise, for a call with wrong arguments or of something that cannot be called
    a refusal of the confinement: network, a file or an environment variable that the arguments do not name

If a tool executes a program that the model wrote, that program does not count as the user's code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlhf.processes.confinement import NO_NETWORK, remedy
from rlhf.processes.raised import Line, lines_of, place_of, said_by

ON_PURPOSE = "RAISE_VARARGS"  # of `raise` and `assert`
OF_ATTRIBUTES = ("LOAD_METHOD", "LOAD_ATTR", "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR")
WRONG_CALL = re.compile(r"positional argument|keyword argument|takes .*argument|is not callable")
MAX_CAUSES = 10  # an error may be its own cause


class Fault(NamedTuple):
    """An exception of a tool that the model may not have caused.

    Attributes:
        said: `file:line: Type: text`.
        is_broken: True if the tool is certainly broken; False if the arguments may be the cause too.
    """

    tool: str
    said: str
    is_broken: bool


def fault_of(error: BaseException, tool: str, arguments: Any, *, fit: bool) -> Fault | None:
    """Judge an exception of a tool; None if it is an ordinary answer to a call.

    Args:
        arguments: of the model's call.
        fit: whether they fit the schema of the tool.
    """
    try:
        str(error)
    except Exception:  # other people's
        return None
    for each, is_direct in _with_causes(error):
        if _is_defect(each, arguments, fit=fit, is_direct=is_direct):
            return Fault(tool, place_of(each) + said_by(each), is_broken=True)
    if not fit or _is_refusal(error, arguments):
        return None
    return Fault(tool, place_of(error) + said_by(error), is_broken=False)


def _with_causes(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    """Yield (exception, is_direct): the error and the members of its group, each followed by its causes.

    A cause is included only if the error shows it, by `raise ... from` or with its text. `is_direct`: it is no cause.
    """
    members = getattr(error, "exceptions", ())  # of an ExceptionGroup, since Python 3.11
    for member in (error, *(each for each in members if isinstance(each, BaseException))):
        yield member, True
        shown = member
        for _ in range(MAX_CAUSES):
            before = shown.__cause__ or shown.__context__
            if before is None or (before is not shown.__cause__ and str(before) not in str(shown)):
                break  # the code has handled it
            yield before, False
            shown = before


def _is_defect(error: BaseException, arguments: Any, *, fit: bool, is_direct: bool) -> bool:
    lines = lines_of(error)
    if not lines:
        return False
    last, without_program = lines[-1], not any(line.is_program for line in lines)
    for number, line in enumerate(lines):
        if line.is_own and line.operation.startswith("IMPORT_"):
            return not any(each.is_program for each in lines[:number])
    match error:
        case NameError():
            return last.is_own and last.operation.startswith(("LOAD_", "DELETE_"))
        case ImportError():
            return without_program and not _names_an_argument(error, arguments)
    if not is_direct or not without_program:
        return False
    match error:
        case AttributeError():
            return fit and _asks_for_attribute(lines, of_none=str(error).startswith("'NoneType'"))
        case TypeError():  # CALL_FUNCTION_EX is f(*values), whose number may be the model's
            is_call = last.is_own and last.operation.startswith("CALL") and last.operation != "CALL_FUNCTION_EX"
            return fit and is_call and bool(WRONG_CALL.search(str(error)))
    refused = NO_NETWORK in str(error) or bool(remedy(error))
    return refused and not _is_on_purpose(last) and not _names_an_argument(error, arguments)


def _asks_for_attribute(lines: list[Line], *, of_none: bool) -> bool:
    """Whether user code names an attribute that is missing; for `getattr` the model may have given the name.

    None is often how a call says that it found nothing, as `re.search`; an attribute that is None was never set.
    """
    asking = [line for line in lines if line.frame.f_code.co_name not in ("__getattr__", "__getattribute__")]
    if not asking or not asking[-1].is_own or asking[-1].operation not in OF_ATTRIBUTES:
        return False
    return not of_none or asking[-1].operation_before.startswith(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_CONST"))


def _is_refusal(error: BaseException, arguments: Any) -> bool:
    """Whether this looks like an ordinary refusal: by `raise`, about an argument, or in the model's program."""
    lines = lines_of(error)
    if not lines or lines[-1].is_program or isinstance(error, ValueError):
        return True
    if _is_on_purpose(lines[-1]) and type(error) not in (RuntimeError, NotImplementedError):
        return True
    values = list(arguments.values()) if isinstance(arguments, Mapping) else []
    match error:  # what has no such key or position; the contents of lists and dictionaries are often open
        case KeyError() if error.args and error.args[0] in values:
            return True
        case LookupError() if any(isinstance(value, list | dict) for value in values):
            return True
        case IndexError() if any(isinstance(value, int) for value in values):
            return True
        case TypeError() if {} in values:
            return True
    return _names_an_argument(error, arguments)


def _is_on_purpose(last: Line) -> bool:
    return last.is_own and last.operation == ON_PURPOSE


def _names_an_argument(error: BaseException, arguments: Any) -> bool:
    values = arguments.values() if isinstance(arguments, Mapping) else ()
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.filename in str(arguments):
        return True
    return any(isinstance(value, str) and len(value) > 2 and value in str(error) for value in values)
