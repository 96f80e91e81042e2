"""Policy losses, the value loss, importance correction, masks of sequences, the one reduction from tokens to a loss.

Everything up to `aggregate` is per token. Inputs are masked by `torch.where` before the first arithmetic, so that
values where `response_mask` is False change neither value nor gradient by a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf.algo.numerics import (
    MAX_LOG_RATIO,
    bounded_exp,
    masked,
    segment_counts,
    segment_ids,
    segment_means,
    segment_sums,
)
from rlhf.algo.own_functions import read_loss

DPPO_MAX_RATIO = 20.0  # as the implementation of dppo_tv in verl


class PolicyLossTerms(NamedTuple):
    """Per token, all [T] and 0 or False outside of the mask."""

    loss: Tensor  # to be minimized; carries the gradient
    ratio: Tensor  # pi / pi_old as the loss used it (gspo: one value per sequence), without gradient
    # The token's loss is that of the clipped ratio: its gradient is zero (ppo, gspo), its weight was cut (cispo), or it
    # was left out (dppo_tv). Never for sapo.
    clipped: Tensor
    dual_clipped: Tensor  # the token's loss is the bound of the dual clip; its gradient is zero
    metrics: Mapping[str, Tensor] = {}  # of a function of the user


def policy_loss(
    logprobs: Tensor,
    *,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    kind: str | Callable[..., Any] = "ppo",
    dual_clip: float | None = None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    cu_seqlens: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> PolicyLossTerms:
    """The policy gradient within a trust region, one value per token. With r = pi / pi_old:

        ppo    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)                 arXiv:1707.06347, eq. 7; two separate
               bounds are DAPO's clip-higher (arXiv:2503.14476, sec. 3.1)
        gspo   the same with the sequence's r = exp(mean of log pi - log pi_old), which every token shares and whose
               gradient stays with the token                                     arXiv:2507.18071, eqs. 7 and 13-14
        cispo  -stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log pi     arXiv:2506.13585, eqs. 4-5; clip_low
               of 1 or more is the paper's own setting, no lower bound
        sapo   -(4 / tau) sigmoid(tau (r - 1)) A: the gradient of -r A times a gate, 1 at r = 1 and less on both sides;
               tau is tau_positive where A > 0, else tau_negative         arXiv:2511.20347, as in TRL and verl
        dppo_tv  -r A, but 0 where the probability of the token has moved too far in the direction of its advantage:
               A > 0 and pi - pi_old > clip_high, or A < 0 and pi_old - pi > clip_low. |pi - pi_old| is the total
               variation of the choice between this token and any other; r weighs the gradient with at most
               DPPO_MAX_RATIO                                                    arXiv:2602.04879, as in verl's dppo_tv

    A function in place of a name gives the loss of each token, for an objective of the user; see `own_functions`.

    Args:
        logprobs: [T] with gradient. old_logprobs, advantages: [T] without.
        response_mask: [T] bool; tokens elsewhere get loss 0 and gradient 0 for any input.
        tau_positive, tau_negative: temperatures of sapo, above 0; a larger one narrows its gate.
        dual_clip: c > 1 bounds the loss of ppo and gspo at -c A where A < 0 (arXiv:1912.09729); None: no bound.
        cu_seqlens: [S+1], for gspo and a function. rollout_logprobs: [T], of the engine, for a function.
    """
    logprobs, old_logprobs, advantages = (masked(x, response_mask) for x in (logprobs, old_logprobs, advantages))
    log_ratio = logprobs - old_logprobs.detach()
    advantages, never = advantages.detach(), torch.zeros_like(response_mask)
    if callable(kind):
        columns = {"rollout_logprobs": rollout_logprobs, "response_mask": response_mask, "cu_seqlens": cu_seqlens}
        # copies: a function of the user may compute in place
        given = {name: None if column is None else column.clone() for name, column in columns.items()}
        result = kind(logprobs, old_logprobs=old_logprobs.detach(), advantages=advantages, **given)
        loss, metrics = read_loss(result, len(logprobs))
        ratio = bounded_exp(log_ratio.detach()) * response_mask
        return PolicyLossTerms(masked(loss, response_mask), ratio, never, never, metrics)
    assert dual_clip is None or kind in ("ppo", "gspo"), f"{kind} has no dual clip"
    if kind == "cispo":
        ratio = bounded_exp(log_ratio.detach())
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
        return PolicyLossTerms(-weight * advantages * logprobs, ratio * response_mask, weight != ratio, never)
    if kind == "sapo":
        ratio = bounded_exp(log_ratio)
        tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
        loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        return PolicyLossTerms(loss, ratio.detach() * response_mask, never, never)
    assert kind in ("ppo", "gspo", "dppo_tv"), kind
    if kind == "gspo":
        assert cu_seqlens is not None, "the ratio of gspo is per sequence"
        sequence = segment_means(log_ratio.detach(), response_mask, cu_seqlens)
        # The value is the sequence's log ratio (the bracket is exactly 0), the gradient that of the token's log pi.
        log_ratio = torch.where(response_mask, sequence + (logprobs - logprobs.detach()), 0.0)
    ratio = bounded_exp(log_ratio)
    if kind == "dppo_tv":
        moved = torch.exp(logprobs.detach()) - torch.exp(old_logprobs.detach())
        outside = ((advantages > 0) & (moved > clip_high)) | ((advantages < 0) & (moved < -clip_low))
        # The gradient is that of the ratio, with a bounded weight: a rare token may gain little and its ratio much.
        weight = ratio.detach().clamp(max=DPPO_MAX_RATIO)
        loss = torch.where(outside, 0.0, -weight * advantages * (1 + logprobs - logprobs.detach()))
        return PolicyLossTerms(loss, ratio.detach() * response_mask, outside, never)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    dual_clipped = never
    if dual_clip is not None:
        assert dual_clip > 1, "it would also cut ratios near 1"
        limit = -dual_clip * advantages
        dual_clipped = (advantages < 0) & (loss > limit)
        loss = torch.where(dual_clipped, limit, loss)
        clipped = clipped & ~dual_clipped
    return PolicyLossTerms(loss, ratio.detach() * response_mask, clipped, dual_clipped)


class ValueLossTerms(NamedTuple):
    """Per token, both [T] and 0 or False outside of the mask; `clipped`: the gradient of this token is zero."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, *, clip: float | None
) -> ValueLossTerms:
    """Half the squared error to the return, the larger of plain and clipped (arXiv:2005.12729).

        max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2

    Args:
        values: [T] with gradient. old_values, returns: [T] without. response_mask: [T] bool.
        clip: how far a value may move from its old one; None: the plain squared error.
    """
    values, old_values, returns = (masked(x, response_mask) for x in (values, old_values, returns))
    free = (values - returns).square() / 2
    if clip is None:
        return ValueLossTerms(free, torch.zeros_like(response_mask))
    bounded = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square() / 2
    return ValueLossTerms(torch.maximum(free, bounded), bounded > free)


class ImportanceWeights(NamedTuple):
    """Correction for the difference between the learner's policy and the engine's."""

    weights: Tensor  # [T], 0 outside of the mask; they multiply the per-token policy loss
    outside: Tensor  # [T] bool, the ratio is beyond a bound: it was cut (truncated) or the token left out (masked)
    samples: Tensor  # number of ratios, of tokens or (level `sequence`) of responses
    ratio_sum: Tensor  # scalar, of the ratios before any cap, for `EffectiveSampleFraction`
    ratio_square_sum: Tensor


@torch.no_grad()
def importance_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    level: str = "token",
    cap: float = 2.0,
    floor: float | None = None,
) -> ImportanceWeights:
    """Weights w = pi_old / pi_rollout between the learner's policy and the engine's, one per token.

        none       1
        truncated  min(max(w, floor), cap)                   Ionides 2008; for the engine's mismatch arXiv:2505.24298
        masked     w where floor <= w <= cap, 0 elsewhere    IcePop, arXiv:2510.18855

    At level `sequence` the ratio is that of the whole response, exp(sum of log ratios over its True tokens).

    Args:
        old_logprobs, rollout_logprobs: [T], from the learner and as the engine reported them.
        response_mask: [T] bool. cu_seqlens: [S+1].
        cap: at least 1, or weights would be cut where the policies agree.
        floor: above 0 and at most 1; None: 1 / cap if masked, no lower bound if truncated.
    """
    log_ratio = masked(old_logprobs, response_mask) - masked(rollout_logprobs, response_mask)
    if level == "sequence":
        sums = segment_sums(log_ratio, cu_seqlens)
        counted = segment_counts(response_mask, cu_seqlens) > 0
        log_ratio = sums[segment_ids(cu_seqlens, len(log_ratio))]
    else:
        assert level == "token", level
        sums, counted = log_ratio, response_mask
    ratios = torch.where(counted, torch.exp(sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)), 0.0)
    weights = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    low = floor or (1 / cap if mode == "masked" else 0.0)
    outside = ((weights < low) | (weights > cap)) & response_mask
    match mode:
        case "none":
            weights, outside = torch.ones_like(weights), torch.zeros_like(outside)
        case "truncated":
            weights = weights.clamp(min=low, max=cap)
        case "masked":
            weights = torch.where(outside, 0.0, weights)
        case _:
            raise AssertionError(mode)
    return ImportanceWeights(
        torch.where(response_mask, weights, 0.0), outside, counted.sum(), ratios.sum(), ratios.double().square().sum()
    )


@torch.no_grad()
def geometric_outside(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    low: float,
    high: float,
) -> Tensor:
    """[T] bool, the tokens of sequences whose geometric mean ratio to the engine is outside of [low, high].

        exp(mean over the True tokens of log pi_old - log pi_rollout)

    Unlike the ratio of the whole sequence, which is the product, this does not move away from 1 with the length, so
    long responses are not masked for their length (verl's geometric rejection `seq_mean_k1`, whose authors' paper on
    masks of whole sequences is arXiv:2512.23075; that paper bounds the largest divergence of a token).

    The first arguments are those of `importance_weights`; `low` and `high` are bounds of the ratio, at most and at
    least 1.
    """
    log_ratio = masked(old_logprobs, response_mask) - masked(rollout_logprobs, response_mask)
    means = segment_means(log_ratio, response_mask, cu_seqlens)
    return ((means < math.log(low)) | (means > math.log(high))) & response_mask


@torch.no_grad()
def off_policy_outside(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """[T] bool, the tokens with A < 0 of sequences that the policy has left (DeepSeek-V3.2, arXiv:2512.02556).

        mean over the True tokens of log pi_rollout - log pi > threshold

    Wrong responses that are far off-policy can make training unstable; right ones are always kept. The policy that
    sampled is the engine's, so a difference between engine and learner counts as much as what updates changed, as in
    TRL's `get_off_policy_mask`.

    logprobs and advantages [T] are those of this update, the other tensors as in `importance_weights`. `threshold`:
    nats per token, above 0.
    """
    difference = masked(rollout_logprobs, response_mask) - masked(logprobs, response_mask)
    means = segment_means(difference, response_mask, cu_seqlens)
    return (means > threshold) & (masked(advantages, response_mask) < 0)


def aggregate(
    per_token: Tensor,
    response_mask: Tensor,
    cu_seqlens: Tensor,
    rollout_tokens: Tensor,
    *,
    aggregation: str,
    tokens: int,
    rollouts: int,
    constant_length: int | None = None,
) -> Tensor:
    """This microbatch's share of the minibatch's loss; those of all microbatches and data shards add up to it.

        token_mean     sum over True tokens / tokens                               DAPO, arXiv:2503.14476, sec. 3.3
        sequence_mean  sum over rollouts of the mean of their True tokens / rollouts          arXiv:2402.03300, eq. 3
        constant       sum over True tokens / (rollouts * constant_length)         Dr. GRPO, arXiv:2503.20783, sec. 3.2

    Args:
        per_token: [T]; a sequence without a True token contributes exactly 0, and the result stays in the graph.
        response_mask: [T] bool. cu_seqlens: [S+1].
        rollout_tokens: [S] int64, True tokens of the whole rollout of each sequence, wherever its others are.
        tokens, rollouts: of the whole minibatch over all data shards; 0 (nothing to train anywhere) gives a loss of 0.
        constant_length: tokens; for `constant`.
    """
    values = masked(per_token, response_mask)
    match aggregation:
        case "token_mean":
            return values.sum() / max(tokens, 1)
        case "sequence_mean":
            counts = rollout_tokens[segment_ids(cu_seqlens, len(values))]
            return (values / counts.clamp(min=1)).sum() / max(rollouts, 1)
        case "constant":
            assert constant_length
            return values.sum() / (max(rollouts, 1) * constant_length)
    raise AssertionError(aggregation)
