"""A user's own loss and advantage: tried before a run, and trained with as our own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import make_config, make_groups

from rlhf.algo.losses import policy_loss
from rlhf.algo.own_functions import check_advantage, check_policy_loss
from rlhf.check.start_checks import own_function_problems
from rlhf.step.advantages import step_advantages
from rlhf.step.batch import make_batch
from rlhf.step.minibatches import rows_with_gradient


def as_ppo(logprobs: Tensor, *, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def without_mask(logprobs: Tensor, *, advantages: Tensor, **_: Any) -> Tensor:
    return -(logprobs - logprobs.mean()) * advantages


def over_sequences(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    return -(logprobs - torch.where(response_mask, logprobs, 0.0).sum()) * advantages


def prefix_sums(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    return -torch.where(response_mask, logprobs, 0.0).cumsum(0) * advantages


def weight_over_sequences(logprobs: Tensor, *, advantages: Tensor, response_mask: Tensor, **_: Any) -> Tensor:
    """Its value is 0: other sequences are in the gradient alone."""
    return -torch.where(response_mask, advantages, 0.0).sum() * (logprobs - logprobs.detach())


def of_advantages_elsewhere(logprobs: Tensor, *, advantages: Tensor, **_: Any) -> Tensor:
    return -logprobs * (advantages - advantages.sum())


def by_group(rewards: Tensor, groups: Tensor) -> tuple[Tensor, ...]:
    return rewards.split(groups.unique_consecutive(return_counts=True)[1].tolist())


def test_a_loss_that_is_ours_gives_our_values_and_gradients() -> None:
    check_policy_loss(as_ppo)
    generator = torch.Generator().manual_seed(1)
    mask = torch.tensor([False, True, True, False, False, True, True])
    old, advantages, rollout = (torch.randn(7, generator=generator) for _ in range(3))
    results = []
    for kind in ("ppo", as_ppo):
        logprobs = (old + 0.5 * torch.randn(7, generator=torch.Generator().manual_seed(2))).requires_grad_()
        terms = policy_loss(
            logprobs, old_logprobs=old, advantages=advantages, rollout_logprobs=rollout, response_mask=mask,
            cu_seqlens=torch.tensor([0, 3, 7]), clip_low=0.2, clip_high=0.2, kind=kind,
        )  # fmt: skip
        terms.loss.sum().backward()
        results.append((terms.loss.detach(), terms.ratio, logprobs.grad))
    for ours, own in zip(*results, strict=True):
        assert torch.equal(ours, own)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_mask, "outside of response_mask"),
        (of_advantages_elsewhere, "outside of response_mask"),
        (over_sequences, "one sequence change the loss of another"),
        (prefix_sums, "one sequence change the loss of another"),
        (weight_over_sequences, "one sequence change the loss of another"),
        (lambda logprobs, **_: logprobs.sum(), r"a tensor \[\], not the loss of each token"),
        (lambda logprobs, **_: logprobs.tolist(), "returns list"),
        (lambda logprobs, advantages, **_: -logprobs.detach() * advantages, "no gradient"),
        (lambda logprobs, **_: logprobs * 0, "gradient is 0"),
        (lambda logprobs, response_mask, **_: (logprobs * response_mask).abs().sqrt() * float("inf"), "not finite"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused_with_the_reason(
    function: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_policy_loss(function)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda rewards, groups: rewards[:1], r"a tensor \[1\]"),
        (lambda rewards, groups: (rewards - rewards.mean()) / rewards.std(), "not finite"),
        (lambda rewards, groups: list(rewards), "returns list"),
        (
            lambda rewards, groups: torch.cat(
                [part - part.mean() + 0 * part.std() for part in by_group(rewards, groups)]
            ),
            "not finite",  # a group of one has no std
        ),
    ],
)
def test_an_advantage_that_cannot_be_trained_with_is_refused_with_the_reason(
    function: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        check_advantage(function)
    check_advantage(lambda rewards, groups: rewards - rewards.mean())


OWN = """
import torch

def reinforce(logprobs, *, advantages, response_mask, **_):
    return -torch.where(response_mask, logprobs, 0.0) * advantages

def leaks(logprobs, *, advantages, **_):
    return -(logprobs - logprobs.mean()) * advantages

def raises(logprobs, **given):
    return given["entropy"]

def nan(rewards, groups):
    return rewards * float("nan")


def large(rewards, groups):
    return rewards.double() * 1e300

def centered(rewards, groups):
    means = torch.zeros(int(groups.max()) + 1, dtype=rewards.dtype)
    means = means.index_reduce(0, groups, rewards, "mean", include_self=False)
    return 2 * (rewards - means[groups])
"""


def test_a_file_is_named_and_what_is_wrong_with_it_is_said_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)

    def problems(**algo: str) -> list[str]:
        return own_function_problems(make_config(tmp_path / "model", algo=algo))

    assert problems() == []
    assert problems(policy_loss=f"{file}:reinforce", advantage=f"{file}:centered") == []
    (leak,) = problems(policy_loss=f"{file}:leaks")
    assert leak.startswith(f"algo.policy_loss={file}:leaks: tokens outside of response_mask")
    (missing,) = problems(advantage=f"{file}:nothing")
    assert missing.startswith(f"algo.advantage={file}:nothing: the module has no function nothing. Define it, ")
    (broken,) = problems(policy_loss=f"{file}:raises")
    assert broken.startswith(f"algo.policy_loss={file}:raises: it raises KeyError on an example: 'entropy'. See ")


def test_own_advantages_get_the_scorable_rewards_and_their_groups(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    batch = make_batch(make_groups(groups=2, samples=3, vocabulary=9, longest=4, seed=0), mask_truncated=False)
    rewards = np.array([1.0, 0.0, np.nan, 0.5, 0.0, 1.0])
    assert step_advantages(batch, rewards, f"{file}:centered").tolist() == [1.0, -1.0, 0.0, 0.0, -1.0, 1.0]
    assert not step_advantages(batch, np.full(6, np.nan), f"{file}:centered").any()
    for name in ("nan", "large"):
        with pytest.raises(RuntimeError, match=rf"algo.advantage=.*:{name}: its advantages are not finite"):
            step_advantages(batch, rewards, f"{file}:{name}")


def test_an_own_loss_may_have_a_gradient_where_the_advantage_is_0(tmp_path: Path) -> None:
    batch = make_batch(make_groups(groups=2, samples=3, vocabulary=9, longest=4, seed=0), mask_truncated=False)
    own, ours = (make_config(tmp_path, algo={"policy_loss": name}) for name in ("mine.py:reinforce", "ppo"))
    assert rows_with_gradient(batch, np.zeros(6), own).all()
    assert not rows_with_gradient(batch, np.zeros(6), ours).any()
