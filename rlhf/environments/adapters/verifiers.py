"""A taskset of the package verifiers, played by its own code: its loop of turns, tools, hooks and rewards.

It was written against verifiers 0.4 (`verifiers.v1`). `verifiers_parts.py` has what runs next to the package; this
module checks that it can.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from rlhf.environments.adapters import load_package
from rlhf.processes.raised import error_with_location

INSTALL = '"verifiers>=0.4,<0.5"'
KEY, HELD_OUT = "environment.id", "eval"
SERVICE = "Run it by a service of yours (`environment: {name: service, ...}`), which may start what it needs."
FIND = "Install its package next to verifiers, or start the run from the folder that holds its module"


class Verifiers:
    """Plays rollouts of a taskset.

    Args:
        id: the taskset, as verifiers finds it: the name of an installed package or module, OWNER/NAME of the hub too.
        args: fields of the taskset's config, such as {split: train}, and `eval`: a number of tasks that are held out
            for evaluation, the first ones; or the fields that evaluation has in place of the others, {split: test}.

    Raises ValueError if the package is missing, or the taskset cannot be loaded or played here.
    """

    def __init__(self, id: str, args: Mapping[str, Any]) -> None:
        load_package("verifiers", install=INSTALL)
        parts = _parts()
        args = dict(args)
        held_out = args.pop(HELD_OUT, 0)
        if not isinstance(held_out, Mapping) and not (type(held_out) is int and held_out >= 0):
            raise ValueError(
                f"environment.args.{HELD_OUT}={held_out!r}: neither a number of tasks nor arguments of the taskset. "
                f"Write 100, for the first 100 tasks, or {{split: test}}."
            )
        self._train = self._eval = _load(parts, id, args)
        self.tools = self._train.tools
        self._skip = 0
        if isinstance(held_out, Mapping):
            self._eval = _load(parts, id, args | dict(held_out))
            self.rows = {"train": self._train.count, "eval": self._eval.count}
            return
        self._skip, count = held_out, self._train.count
        if count is not None and held_out >= count:
            raise ValueError(
                f"environment.args.{HELD_OUT}={held_out}: the taskset has {count} tasks, so none would be left to "
                "train on. Hold out fewer."
            )
        self.rows = {"train": count and count - held_out, "eval": held_out}

    async def play(self, row: Mapping[str, Any], generate: Callable[..., Any], seed: int) -> dict[str, Any]:
        """The rewards and metrics of an episode. Raises RuntimeError if it failed."""
        is_eval = row["split"] == "eval"
        number = row["number"] - 1 + (0 if is_eval else self._skip)
        return read_episode(await (self._eval if is_eval else self._train).play(number, generate, seed))


def _parts() -> Any:
    """The module with the parts. Raises ValueError if the installed verifiers does not have what they are made of."""
    try:
        return importlib.import_module("rlhf.environments.adapters.verifiers_parts")
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"environment.name=verifiers: {sys.executable} has verifiers {version('verifiers')}, in which a part is "
            f"missing ({error}). Install the release that this adapter was written for: pip install {INSTALL}."
        ) from None


def _load(parts: Any, id: str, args: Mapping[str, Any]) -> Any:
    """The episodes of a taskset. Raises ValueError with the key, the reason and the remedy."""
    if "id" in args:
        raise ValueError(f"environment.args.id={args['id']}: environment.id names the taskset. Remove the argument.")
    try:
        return parts.Episodes(id, args)
    except parts.UnusableError as error:
        raise ValueError(f"{KEY}={id}: {error}. {SERVICE}") from None
    except ModuleNotFoundError as error:
        raise ValueError(f"{KEY}={id}: {error.__cause__ or error}. {FIND}.") from None
    except BaseException as error:  # a taskset may raise anything; without a network, it is no Exception
        if hasattr(error, "errors"):
            problems = "; ".join(map(_problem_text, error.errors()))
            raise ValueError(f"environment.args: {problems}. {id} takes {', '.join(parts.fields(id))}.") from None
        if "defines no `__all__`" in str(error):
            reason = "its module has no `__all__` with a taskset of `verifiers.v1`"
            raise ValueError(f"{KEY}={id}: {reason}. Use a release of it for verifiers 0.4.") from None
        raise ValueError(f"{KEY}={id}: its tasks cannot be loaded: {error_with_location(error)}.") from None


def _problem_text(problem: Mapping[str, Any]) -> str:
    """`digits='x': what is wrong`, from an error of pydantic."""
    place = ".".join(str(part) for part in problem["loc"] if part != "taskset")
    return f"{place}={problem['input']!r}: {problem['msg']}" if place else str(problem["msg"])


def read_episode(episode: Any) -> dict[str, Any]:
    """What a rollout of an episode returns: the sum of its rewards as `score`, and each reward and metric by its name.

    Raises RuntimeError with the errors of the episode, and if it has several agents' traces.
    """
    traces = episode.traces
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        raise RuntimeError("; ".join(map(_error_text, errors)) or "the episode failed without an error")
    if len(traces) != 1:
        raise RuntimeError(f"the episode has {len(traces)} runs of agents, but a rollout has one reward")
    (trace,) = traces
    named = {**trace.metrics, **{name: reward.score for name, reward in trace.rewards.items()}}
    renamed = {f"{name}_" if name == "score" else name: value for name, value in named.items()}
    data = trace.task.data
    facts = {"task": data.id or data.name or str(data.idx), "stop": trace.stop_condition}
    return {**facts, **renamed, "score": trace.reward if trace.rewards else None}


def _error_text(error: Any) -> str:
    """`file:line: Type: text` of an error that an episode has recorded."""
    first = (error.traceback or "").partition("The above exception")[0]
    places = re.findall(r'File "([^"]+)", line (\d+)', first)
    return (":".join(places[-1]) + ": " if places else "") + f"{error.type}: {error.message}"
