"""Objectives of the user: what their functions are given, and what is asked of them before a run starts.

    def policy_loss(logprobs, *, old_logprobs, rollout_logprobs, advantages, response_mask, cu_seqlens) -> Tensor

All are [T], the tokens of several sequences in a row, `cu_seqlens` [S+1] their bounds; `logprobs` has the gradient,
`rollout_logprobs` are the engine's, and all are 0 outside of `response_mask`. The result is the loss of each token [T].
What is outside of the mask is left out of it; importance correction, a KL in the loss, entropy bonus and aggregation
follow as for our own losses.

    def advantage(rewards, groups) -> Tensor

`rewards` [R] float64 of all scorable rollouts of a step, `groups` [R] int64 their prompts; the result is [R].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTHS = (6, 4, 7)  # tokens of the sequences of the example, of which the first two are a prompt's


def check_policy_loss(function: Callable[..., Any]) -> None:
    """Try a loss on three short sequences.

    Raises:
        ValueError: why it cannot be trained with.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, bounds = sum(LENGTHS), torch.tensor((0, *LENGTHS)).cumsum(0)
    mask = torch.ones(tokens, dtype=torch.bool)
    for start in bounds[:-1].tolist():
        mask[start : start + 2] = False
    means = {"logprobs": -1.0, "old_logprobs": -1.0, "rollout_logprobs": -1.0, "advantages": 0.0}
    columns = {
        name: torch.where(mask, mean + 0.5 * torch.randn(tokens, generator=generator), 0.0)
        for name, mean in means.items()
    }

    def computed(at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Loss and gradient by log-prob; with other numbers at the tokens `at`."""
        changed = {name: column.clone() for name, column in columns.items()}
        if at is not None:
            for column in changed.values():
                column[at] -= 0.5
        logprobs = changed.pop("logprobs").requires_grad_()
        loss = function(logprobs, **changed, response_mask=mask, cu_seqlens=bounds)
        _check_shape(loss, tokens, "the loss of each token")
        if not loss.requires_grad:
            raise ValueError("its loss has no gradient: compute it from logprobs, without detach() or no_grad()")
        (gradient,) = torch.autograd.grad(torch.where(mask, loss, 0.0).sum(), logprobs)
        return loss.detach(), gradient

    loss, gradient = computed()
    if not (loss[mask].isfinite().all() and gradient[mask].isfinite().all()):
        raise ValueError("its loss or the gradient is not finite for log-probs near -1 and advantages near 1")
    if not gradient[mask].any():
        raise ValueError("its gradient is 0 at every token")
    loss_elsewhere, gradient_elsewhere = computed(~mask)
    if not (torch.equal(loss[mask], loss_elsewhere[mask]) and torch.equal(gradient[mask], gradient_elsewhere[mask])):
        raise ValueError(
            "tokens outside of response_mask, which were not sampled, change the loss of others. Use "
            "torch.where(response_mask, x, 0.0) before you add up over tokens"
        )
    last = torch.arange(tokens) >= bounds[-2]
    loss_of_others, _ = computed(last & mask)
    if not torch.equal(loss[mask & ~last], loss_of_others[mask & ~last]):
        raise ValueError(
            "the tokens of one sequence change the loss of another: the result would depend on which sequences are "
            "computed together. Add up within cu_seqlens alone"
        )


def check_advantage(function: Callable[..., Any]) -> None:
    """Try an advantage on two groups of three rollouts, and on equal rewards.

    Raises:
        ValueError: why it cannot be trained with.
    """
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    for rewards in ([1.0, 0.0, 0.5, 0.0, 0.0, 1.0], [1.0] * 6):
        advantages = function(torch.tensor(rewards, dtype=torch.float64), groups)
        _check_shape(advantages, len(groups), "the advantage of each rollout")
        if not advantages.isfinite().all():
            raise ValueError(f"its advantages are not finite for rewards {rewards} of groups {groups.tolist()}")


def _check_shape(result: Any, length: int, wanted: str) -> None:
    if not isinstance(result, Tensor) or result.shape != (length,):
        given = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"it returns {given}, not {wanted}, a tensor [{length}]")
