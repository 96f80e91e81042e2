"""Whether a tool that raised is broken, or was asked for what it does not do. Standard library only.

A tool is broken where no argument that fits its schema should lead to the error, so no model can learn to avoid it:

    NameError               in a line of the user's
    an import that fails    whatever the imported module raises
    AttributeError          likewise, for arguments that fit the schema; not of a None that a call returned
    TypeError               likewise, of a call with the wrong number or names of arguments, or of what is no function
    what the confinement refused: network, a file, an environment variable that the arguments do not name

A program of the model that a tool executes is no line of the user's.
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
    """An error of a tool for which the model may not be to blame.

    Attributes:
        said: `file:line: Type: text`.
        is_broken: it shows that the tool is broken; else it may also be that no argument was right.
    """

    tool: str
    said: str
    is_broken: bool


def fault_of(error: BaseException, tool: str, arguments: Any, *, fit: bool) -> Fault | None:
    """The fault of a tool that an error shows; None for what its calls may well be answered with.

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
    """An error and those of its group, each followed by those that it passes on; and whether it is none of these."""
    members = getattr(error, "exceptions", ())  # of an ExceptionGroup, since Python 3.11
    for member in (error, *(each for each in members if isinstance(each, BaseException))):
        yield member, True
        shown = member
        for _ in range(MAX_CAUSES):
            before = shown.__cause__ or shown.__context__
            if before is None or (before is not shown.__cause__ and str(before) not in str(shown)):
                break  # it was handled
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
    """Whether a line of the user's names an attribute that is not there; `getattr` may get its name from the model.

    None is often how a call says that it found nothing, as `re.search`; an attribute that is None was never set.
    """
    asking = [line for line in lines if line.frame.f_code.co_name not in ("__getattr__", "__getattribute__")]
    if not asking or not asking[-1].is_own or asking[-1].operation not in OF_ATTRIBUTES:
        return False
    return not of_none or asking[-1].operation_before.startswith(("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_CONST"))


def _is_refusal(error: BaseException, arguments: Any) -> bool:
    """Whether a tool may well raise this for what it does not do: by `raise`, about an argument, or in its program."""
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
