"""Reward functions in TRL's signature: they get a group and return a list; None leaves a response to other rewards.

    def f(prompts, completions, completion_ids, <every column>, trainer_state, log_extra, log_metric, environments)

`environments` is given only if the rollouts have environments. A function names the arguments that it wants; unlike in
TRL, it need not take the others as `**kwargs`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from rlhf.config.printing import as_utf8
from rlhf.processes.returned import read_scores

OF_TRL = {"completions", "completion_ids", "environments", "trainer_state", "log_extra", "log_metric"}
OUR_ARGUMENTS = {"columns", "metadata"}  # TRL has no such arguments
NOT_COLUMNS = {"prompt", "completion", "completion_ids"}


class Judged(NamedTuple):
    """The result of a function for a group."""

    rewards: list[float | None]  # one per rollout; None where the function does not judge
    metrics: dict[str, list[float]]  # name -> values that the function logged with `log_metric`


def has_trl_signature(function: Callable[..., Any]) -> bool:
    """True for TRL's signature. Ours may name its first argument `completions` too, but has `columns` or `metadata`."""
    try:
        names = inspect.signature(function).parameters.keys()
    except ValueError:  # a function in C without a signature
        return False
    return bool(OF_TRL & names) and not OUR_ARGUMENTS & names


def as_completion(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages after the prompt in TRL's form: arguments of calls as dictionaries, calls without ids."""
    messages = []
    for turn in turns:
        messages.append({name: value for name, value in turn.items() if name != "tool_calls"})
        if functions := [call["function"] for call in turn.get("tool_calls") or ()]:
            named = ({"name": function["name"], "arguments": _arguments(function)} for function in functions)
            messages[-1]["tool_calls"] = [{"type": "function", "function": function} for function in named]
    return messages


def _arguments(function: Mapping[str, Any]) -> Any:
    written = function["arguments"]
    try:
        return json.loads(written) if isinstance(written, str) else written
    except (ValueError, RecursionError):
        return written


async def judge(
    function: Callable[..., Any],
    *,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
    environments: Sequence[Any] | None = None,
) -> Judged:
    """Call a function for a group, as TRL calls it for a batch. `trainer_state` is empty, `log_extra` does nothing.

    Args:
        prompts: per rollout, messages (including those that `reset` added) or text.
        completions: per rollout, messages from `as_completion` if the prompt is messages, else text.
        completion_ids: per rollout, the token ids after the prompt, including those of the environment.
        rows: per rollout, the columns of its row.
        environments: per rollout an `EnvironmentView`; None without environments.

    Raises whatever the function raises; TypeError or ValueError if it returned another number of rewards, or a value
    that is no number.
    """
    metrics: dict[str, list[float]] = {}
    given: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name not in NOT_COLUMNS}
    given |= {"prompts": list(prompts), "completions": list(completions)}
    given["completion_ids"] = [list(ids) for ids in completion_ids]
    given |= {"trainer_state": SimpleNamespace(), "log_extra": lambda column, values: None}
    given["log_metric"] = lambda name, value: metrics.setdefault(as_utf8(str(name)), []).append(float(value))
    given |= {} if environments is None else {"environments": list(environments)}
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    result = function(**given)
    if inspect.isawaitable(result):
        result = await result
    return Judged(read_scores(result, len(prompts)), metrics)
