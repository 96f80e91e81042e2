"""Loss and advantage functions of users: their arguments, and the checks before a run starts.

    def policy_loss(logprobs, *, old_logprobs, rollout_logprobs, advantages, response_mask, cu_seqlens) -> Tensor

All are [T], the tokens of several sequences in a row, `cu_seqlens` [S+1] their bounds; `logprobs` has the gradient,
`rollout_logprobs` are the engine's. Values outside of `response_mask` are undefined; the mask may have no True at
all. The result is the loss of each token [T]; losses outside of the mask are ignored. Importance correction, a KL in
the loss, entropy bonus and aggregation follow as for our own losses.

    def advantage(rewards, groups) -> Tensor

`rewards` [R] float64 of all scorable rollouts of a step, minus the KL penalty if it is in the reward; `groups` [R]
int64 their prompts; the result is [R].

A function whose signature names them also gets, per sequence [S] or per rollout [R]: `sources` and `columns`, lists of
the label of the data set and of the columns of the row; `lengths`, int64, the sampled tokens of the whole rollout.

Each may return a pair: that result, and metrics by name. Those of a loss are values per token [T], without gradient;
their mean over the trained tokens of the minibatch is logged, so it depends neither on the microbatches nor on the
number of learners. Those of an advantage are numbers of the step. NaN is no value: that token, or number, is left out.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf.types import PromptRow

LENGTHS = (6, 4, 7)  # tokens of the three example sequences; the first two tokens of each are a prompt
NO_ROW = PromptRow("example", {})
METRIC = re.compile(r"[\w.@=+-]+(?:/[\w.@=+-]+)*")


class ObjectiveError(ValueError):
    """The reason why a user's function cannot be used for training."""


def asked_for(function: Callable[..., Any], rows: Sequence[PromptRow], lengths: Tensor) -> dict[str, Any]:
    """The arguments about the rows of sequences or rollouts that the function names in its signature."""
    available = {
        "sources": [row.source for row in rows],
        "columns": [dict(row.columns) for row in rows],
        "lengths": lengths.clone(),
    }
    return {name: value for name, value in available.items() if name in _parameters(function)}


def needs_rows(function: Callable[..., Any]) -> bool:
    """Whether the function asks for what only the rows of the data say."""
    return not _parameters(function).isdisjoint(("sources", "columns"))


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:  # a function of C without a signature
        return set()


def check_policy_loss(function: Callable[..., Any], rows: Sequence[PromptRow] = (NO_ROW,)) -> None:
    """Try a loss on three short sequences; raises an ObjectiveError, or the function's own error.

    `rows`: of the run's data, for a function that asks for them.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, bounds = sum(LENGTHS), torch.tensor((0, *LENGTHS)).cumsum(0)
    mask = torch.ones(tokens, dtype=torch.bool)
    for start in bounds[:-1].tolist():
        mask[start : start + 2] = False
    mask[-2] = False  # a token of an environment, between two turns
    means = {"logprobs": -1.0, "old_logprobs": -1.0, "rollout_logprobs": -1.0, "advantages": 0.0}
    columns = {
        name: torch.where(mask, mean + 0.5 * torch.randn(tokens, generator=generator), 0.0)
        for name, mean in means.items()
    }
    of_sequences = [rows[number % len(rows)] for number in range(len(LENGTHS))]
    lengths = torch.tensor([int(part.sum()) for part in mask.split(LENGTHS)])

    def computed(*, changed: Tensor | None = None, mask: Tensor = mask) -> list[Tensor]:
        """[T] each: loss, its gradient by log-prob, metrics; inputs at the tokens `changed` are lowered by 0.5."""
        given = {name: column.clone() for name, column in columns.items()}
        if changed is not None:
            for column in given.values():
                column[changed] -= 0.5
        logprobs = given.pop("logprobs").requires_grad_()
        given |= asked_for(function, of_sequences, lengths)
        loss, metrics = read_loss(function(logprobs, **given, response_mask=mask, cu_seqlens=bounds), tokens)
        if not loss.requires_grad:
            raise ObjectiveError("its loss has no gradient: compute it from logprobs, without detach() or no_grad()")
        loss = torch.where(mask, loss, 0.0)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        logged = [values.nan_to_num() for _, values in sorted(metrics.items())]
        return [loss.detach(), gradient, *logged]

    def same(here: Tensor, *, changed: Tensor) -> bool:
        return all(torch.equal(a[here], b[here]) for a, b in zip(computed(), computed(changed=changed), strict=True))

    loss, gradient, *_ = computed()
    if not (loss.isfinite().all() and gradient[mask].isfinite().all()):
        raise ObjectiveError("its loss or the gradient is not finite for log-probs near -1 and advantages near 1")
    if not gradient[mask].any():
        raise ObjectiveError("its gradient is 0 at every token")
    if not same(mask, changed=~mask):
        raise ObjectiveError(
            "tokens outside of response_mask, which were not sampled, change the loss of others or their metrics. Use "
            "torch.where(response_mask, x, 0.0) before you add up over tokens"
        )
    place = torch.arange(tokens)
    middle = (place >= bounds[1]) & (place < bounds[2])
    if not same(mask & ~middle, changed=mask & middle):
        raise ObjectiveError(
            "the tokens of one sequence change the loss of another or its metrics: the result would depend on which "
            "sequences are computed together. Add up within cu_seqlens alone"
        )
    computed(mask=torch.zeros_like(mask))  # a learner may have nothing to train on


def read_loss(result: Any, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss [T] that a function returned, and its metrics [T] float32; ObjectiveError if it returned another."""
    loss, metrics = _with_metrics(result)
    _check_shape(loss, tokens, "the loss of each token")
    for name, values in metrics.items():
        _check_shape(values, tokens, f"a value of each token for the metric {name}")
    return loss, {name: values.detach().float() for name, values in metrics.items()}


def check_advantage(function: Callable[..., Any], rows: Sequence[PromptRow] = (NO_ROW,)) -> None:
    """Try an advantage on groups of 3, 2 and 1 rollouts, and on equal rewards; raises as `check_policy_loss`."""
    groups = torch.tensor([0, 0, 0, 2, 2, 5])  # the other groups have no scorable rollout
    of_rollouts = [rows[group % len(rows)] for group in groups.tolist()]
    for rewards in ([1.0, 0.0, 0.5, 0.0, 1.0, 1.0], [1.0] * 6):
        own_advantages(function, torch.tensor(rewards, dtype=torch.float64), groups, of_rollouts, groups + 3)


def own_advantages(
    function: Callable[..., Any], rewards: Tensor, groups: Tensor, rows: Sequence[PromptRow], lengths: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The advantages [R] of a function and its metrics; ObjectiveError unless they are finite numbers.

    `rows` and `lengths` [R] are what `asked_for` gives it.
    """
    result = function(rewards.clone(), groups.clone(), **asked_for(function, rows, lengths))  # it may compute in place
    advantages, metrics = _with_metrics(result)
    _check_shape(advantages, len(groups), "the advantage of each rollout")
    if not advantages.float().isfinite().all():  # tokens have it as float32
        raise ObjectiveError(
            f"its advantages are not finite for rewards {rewards.tolist()} of groups {groups.tolist()}"
        )
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    return advantages.detach().double(), {name: number for name, number in numbers.items() if math.isfinite(number)}


def _with_metrics(result: Any) -> tuple[Any, dict[str, Any]]:
    """What a function returned, and the metrics by name that came with it."""
    if not isinstance(result, tuple):
        return result, {}
    if len(result) != 2 or not isinstance(result[1], Mapping):
        kinds = ", ".join(type(each).__name__ for each in result)
        raise ObjectiveError(f"it returns a tuple ({kinds}), not (tensor, dictionary of metrics)")
    for name in result[1]:
        if not isinstance(name, str) or not METRIC.fullmatch(name):
            raise ObjectiveError(f"its metric {name!r} has no usable name. Use letters, digits and ._@=+-/")
    return result[0], dict(result[1])


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # of a tensor of several numbers
        raise ObjectiveError(f"its metric {name} is {str(value)[:80]!r}, not a number") from None


def _check_shape(result: Any, length: int, wanted: str) -> None:
    if not isinstance(result, Tensor) or result.shape != (length,):
        given = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ObjectiveError(f"it returns {given}, not {wanted}, a tensor [{length}]")
