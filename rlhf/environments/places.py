"""Hides paths of this machine in the errors that a model reads: it must not learn them, and each machine has others."""

from __future__ import annotations

import os
import re
import tempfile

PATH = re.compile(r"(?:(?<![\w./-])|(?<=file://))/(?!/)[^\s'\"`,:;()<>\[\]{}|]+")


def without_places(text: str, *, written: str) -> str:
    """The text with this process's folder for temporary files as `.`, and other paths of this machine by their names.

    A path is one of this machine if its first folder is there. Paths in the model's text `written` stay.
    """
    own = tempfile.gettempdir()

    def shown(found: re.Match[str]) -> str:
        path = found[0].rstrip(".")
        folder, _, rest = path[1:].partition("/")
        if path in written or not rest or not os.path.isdir(f"/{folder}"):
            return found[0]
        is_own = path == own or path.startswith(f"{own}/")
        return ("." + path.removeprefix(own) if is_own else os.path.basename(path.rstrip("/"))) + found[0][len(path) :]

    return PATH.sub(shown, text)
