"""Locates the user's line that raised an exception, and formats it for messages. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rlhf.processes.code import INSTALLED
from rlhf.processes.confinement import remedy
from rlhf.processes.objects import MAIN

OURS, STANDARD_LIBRARY = Path(__file__).parents[1], Path(os.__file__).parent  # as code names its file: not resolved


class Line(NamedTuple):
    """A line of a traceback.

    Attributes:
        is_own: whether it is in the package that was called, or in a file that is neither installed nor Python's.
        is_program: whether it is in text that was executed (`exec`), which belongs to no module.
    """

    frame: FrameType
    number: int
    is_own: bool
    is_program: bool


def traceback_lines(error: BaseException) -> list[Line]:
    """The lines of an error's traceback outside of this package, the outermost first."""
    lines: list[Line] = []
    package, step = None, error.__traceback__
    while step is not None:
        frame, number, code = step.tb_frame, step.tb_lineno, step.tb_frame.f_code
        step = step.tb_next
        file, module = Path(code.co_filename), str(frame.f_globals.get("__name__"))
        if file.is_relative_to(OURS):
            continue
        package = package or module.partition(".")[0]
        has_module = getattr(sys.modules.get(module), "__dict__", None) is frame.f_globals or module == MAIN
        has_file = has_module and not code.co_filename.startswith("<")
        is_installed = file.is_relative_to(STANDARD_LIBRARY) or not INSTALLED.isdisjoint(file.parts)
        is_own = has_file and (module.partition(".")[0] == package or not is_installed)
        is_program = not has_file and not code.co_filename.startswith("<frozen ")
        lines.append(Line(frame, number, is_own, is_program))
    return lines


def location_of(error: BaseException) -> str:
    """`file:line: ` of the innermost line of user code. Empty if there is none."""
    own = [line for line in traceback_lines(error) if line.is_own]
    return f"{own[-1].frame.f_code.co_filename}:{own[-1].number}: " if own else ""


def user_error_text(error: BaseException, advice: str = "") -> str:
    """`Type: text`, then the advice; by default, how to grant an access that the confinement refused."""
    try:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:  # its `__str__` is other people's
        return type(error).__name__
    return ". ".join(filter(None, [said, advice or remedy(error)]))


def error_with_location(error: BaseException) -> str:
    """`file:line: Type: text` of an exception; without `file:line: ` if it was not raised by user code."""
    return location_of(error) + user_error_text(error)
