"""Reads names from vLLM's source without importing it, so that a wrong one is refused before anything starts."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def vllm_source(file: str) -> list[ast.stmt]:
    """The statements of a file of the package; [] if vLLM is not installed."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return []
    return ast.parse((Path(package.origin).parent / file).read_text()).body
