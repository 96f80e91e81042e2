"""Environments of other packages as classes of ours. They run under `environment.python`, next to that package alone.

Each module has one class, which is made from the keys of the config: its `play` plays a rollout, its `rows` says how
many problems it has for `train` and `eval`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any


def load_package(name: str, *, install: str, environment: str = "") -> Any:
    """The module of another package. Raises ValueError with the remedy if this interpreter cannot import it.

    Args:
        name: its module, such as `reasoning_gym.factory`.
        install: what pip installs.
        environment: `environment.name`, where the package has another name.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        python = f"{package}-venv/bin/python"
        raise ValueError(
            f"environment.name={environment or package}: {sys.executable} cannot import {package} ({error}). Give it a "
            f"virtual environment of its own, `python -m venv {package}-venv; {python} -m pip install {install}`, and "
            f"set environment.python={python}."
        ) from None
