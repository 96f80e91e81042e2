"""One microbatch of the policy update: forward, loss, metrics. No DeepSpeed here, so that a test can run it alone.

Nothing between forward and backward waits for the device: metrics hold device tensors until the step has been queued.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.algo import kl, losses
from rlhf.algo.distillation import HeadInput
from rlhf.algo.numerics import masked, segment_counts, segment_ids
from rlhf.algo.own_functions import NO_ROW, ObjectiveError, asked_for, read_loss
from rlhf.config.grpo import GRPOConfig
from rlhf.learner.policy_model import DeviceTokens
from rlhf.learner.routing import Routing
from rlhf.log.reductions import (
    ENGINE_KL_FROM,
    ENGINE_KL_OF_TURN,
    Binned,
    EffectiveSampleFraction,
    ExpertLoad,
    Max,
    Mean,
    StepMetrics,
    Sum,
    Variance,
)
from rlhf.processes.code import load_function
from rlhf.types import Denominators, PolicyTargets

RATIO_BINS = np.linspace(0.0, 2.0, 41)  # ratios above are counted in the last bin
HEALTH_KL = "k3"  # the estimator of kl_old and engine_kl; its first argument is the policy that sampled


def policy_microbatch(
    model: nn.Module, tokens: DeviceTokens, targets: PolicyTargets, denominators: Denominators, config: GRPOConfig,
    teacher: Callable[[DeviceTokens], HeadInput] | None = None,
) -> tuple[Tensor, StepMetrics]:  # fmt: skip
    """This microbatch's share of the minibatch loss, under the global denominators, and its metrics.

    The shares of all microbatches of all data shards add up to the loss of the minibatch. A KL in the loss, to the
    reference or over the whole vocabulary to a `teacher`, is added to each token before aggregation, and its gradient
    flows.
    """
    algo, mask = config.algo, tokens.response_mask

    def column(values: np.ndarray) -> Tensor:
        return masked(torch.from_numpy(values).to(mask.device), mask)

    advantages = column(targets.advantages)
    passed_logprobs = None if targets.old_logprobs is None else column(targets.old_logprobs)
    ref_logprobs = None if targets.ref_logprobs is None else column(targets.ref_logprobs)
    rollout_logprobs = masked(tokens.rollout_logprobs, mask)
    options = {} if teacher is None else {"teacher": teacher(tokens)}
    logprobs, entropy, routing, teacher_kl = model(tokens, for_update=True, **options)
    learner_logprobs = logprobs.detach() if passed_logprobs is None else passed_logprobs
    old_logprobs = rollout_logprobs if algo.old_policy == "engine" else learner_logprobs

    kind = _own_loss(algo.policy_loss, tokens) if algo.has_own_loss else algo.policy_loss
    terms = losses.policy_loss(
        logprobs, old_logprobs=old_logprobs, advantages=advantages, response_mask=mask, cu_seqlens=tokens.cu_seqlens,
        rollout_logprobs=rollout_logprobs, kind=kind, clip_low=algo.clip_low, clip_high=algo.clip_high,
        dual_clip=algo.dual_clip, tau_positive=algo.sapo_tau_positive, tau_negative=algo.sapo_tau_negative,
    )  # fmt: skip
    per_token = terms.loss
    correction = losses.importance_weights(
        learner_logprobs, rollout_logprobs, response_mask=mask, cu_seqlens=tokens.cu_seqlens,
        mode=algo.importance_correction, level=algo.importance_level, cap=algo.importance_cap,
        floor=algo.importance_floor,
    )  # fmt: skip
    metrics: StepMetrics = {
        "policy/effective_sample_fraction": EffectiveSampleFraction(
            correction.samples, correction.ratio_sum, correction.ratio_square_sum
        )
    }
    if algo.importance_correction != "none":
        per_token = per_token * correction.weights
        metrics["policy/importance_weight"] = masked_mean(correction.weights, mask)
        metrics["policy/importance_outside_fraction"] = masked_mean(correction.outside.float(), mask)
    if algo.geometric_mask is not None:
        low, high = algo.geometric_mask
        left_out = losses.geometric_outside(
            learner_logprobs, rollout_logprobs, mask, tokens.cu_seqlens, low=low, high=high
        )
        per_token = torch.where(left_out, 0.0, per_token)
        metrics["policy/geometric_mask_fraction"] = masked_mean(left_out.float(), mask)
    if algo.off_policy_mask is not None:
        left_out = losses.off_policy_outside(
            logprobs, rollout_logprobs, advantages, mask, tokens.cu_seqlens, threshold=algo.off_policy_mask
        )
        per_token = torch.where(left_out, 0.0, per_token)
        metrics["policy/off_policy_mask_fraction"] = masked_mean(left_out.float(), mask)
    if ref_logprobs is not None:
        if config.kl_in_loss:
            penalty = kl.kl_per_token(
                logprobs, ref_logprobs,
                estimator=algo.kl_estimator, old_logprobs=old_logprobs, ratio_weighted=algo.weights_kl,
            )  # fmt: skip
            per_token = per_token + algo.kl_coef * penalty
        # On-policy at a lag of 0, since the old policy sampled the tokens; every epoch of a step repeats the same sums.
        for estimator in kl.KL_ESTIMATORS:
            values = kl.kl_per_token(old_logprobs, ref_logprobs, estimator=estimator, old_logprobs=old_logprobs)
            metrics[f"policy/kl_{estimator}"] = masked_mean(values, mask)
    if teacher_kl is not None:
        assert algo.teacher is not None
        per_token = per_token + algo.teacher.coef * teacher_kl
        metrics["policy/teacher_kl"] = masked_mean(teacher_kl.detach(), mask)
    if algo.entropy_coef:
        per_token = per_token - algo.entropy_coef * entropy
    if algo.clips:
        metrics["policy/clip_fraction"] = masked_mean(terms.clipped.float(), mask)
    if algo.dual_clip is not None:
        metrics["policy/dual_clip_fraction"] = masked_mean(terms.dual_clipped.float(), mask)

    loss = losses.aggregate(
        per_token, mask, tokens.cu_seqlens, tokens.rollout_tokens,
        aggregation=algo.loss_aggregation, tokens=denominators.tokens, rollouts=denominators.rollouts,
        constant_length=algo.constant_length or config.rollout.longest,
    )  # fmt: skip
    if routing is not None:
        trained = segment_counts(mask, tokens.cu_seqlens) > 0
        metrics |= _routing_metrics(routing, trained)
        if config.learner.router_balance_coef:
            assert routing.balance is not None, "refused when the model was loaded"
            balance = routing.balance[trained].sum() / max(denominators.sequences, 1)
            loss = loss + config.learner.router_balance_coef * balance
    # Keeps a microbatch without a trained token in the graph: every rank must make the same backward calls.
    loss = loss + 0.0 * logprobs.sum()
    engine_kl = kl.kl_per_token(rollout_logprobs, learner_logprobs, estimator=HEALTH_KL)
    metrics |= {
        "policy/loss": Sum(loss.detach().double()),
        "policy/entropy": masked_mean(entropy.detach(), mask),
        "policy/ratio": masked_mean(terms.ratio.detach(), mask),
        "policy/ratio_variance": _variance_around_1(terms.ratio.detach(), mask),
        "policy/ratio/histogram": _binned_ratios(terms.ratio.detach(), mask),
        "policy/ratio_max": Max(torch.where(mask, terms.ratio.detach(), float("-inf")).max()),
        "policy/kl_old": masked_mean(kl.kl_per_token(old_logprobs, logprobs.detach(), estimator=HEALTH_KL), mask),
        "policy/engine_logprob_difference": masked_mean((learner_logprobs - rollout_logprobs).abs(), mask),
        "policy/engine_kl": masked_mean(engine_kl, mask),
    }
    for name, values in terms.metrics.items():
        metrics[f"own/loss/{name}"] = masked_mean(values, mask & ~values.isnan())
    metrics |= _mean_by_bin(engine_kl, mask, tokens.position_ids, ENGINE_KL_FROM)
    if config.uses_environment_or_tools:
        metrics |= _mean_by_bin(engine_kl, mask, turn_numbers(mask, tokens.cu_seqlens), ENGINE_KL_OF_TURN)
    return loss, metrics


def _own_loss(name: str, tokens: DeviceTokens) -> Callable[..., Any]:
    """The user's loss with the arguments about rows that it asks for; a ValueError names it if it returns no loss."""
    function = load_function(name)
    rows = tokens.prompt_rows or (NO_ROW,) * len(tokens.rollout_tokens)
    further = asked_for(function, rows, tokens.rollout_tokens)

    def loss(logprobs: Tensor, **columns: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        try:
            return read_loss(function(logprobs, **columns, **further), len(logprobs))
        except ObjectiveError as error:
            raise ValueError(f"algo.policy_loss={name}: {error}. Correct it, and go on with --resume.") from None

    return loss


def _mean_by_bin(values: Tensor, mask: Tensor, numbers: Tensor, names: Mapping[int, str]) -> StepMetrics:
    """Means over the True tokens whose number [T] is from one key of `names` up to the next."""
    return {
        names[start]: masked_mean(values, mask & (numbers >= start) & (numbers < end))
        for start, end in itertools.pairwise([*names, sys.maxsize])
    }


def turn_numbers(response_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] int64, for each sampled token the number of its turn in its sequence, from 1 on.

    A turn is a run of True tokens; every sequence begins with a token that is not sampled.
    """
    before = torch.cat([response_mask.new_zeros(1), response_mask[:-1]])
    starts = (response_mask & ~before).long()
    counts = starts.cumsum(0)
    before_sequence = (counts - starts)[cu_seqlens[:-1].long()]
    return counts - before_sequence[segment_ids(cu_seqlens, len(counts))]


def _routing_metrics(routing: Routing, trained: Tensor) -> StepMetrics:
    """Load of the experts, over microbatches with a trained token; balancing loss, over trained sequences."""
    tokens = routing.load * trained.any()
    load, entropy = ExpertLoad(tokens, "max"), ExpertLoad(tokens, "entropy")
    metrics: StepMetrics = {"router/max_load": load, "router/load_entropy": entropy}
    if routing.balance is not None:
        metrics["router/balance_loss"] = masked_mean(routing.balance.detach(), trained)
    return metrics


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """The mean over masked positions as a metric that merges exactly across microbatches and ranks."""
    return Mean(torch.where(mask, values, torch.zeros_like(values)).double().sum(), mask.sum())


def _variance_around_1(ratio: Tensor, mask: Tensor) -> Variance:
    differences = torch.where(mask, ratio - 1, 0.0).double()
    return Variance(differences.sum(), differences.square().sum(), mask.sum())


def _binned_ratios(ratio: Tensor, mask: Tensor) -> Binned:
    """Counts by sorting: torch's own histogram has no deterministic form on a GPU (`run.deterministic`)."""
    edges = torch.linspace(RATIO_BINS[0], RATIO_BINS[-1], len(RATIO_BINS), device=ratio.device)  # a copy would wait
    values = ratio.float().masked_fill(~mask, torch.inf).sort().values
    ends = torch.searchsorted(values, edges)  # number of values below each edge
    ends[-1] = mask.sum()  # the last bin takes all that is above
    return Binned(ends.diff(), RATIO_BINS)


def on_host(metrics: StepMetrics) -> StepMetrics:
    """The same metrics with numbers and arrays in place of tensors; this waits for the device."""

    def read(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.cpu().numpy() if value.ndim else value.item()

    return {name: type(metric)(*map(read, vars(metric).values())) for name, metric in metrics.items()}
