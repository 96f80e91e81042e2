"""Loss and advantage functions of users: their arguments, and the checks before a run starts.

    def policy_loss(logprobs, *, old_logprobs, rollout_logprobs, advantages, response_mask, cu_seqlens) -> Tensor

All are [T], the tokens of several sequences in a row, `cu_seqlens` [S+1] their bounds; `logprobs` has the gradient,
`rollout_logprobs` are the engine's. Values outside of `response_mask` are undefined; the mask may have no True at
all. The result is the loss of each token [T]; losses outside of the mask are ignored. Importance correction, a KL in
the loss, entropy bonus and aggregation follow as for our own losses.

    def advantage(rewards, groups) -> Tensor

`rewards` [R] float64 of all scorable rollouts of a step, minus the KL penalty if it is in the reward; `groups` [R]
int64 their prompts; the result is [R].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTHS = (6, 4, 7)  # tokens of the three example sequences; the first two tokens of each are a prompt


class ObjectiveError(ValueError):
    """The reason why a user's function cannot be used for training."""


def check_policy_loss(function: Callable[..., Any]) -> None:
    """Try a loss on three short sequences; raises an ObjectiveError, or the function's own error."""
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

    def computed(*, changed: Tensor | None = None, mask: Tensor = mask) -> tuple[Tensor, Tensor]:
        """[T] loss in the mask and its gradient by log-prob; inputs at the tokens `changed` are lowered by 0.5."""
        given = {name: column.clone() for name, column in columns.items()}
        if changed is not None:
            for column in given.values():
                column[changed] -= 0.5
        logprobs = given.pop("logprobs").requires_grad_()
        loss = function(logprobs, **given, response_mask=mask, cu_seqlens=bounds)
        _check_shape(loss, tokens, "the loss of each token")
        if not loss.requires_grad:
            raise ObjectiveError("its loss has no gradient: compute it from logprobs, without detach() or no_grad()")
        loss = torch.where(mask, loss, 0.0)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        return loss.detach(), gradient

    def same(here: Tensor, *, changed: Tensor) -> bool:
        return all(torch.equal(a[here], b[here]) for a, b in zip(computed(), computed(changed=changed), strict=True))

    loss, gradient = computed()
    if not (loss.isfinite().all() and gradient[mask].isfinite().all()):
        raise ObjectiveError("its loss or the gradient is not finite for log-probs near -1 and advantages near 1")
    if not gradient[mask].any():
        raise ObjectiveError("its gradient is 0 at every token")
    if not same(mask, changed=~mask):
        raise ObjectiveError(
            "tokens outside of response_mask, which were not sampled, change the loss of others. Use "
            "torch.where(response_mask, x, 0.0) before you add up over tokens"
        )
    place = torch.arange(tokens)
    middle = (place >= bounds[1]) & (place < bounds[2])
    if not same(mask & ~middle, changed=mask & middle):
        raise ObjectiveError(
            "the tokens of one sequence change the loss of another: the result would depend on which sequences are "
            "computed together. Add up within cu_seqlens alone"
        )
    computed(mask=torch.zeros_like(mask))  # a learner may have nothing to train on


def check_advantage(function: Callable[..., Any]) -> None:
    """Try an advantage on groups of 3, 2 and 1 rollouts, and on equal rewards; raises as `check_policy_loss`."""
    groups = torch.tensor([0, 0, 0, 2, 2, 5])  # the other groups have no scorable rollout
    for rewards in ([1.0, 0.0, 0.5, 0.0, 1.0, 1.0], [1.0] * 6):
        own_advantages(function, torch.tensor(rewards, dtype=torch.float64), groups)


def own_advantages(function: Callable[..., Any], rewards: Tensor, groups: Tensor) -> Tensor:
    """The result of an advantage function; ObjectiveError unless it is a finite number for each rollout."""
    advantages: Tensor = function(rewards.clone(), groups.clone())  # it may compute in place
    _check_shape(advantages, len(groups), "the advantage of each rollout")
    if not advantages.float().isfinite().all():  # tokens have it as float32
        raise ObjectiveError(
            f"its advantages are not finite for rewards {rewards.tolist()} of groups {groups.tolist()}"
        )
    return advantages.detach().double()


def _check_shape(result: Any, length: int, wanted: str) -> None:
    if not isinstance(result, Tensor) or result.shape != (length,):
        given = f"a tensor {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ObjectiveError(f"it returns {given}, not {wanted}, a tensor [{length}]")
