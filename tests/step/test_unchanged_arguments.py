"""The functions that turn rewards into losses do not change what they are given: numpy and torch arrays share memory,
and `.double()` of a float64 tensor is the same tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from worlds import group_of, make_config, make_ppo_config, rollout_of

from rlhf.algo import advantages, kl, losses
from rlhf.config.teacher import TeacherConfig
from rlhf.step import advantages as step_advantages
from rlhf.step import batch as step_batch
from rlhf.step import minibatches
from rlhf.types import StepBatch

# Two segments of 3 and 4 tokens, of which 2 and 3 were sampled.
BOUNDS = torch.tensor([0, 3, 7])
MASK = torch.tensor([False, True, True, False, True, True, True])
KINDS = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline")


def writes_into_all(logprobs: Tensor, **given: Any) -> Tensor:
    """A policy loss of the user that computes in place wherever it can."""
    loss = -logprobs * given["advantages"].clone()
    for column in given.values():
        column.zero_()
    return loss


def centred_in_place(rewards: Tensor, groups: Tensor) -> Tensor:
    """An advantage of the user."""
    groups.zero_()
    return rewards.sub_(rewards.mean())


def calls_on_tokens(dtype: torch.dtype) -> Iterator[partial[Any]]:
    """Calls of the functions of algo/ on columns of 7 tokens of this type."""
    torch.manual_seed(0)

    def t(*values: float) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def column(*, gradient: bool = False) -> Tensor:
        return torch.randn(7, dtype=dtype).sub_(2).requires_grad_(gradient)

    rewards, groups = t(1, 0, math.nan, 2, 2, 5), torch.tensor([0, 0, 0, 1, 1, 2])
    for kind in KINDS:
        for before in (None, t(1, 0, 3, 2, 2, 5), t(1, 1, 1, 2, 2, 5)):
            for lengths in (None, torch.tensor([3, 1, 2, 4, 2, 2])):
                options = {"rewards_before_kl": before, "lengths": lengths}
                yield partial(advantages.advantages_by_name, kind, rewards, groups, **options)
    yield partial(advantages.distillation_advantages, column(), column(), coef=0.5)
    yield partial(advantages.token_rewards, t(1, 2), column(), MASK, BOUNDS)
    yield partial(advantages.gae, column(), column(), MASK, BOUNDS, gamma=0.9, lam=0.9)
    yield from (partial(advantages.whiten, column(), MASK, shift_mean=shifts) for shifts in (True, False))
    yield partial(advantages.explained_variance, column(), column(), MASK)
    for name in kl.KL_ESTIMATORS:
        for masked in ({}, {"response_mask": MASK, "ratio_weighted": name == "k3"}):
            both = column(gradient=True), column()
            yield partial(kl.kl_per_token, *both, estimator=name, old_logprobs=column(), **masked)
    policy_losses: tuple[Any, ...] = ("ppo", "gspo", "cispo", "sapo", "dppo_tv", writes_into_all)
    for loss in policy_losses:
        yield partial(
            losses.policy_loss, column(gradient=True), old_logprobs=column(), advantages=column(), kind=loss,
            response_mask=MASK.clone(), cu_seqlens=BOUNDS.clone(), rollout_logprobs=column(), clip_low=0.2,
            clip_high=0.2, dual_clip=3.0 if loss in ("ppo", "gspo") else None,
        )  # fmt: skip
    for clip in (None, 0.2):
        yield partial(losses.value_loss, column(gradient=True), column(), column(), MASK, clip=clip)
    for mode in ("none", "truncated", "masked"):
        for level in ("token", "sequence"):
            yield partial(losses.importance_weights, column(), column(), MASK, BOUNDS, mode=mode, level=level)
    yield partial(losses.geometric_outside, column(), column(), MASK, BOUNDS, low=0.9, high=1.1)
    yield partial(losses.off_policy_outside, column(), column(), column(), MASK, BOUNDS, threshold=0.1)
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        sizes = {"tokens": 5, "rollouts": 2, "constant_length": 4}
        columns = column(gradient=True), MASK, BOUNDS, torch.tensor([2, 3])
        yield partial(losses.aggregate, *columns, aggregation=aggregation, **sizes)


def batch_of(*rewards: float | None) -> StepBatch:
    """Two groups of three rollouts, each of a prompt of two tokens and one more sampled one than the one before."""
    ids = [np.arange(3 + i, dtype=np.int32) for i in range(6)]
    rollouts = [rollout_of(x, np.arange(len(x)) > 1, -0.1 * x) for x in ids]
    groups = [group_of(rollouts[:3], rewards[:3]), group_of(rollouts[3:], rewards[3:])]
    return step_batch.make_batch(groups, mask_truncated=True)


def calls_on_batches(dtype: torch.dtype) -> Iterator[partial[Any]]:
    """Calls of the functions of step/."""
    real = np.float64 if dtype == torch.float64 else np.float32
    kl_in_reward = {"kl_coef": 0.1, "kl_place": "reward", "kl_estimator": "k1"}
    grpo = make_config(Path("nowhere"), algo=kl_in_reward)
    ppo = make_ppo_config(Path("nowhere"), algo={"reward_clip": 1.0, "whiten_rewards": "shift", **kl_in_reward})
    batch, rows = batch_of(1.0, 0.0, None, 2.0, 2.0, 0.1 + 0.2), np.ones(6, bool)
    old, ref, other = (-np.random.default_rng(0).random((3, len(batch.tokens.token_ids)))).astype(real)
    per_rollout = np.array([1, 0, 0, 2, 2, 0.5], real)
    teacher = TeacherConfig.model_construct(coef=0.5)
    yield partial(step_advantages.penalize_kl, batch, rows, old, ref, grpo.algo)
    for kind in (*KINDS, f"{__file__}:centred_in_place"):
        for over in ("responses", "tokens"):
            for rewards in (batch.rewards, batch.rewards + 0.1):
                yield partial(step_advantages.step_advantages, batch, rewards, kind, over)
    yield partial(step_advantages.add_teacher_advantages, batch, other, old, ref, rows, teacher)
    yield partial(step_advantages.response_kl, batch, old, ref)
    yield partial(step_advantages.mean_over_responses, batch, old)
    for coef in (0.0, 0.1):
        yield partial(step_advantages.assign_credit, batch, other, old, ref, kl_coef=coef, algo=ppo.algo)
    yield partial(step_batch.sum_over_responses, batch, old)
    yield partial(step_batch.broadcast_to_tokens, batch, per_rollout)
    yield partial(step_batch.non_finite_rollouts, batch, rows, old=old, ref=None)
    yield partial(minibatches.rows_with_gradient, batch, per_rollout, make_config(Path("nowhere")))
    yield from (partial(minibatches.plan_epochs, batch, grpo, step=0, rows_to_compute=some) for some in (None, rows))


def contents(value: Any) -> Any:
    """Everything that a call could change of a value, as one that compares."""
    if isinstance(value, Tensor):
        return contents(value.detach().numpy())
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        return [(key, contents(x)) for key, x in value.items()]
    if isinstance(value, list | tuple):
        return [contents(x) for x in value]
    return contents(vars(value)) if dataclasses.is_dataclass(value) else repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("calls", [calls_on_tokens, calls_on_batches])
def test_no_function_changes_what_it_is_given(dtype: torch.dtype, calls: Any) -> None:
    changed = set()
    for call in calls(dtype):
        before = contents([call.args, call.keywords])
        result = call()
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.sum().backward(retain_graph=True)
        if contents([call.args, call.keywords]) != before:
            changed.add(call.func.__name__)
    assert changed == set()
