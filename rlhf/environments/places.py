"""Hides paths of this machine in the errors that a model reads: it must not learn them, and each machine has others."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

STARTED_IN = os.getcwd()  # read once: a tool may change or delete the current folder
IN_A_PATH = r"[^\s'\"`,:;()<>\[\]{}|]"


def without_places(text: str, *, written: str) -> str:
    """The text with this process's folder for temporary files as `.`, and other paths of ours by their last names.

    Ours are the paths of Python and its packages, of this user, those below the folder that the run was started in, and
    every file of a traceback. Paths in `written`, what the model wrote, stay.
    """

    def shown(found: re.Match[str]) -> str:
        path = found[0].rstrip(".")
        if path in written:
            return found[0]
        name = f".{path.removeprefix(found['own'])}" if found["own"] else os.path.basename(path.rstrip("/"))
        return name + found[0][len(path) :]

    return _known(tempfile.gettempdir()).sub(shown, text)


@cache
def _known(own: str) -> re.Pattern[str]:
    """Matches paths; those in the folder `own` begin with the group of this name."""
    ours = [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *filter(None, sys.path)]
    ours += [STARTED_IN, os.path.expanduser("~"), str(Path(__file__).parents[2])]
    begin, end = r"(?:(?<![\w./-])|(?<=file://))", rf"(?:/{IN_A_PATH}*|(?=\.*(?!{IN_A_PATH})))"
    known = rf"{begin}(?:(?P<own>{_any([own])})|{_any(ours)}){end}"
    return re.compile(rf'{known}|(?<=File ")/[^"\n]+(?=", line \d)')


def _any(places: Iterable[str]) -> str:
    """A pattern for absolute paths, and for where they lead; the longest first."""
    forms = {os.path.normpath(form) for place in places for form in (place, os.path.realpath(place))}
    return "|".join(
        re.escape(form) for form in sorted(forms, key=len, reverse=True) if os.path.isabs(form) and form != "/"
    )
