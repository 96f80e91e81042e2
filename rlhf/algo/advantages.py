"""From rewards to advantages: the group-relative family, one number per response, and GAE, one per token.

Dr. GRPO (arXiv:2503.20783) is `group_advantages` without the std, together with the loss aggregation `constant`.

The rewards include the KL penalty where `algo.kl_place` is `reward`. Whether they are equal is decided before it: where
the graders' rewards do not differ, the penalties are centered and not divided by a std (`advantages_by_name`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.algo.numerics import full_precision, masked, segment_counts, segment_ids
from rlhf.types import rewards_differ

STD_EPS = 1e-6  # keeps a quotient finite; far below the std of any two rewards that a grader can tell apart
WHITEN_EPS = 1e-8  # added to the variance, as in the original RLHF code (openai/lm-human-preferences)


def advantages_by_name(
    kind: str,
    rewards: Tensor,
    groups: Tensor,
    *,
    rewards_before_kl: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """[B] advantages by the name of `algo.advantage`.

    Dividing by a std gives differences of rewards the same size in every group. Where the rewards before the KL
    penalty are equal, only the penalties differ. Their std is proportional to beta, and dividing by it would cancel
    beta: any spread of the KL would weigh as much as a right answer. Such responses get -beta (KL - mean KL) instead.

    Args:
        rewards: [B] all responses of the step, minus beta times the KL if it is in the reward; NaN for unscorable.
        groups: [B] int, the group of each response, from 0 on and in order.
        rewards_before_kl: [B] without the KL, ignored where `rewards` is NaN. None: there is no KL in `rewards`.
        lengths: as in `reinforce_plus_plus_advantages`.
    """
    sizes = torch.bincount(groups).tolist()
    parts = rewards.split(sizes)
    before_kl = rewards if rewards_before_kl is None else torch.where(rewards.isnan(), rewards, rewards_before_kl)
    differ = [_differ(part) for part in before_kl.split(sizes)]
    match kind:
        case "grpo":
            return torch.cat([group_advantages(x, normalize_std=std) for x, std in zip(parts, differ, strict=True)])
        case "dr_grpo":
            return torch.cat([group_advantages(part, normalize_std=False) for part in parts])
        case "rloo":
            return torch.cat([rloo_advantages(part) for part in parts])
        case "maxrl":
            return torch.cat([maximum_likelihood_advantages(part) for part in parts])
        case "reinforce_pp":
            return reinforce_plus_plus_advantages(rewards, lengths=lengths, normalize_std=_differ(before_kl))
        case "reinforce_pp_baseline":
            return reinforce_plus_plus_advantages(rewards, groups, lengths=lengths, normalize_std=any(differ))
    raise AssertionError(kind)


def _differ(rewards: Tensor) -> bool:
    """`rewards_differ` of the scorable rewards, or of returns."""
    scores = rewards[~rewards.isnan()]
    return len(scores) > 0 and rewards_differ(torch.stack(scores.aminmax()).tolist())


def group_advantages(rewards: Tensor, *, normalize_std: bool) -> Tensor:
    """Group-relative advantages (DeepSeekMath, arXiv:2402.03300, sec. 4.1.2; Dr. GRPO drops the std).

    Args:
        rewards: [G] one scalar per response of the same prompt; NaN for unscorable, which the baseline leaves out.
        normalize_std: divide by (std + STD_EPS) of the scorable rewards, std with n - 1.

    Returns:
        [G] reward minus the mean of the scorable rewards, divided by their std if asked; exactly 0 for NaN, for a group
        of one and for equal rewards (`rewards_differ`).
    """
    scores = rewards.double()  # in float32 the rounding of the mean would show in small differences
    scorable = ~scores.isnan()
    scores = scores[scorable]
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    if _differ(scores):
        centered = scores - scores.mean()
        advantages[scorable] = centered / (scores.std() + STD_EPS) if normalize_std else centered
    return advantages.to(full_precision(rewards).dtype)


def rloo_advantages(rewards: Tensor) -> Tensor:
    """REINFORCE leave-one-out (arXiv:2402.14740): each reward minus the mean of the other rewards of its group.

    This equals G / (G - 1) times (reward - mean), where G counts the scorable responses. Arguments and zeros are those
    of `group_advantages`.
    """
    count = int((~rewards.isnan()).sum())
    return group_advantages(rewards, normalize_std=False) * (count / max(count - 1, 1))


def maximum_likelihood_advantages(rewards: Tensor) -> Tensor:
    """MaxRL (arXiv:2602.02710, as in the authors' code): reward minus the group's mean, divided by that mean.

    For rewards of 0 and 1 the mean is the share of right responses, so a prompt that is rarely solved weighs more. The
    expected gradient, averaged over G samples, is (1 - (1 - p)^(G-1)) / p times that of the pass rate p. This is the
    gradient of the first G - 1 terms of log p = -sum over k of (1 - p)^k / k, of which the expected reward is the
    first. Arguments and zeros are those of `group_advantages`.

    Raises:
        ValueError: a reward is below 0, so the mean could be 0 or negative.
    """
    scores = rewards[~rewards.isnan()]
    if len(scores) and scores.min() < 0:
        raise ValueError(
            f"algo.advantage=maxrl: a reward is {scores.min().item():g}. It divides by the group's mean reward, so no "
            "reward may be below 0. Use rewards of 0 and 1, or algo.advantage=dr_grpo."
        )
    centered, mean = group_advantages(rewards, normalize_std=False), scores.double().mean()
    return centered / mean if mean > 0 else centered


def reinforce_plus_plus_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    normalize_std: bool = True,
) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262, eqs. 5 and 7): rewards normalized over the global batch, not over the group.

    The baseline form, with `group_ids`, first subtracts each group's mean (eq. 6). A KL in the reward is part of the
    response's scalar. Each response counts once, as in appendix B.2: the mean of the differences to the groups' means
    is then 0 and is not subtracted again, so a group of equal rewards has advantages of exactly 0.

    With `lengths`, each response counts once per token, as in the authors' code and in verl. Where wrong responses are
    longer, the mean of the differences is then no longer 0, so it is subtracted.

    Args:
        rewards: [B] all responses of the step; NaN for unscorable.
        group_ids: [B] int, the group of each response; None: no group baseline.
        lengths: [B] int, tokens of each response; None: each counts once.
        normalize_std: False subtracts the means alone.

    Returns:
        [B] differences over (std + STD_EPS) of the batch, std with n - 1 (n, with lengths). Exactly 0 for NaN and for
        equal rewards: of the whole batch; in the baseline form of the group (with lengths: of every group).
    """
    if group_ids is None and lengths is None:
        return group_advantages(rewards, normalize_std=normalize_std)
    centered, scorable = rewards.to(torch.float64, copy=True), ~rewards.isnan()
    if group_ids is not None:
        for group in group_ids.unique():
            members = group_ids == group
            centered[members] = group_advantages(centered[members], normalize_std=False)
    if lengths is not None:
        centered = _normalized_by_tokens(centered, lengths * scorable, divide=normalize_std)
    elif normalize_std:
        spread = centered[scorable].std() if int(scorable.sum()) > 1 else centered.new_zeros(())
        centered = centered / (spread + STD_EPS)
    return centered.to(full_precision(rewards).dtype)


def _normalized_by_tokens(values: Tensor, tokens: Tensor, *, divide: bool) -> Tensor:
    """[B] values with mean 0 and (if `divide`) std 1 over all tokens; response i has tokens[i].

    0 for no tokens and for equal values.
    """
    counted = tokens > 0
    kept, weights = values[counted], tokens[counted].double() / tokens.sum()
    normalized = torch.zeros_like(values)
    if _differ(kept):
        centered = kept - (weights * kept).sum()
        spread = (weights * centered.square()).sum().sqrt() + STD_EPS
        normalized[counted] = centered / spread if divide else centered
    return normalized


def distillation_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, *, coef: float) -> Tensor:
    """[T] coef (log pi_teacher - log pi_old) at each token: a teacher's opinion of the tokens that the policy sampled.

    Given its prefix, the expected policy gradient of these advantages is -coef times that of KL(pi || pi_teacher), the
    reverse KL on the policy's own samples (as in arXiv:2306.13649); the effect of a token on later prefixes is not
    in it. Both arguments: [T], at temperature 1.
    """
    return coef * (teacher_logprobs - old_logprobs)


def token_rewards(scores: Tensor, kl_penalties: Tensor, response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Per-token rewards of RLHF (arXiv:1909.08593, sec. 2, per token as in arXiv:2203.02155, sec. 3.5).

    Args:
        scores: [S] one per response, added at the last True token of its segment; ignored if there is none.
        kl_penalties: [T] coefficient times KL, subtracted at each True token; values elsewhere do not matter.
        response_mask: [T] bool. cu_seqlens: [S+1].

    Returns:
        [T], 0 outside of the mask.
    """
    rewards = -masked(kl_penalties, response_mask)
    positions = response_mask.nonzero().squeeze(1)
    counts = segment_counts(response_mask, cu_seqlens)
    last = positions[counts.cumsum(0)[counts > 0] - 1]
    return rewards.index_add(0, last, full_precision(scores)[counts > 0].to(rewards.dtype))


class Gae(NamedTuple):
    """Both [T], 0 outside of the response mask; returns = advantages + values are the targets of the critic."""

    advantages: Tensor
    returns: Tensor


def gae(rewards: Tensor, values: Tensor, response_mask: Tensor, cu_seqlens: Tensor, *, gamma: float, lam: float) -> Gae:
    """Generalized advantage estimation (arXiv:1506.02438, eq. 16) on a packed row.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    where t + 1 is the next response token of the same segment: holes of the mask are skipped, segments do not see each
    other, and both V and A after a segment's last response token are 0.

    Args:
        rewards, values: [T]; V_t is the value of the state in which token t is chosen.
        response_mask: [T] bool; values where it is False do not matter. cu_seqlens: [S+1].
    """
    rewards, values = masked(rewards, response_mask), masked(values, response_mask)
    counts = segment_counts(response_mask, cu_seqlens)
    steps = int(counts.max()) if len(counts) else 0
    segment = segment_ids(cu_seqlens, len(rewards))[response_mask]
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1]
    # One row per step and one column per segment, responses aligned at their ends: above a response's first token its
    # column is 0, and the recursion runs over whole rows from the last to the first.
    step = steps - counts[segment] + torch.arange(len(segment), device=segment.device) - first[segment]
    by_step_rewards = rewards.new_zeros(steps, len(counts))
    by_step_values = rewards.new_zeros(steps + 1, len(counts))
    by_step_rewards[step, segment] = rewards[response_mask]
    by_step_values[step, segment] = values[response_mask]
    deltas = by_step_rewards + gamma * by_step_values[1:] - by_step_values[:-1]
    for index in range(steps - 2, -1, -1):
        deltas[index] += gamma * lam * deltas[index + 1]
    advantages = torch.zeros_like(rewards)
    advantages[response_mask] = deltas[step, segment]
    return Gae(advantages, advantages + values)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """x with mean 0 and variance 1 (n, not n - 1) over the True tokens of mask, as in the original RLHF code.

    Args:
        x, mask: [T], any shape; outside of the mask the result is 0 and the input does not matter.
        shift_mean: False keeps the mean (for rewards) and scales only the spread.
    """
    values = full_precision(x)[mask]
    if not len(values):
        return torch.zeros_like(full_precision(x))
    mean, variance = float(values.mean()), float(values.var(correction=0))
    whitened = (masked(x, mask) - mean) * (variance + WHITEN_EPS) ** -0.5
    return torch.where(mask, whitened if shift_mean else whitened + mean, 0.0)


def explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the True tokens of the whole batch, from arguments of [T].

    It is 1 for a perfect critic, 0 for a constant one, negative for a worse one, NaN if no two returns differ.
    """
    values, returns = values[response_mask].double(), returns[response_mask].double()
    if not _differ(returns):
        return float("nan")
    return 1 - float((returns - values).var(correction=0) / returns.var(correction=0))
