"""The rewards that a config can name, and the call of a user's function; runs in the workers of the pool."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlhf.config.reward import OPTIONS_OF_REWARD
from rlhf.rewards.answers.extract import gold_answer
from rlhf.rewards.confine import confined
from rlhf.rewards.forms import exact_reward, f1_reward, format_reward, gsm8k_reward, multiple_choice_reward
from rlhf.rewards.grade import FAILED, OK, UNSCORABLE, Grade
from rlhf.rewards.math import check_gold, math_reward, preload
from rlhf.rewards.shaping import length_reward, repetition_reward

# name -> function(job, options, ask)
REWARDS: dict[str, Callable[[dict[str, Any], Any, Callable[..., Any]], Grade]] = {
    "math": lambda job, options, ask: math_reward(job["response"], job["answer"], options, ask),
    "gsm8k": lambda job, options, ask: gsm8k_reward(job["response"], job["answer"]),
    "multiple_choice": lambda job, options, ask: multiple_choice_reward(job["response"], job["answer"], options),
    "exact": lambda job, options, ask: exact_reward(job["response"], job["answer"], options),
    "f1": lambda job, options, ask: f1_reward(job["response"], job["answer"], options),
    "format": lambda job, options, ask: Grade(format_reward(job["response"], options)),
    "length": lambda job, options, ask: Grade(length_reward(job["metadata"]["response_length"], options)),
    "repetition": lambda job, options, ask: Grade(repetition_reward(job["response"], options)),
}

__all__ = ["REWARDS", "load_user_function", "preload", "run"]


def run(job: dict[str, Any], functions: dict[str, Callable[..., Any]], ask: Callable[..., Any]) -> Grade:
    """Grade one response by one reward.

    Args:
        job: name, options, response, answer, columns, metadata; with `check`, the gold answer is graded against itself.
        functions: user functions by name.
        ask: asks the driver for the earlier result of a costly comparison.
    """
    name = job["name"]
    if name in functions:
        return call_user_function(functions[name], job)
    options = _options(name, json.dumps(job["options"], sort_keys=True))
    try:
        with confined():
            if job.get("check"):
                return check_gold(job["answer"]) if name == "math" else REWARDS[name](as_if_answered(job), options, ask)
            return REWARDS[name](job, options, ask)
    except MemoryError:
        raise
    except Exception as error:  # any exception is caused by the text of the response: it fails alone
        return Grade(None, FAILED, detail=f"{type(error).__name__}: {error}")


@lru_cache(maxsize=256)
def _options(name: str, options: str) -> Any:
    return OPTIONS_OF_REWARD[name].model_validate_json(options)


def as_if_answered(job: dict[str, Any]) -> dict[str, Any]:
    """The job with its gold answer as the response, in a form that every reward reads."""
    gold = gold_answer(job["answer"]) or ""
    return {**job, "response": f"\\boxed{{{gold}}}" if job["name"] != "gsm8k" else f"#### {gold}"}


def load_user_function(name: str) -> Callable[..., Any]:
    """Import `module:function`. Raises ValueError with the reason if that fails."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:  # a module may raise anything, SystemExit too
        raise ValueError(
            f"reward name={name!r}: {module_name} cannot be imported: {type(error).__name__}: {error}. "
            "Install the package, or start the run from the folder that holds it."
        ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"reward name={name!r}: {module_name} has no function {attribute}. Correct the name.")
    return function


def call_user_function(function: Callable[..., Any], job: dict[str, Any]) -> Grade:
    """Call `function(response, answer=, columns=, metadata=, **options)` and check what it returns."""
    try:
        result = function(
            job["response"], answer=job["answer"], columns=job["columns"], metadata=job["metadata"], **job["options"]
        )
        if inspect.isawaitable(result):
            result = asyncio.run(_finish(result))
    except MemoryError:
        raise
    except BaseException as error:
        return _failed(function, f"{type(error).__name__}: {error}", error)
    if isinstance(result, list | tuple):
        if len(result) != 1:
            return _failed(function, f"returned {len(result)} values for one response")
        result = result[0]
    if result is None:
        return Grade(None, UNSCORABLE)
    try:
        value = float(result)
    except (TypeError, ValueError):
        return _failed(function, f"returned {type(result).__name__}, not a number")
    if not math.isfinite(value):
        return _failed(function, f"returned {value}")
    return Grade(value, OK)


def _failed(function: Callable[..., Any], problem: str, error: BaseException | None = None) -> Grade:
    """`file:line: problem`, with the innermost line in the package of the function, or the line of its definition."""
    locations = []
    if error is not None:
        package = str(function.__module__).partition(".")[0]
        locations = [
            f"{frame.f_code.co_filename}:{line}: "
            for frame, line in list(traceback.walk_tb(error.__traceback__))[1:]  # the first frame is in this file
            if str(frame.f_globals.get("__name__")).partition(".")[0] == package
        ]
    unwrapped = inspect.unwrap(function)
    if not locations and inspect.isfunction(unwrapped):
        locations = [f"{unwrapped.__code__.co_filename}:{unwrapped.__code__.co_firstlineno}: "]
    return Grade(None, FAILED, detail="".join(locations[-1:]) + problem)


async def _finish(result: Any) -> Any:
    return await result
