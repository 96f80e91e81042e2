"""Callbacks of the user (`run.callbacks`): imported and examined before a run starts. `run/callbacks.py` calls them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from rlhf.processes.code import import_problem, load_module

METHODS = {"on_step": ("step", "metrics", "groups"), "on_evaluation": ("step", "metrics")}


def callback_problems(names: Sequence[str]) -> list[str]:
    """The reasons why a run cannot call these callbacks. Makes no object of a class."""
    problems = []
    for name in names:
        try:
            load_callback(name)
        except ValueError as error:
            problems.append(str(error))
    return problems


def load_callback(name: str) -> Any:
    """The class or object that `run.callbacks` names; ValueError if a run cannot call it."""
    try:
        module = load_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ValueError(f"run.callbacks={name}: {import_problem(name, error)}.") from None
    wanted = name.rpartition(":")[2]
    if not hasattr(module, wanted):
        raise ValueError(f"run.callbacks={name}: the module has no {wanted}. Define it, or correct the name.")
    callback = getattr(module, wanted)
    defined = [method for method in METHODS if hasattr(callback, method)]
    if not defined:
        wants = " or ".join(f"{method}({', '.join(arguments)})" for method, arguments in METHODS.items())
        raise ValueError(f"run.callbacks={name}: {wanted} has no method {wants}. Give it one.")
    reasons = [_constructor_problem(callback), *(_method_problem(callback, method) for method in defined)]
    for reason in filter(None, reasons):
        raise ValueError(f"run.callbacks={name}: {reason}")
    return callback


def _constructor_problem(callback: Any) -> str:
    if not isinstance(callback, type):
        return ""
    try:
        inspect.signature(callback).bind()
    except TypeError as error:
        return f"{callback.__name__} is made without arguments, but: {error}. Give it a default, or name an object."
    except ValueError:  # a class of C without a signature
        pass
    return ""


def _method_problem(callback: Any, method: str) -> str:
    function, arguments = getattr(callback, method), METHODS[method]
    wanted = f"def {method}(self, {', '.join(arguments)})"
    if not callable(function):
        return f"{method} is {type(function).__name__}, no method. Write `{wanted}`."
    if inspect.iscoroutinefunction(function):
        return f"{method} is `async def`, and the run does not wait for it. Write `{wanted}`."
    takes_self = isinstance(callback, type) and inspect.isfunction(inspect.getattr_static(callback, method))
    try:
        inspect.signature(function).bind(*("self",) * takes_self, *arguments)
    except TypeError as error:
        return f"{method} does not take ({', '.join(arguments)}): {error}. Write `{wanted}`."
    except ValueError:
        pass
    return ""
