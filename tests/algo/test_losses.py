"""Policy losses, value loss, importance correction and aggregation (rlhf/algo/losses.py)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhf.algo.losses import (
    PolicyLossTerms,
    aggregate,
    geometric_outside,
    importance_weights,
    off_policy_outside,
    policy_loss,
    value_loss,
)
from rlhf.algo.numerics import MAX_LOG_RATIO
from rlhf.log.reductions import EffectiveSampleFraction

POLICY_LOSSES = ("ppo", "gspo", "cispo", "sapo", "dppo_tv")
LOSS_AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
IMPORTANCE_CORRECTIONS = ("none", "truncated", "masked")
IMPORTANCE_LEVELS = ("token", "sequence")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bool)


def loss_at(ratios: list[float], advantages: list[float], **options: object) -> tuple[PolicyLossTerms, Tensor]:
    """Terms and the gradient in log pi where pi / pi_old has these values."""
    logprobs = torch.log(torch.tensor(ratios, dtype=torch.float64)) - 3
    logprobs.requires_grad_()
    terms = policy_loss(
        logprobs,
        old_logprobs=torch.full_like(logprobs, -3).detach(),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        response_mask=ones(len(ratios)),
        **({"clip_low": 0.2, "clip_high": 0.28} | options),  # type: ignore[arg-type]
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    return terms, gradient


# --- clipped policy loss ---


def test_clip_stops_the_gradient_only_past_the_bound_the_advantage_pushes_toward():
    terms, gradient = loss_at([1.5, 0.5, 1.5, 0.5], [1, 1, -1, -1])
    assert terms.loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8])
    assert gradient.tolist() == pytest.approx([0, -0.5, 1.5, 0])
    assert terms.clipped.tolist() == [True, False, False, True]
    assert terms.ratio.tolist() == pytest.approx([1.5, 0.5, 1.5, 0.5])
    assert not terms.ratio.requires_grad


def test_low_and_high_bounds_are_separate():
    inside = [0.81, 0.79, 1.27, 1.29]
    terms, _ = loss_at(inside, [-1, -1, 1, 1])
    assert terms.clipped.tolist() == [False, True, False, True]
    assert terms.loss.tolist() == pytest.approx([0.81, 0.8, -1.27, -1.28])


def test_an_unchanged_policy_has_ratio_exactly_one_and_the_plain_policy_gradient():
    for kind in POLICY_LOSSES:
        logprobs = (torch.randn(6) - 2).requires_grad_()
        advantages = torch.randn(6)
        terms = policy_loss(
            logprobs,
            old_logprobs=logprobs.detach(),
            advantages=advantages,
            response_mask=ones(6),
            clip_low=0.2,
            clip_high=0.2,
            kind=kind,
            cu_seqlens=torch.tensor([0, 2, 6]),
        )
        assert (terms.ratio == 1).all()
        assert not terms.clipped.any()
        (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
        assert torch.allclose(gradient, -advantages, rtol=1e-6, atol=0)


def test_dual_clip_bounds_the_loss_of_bad_actions_that_became_likely():
    terms, gradient = loss_at([5.0, 2.0, 5.0, 0.5], [-1, -1, 1, -1], dual_clip=3.0)
    assert terms.loss.tolist() == pytest.approx([3, 2, -1.28, 0.8])
    assert gradient.tolist() == pytest.approx([0, 2, 0, 0])
    assert terms.dual_clipped.tolist() == [True, False, False, False]
    assert terms.clipped.tolist() == [False, False, True, True]


def test_ratios_beyond_measure_stay_finite_with_a_gradient_of_the_right_sign():
    logprobs = torch.tensor([0.0, 0.0]).requires_grad_()
    terms = policy_loss(
        logprobs,
        old_logprobs=torch.tensor([-1000.0, 1000.0]),
        advantages=torch.tensor([-1.0, 1.0]),
        response_mask=ones(2),
        clip_low=0.2,
        clip_high=0.2,
    )
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    assert terms.loss.isfinite().all()
    assert gradient.tolist() == [pytest.approx(math.exp(MAX_LOG_RATIO)), 0]


# --- GSPO, CISPO ---


def test_gspo_gives_every_token_the_geometric_mean_ratio_of_its_sequence():
    # Sequence 0 has log ratios 0.1 and 0.3 around a hole, sequence 1 has 0.5: ratios e^0.2 and e^0.5 (clipped, A > 0).
    mask = torch.tensor([False, True, False, True, False, True])
    logprobs = torch.tensor([9, 0.1, 9, 0.3, 9, 0.5], dtype=torch.float64).requires_grad_()
    terms = policy_loss(
        logprobs,
        old_logprobs=torch.zeros(6, dtype=torch.float64),
        advantages=torch.tensor([9, 2, 9, 2, 9, 1], dtype=torch.float64),
        response_mask=mask,
        clip_low=0.3,
        clip_high=0.3,
        kind="gspo",
        cu_seqlens=torch.tensor([0, 4, 6]),
    )
    s = math.exp(0.2)
    assert terms.ratio.tolist() == pytest.approx([0, s, 0, s, 0, math.exp(0.5)])
    assert terms.loss.tolist() == pytest.approx([0, -2 * s, 0, -2 * s, 0, -1.3])
    assert terms.clipped.tolist() == [False, False, False, False, False, True]
    bounds, counts = torch.tensor([0, 4, 6]), torch.tensor([2, 1])
    total = aggregate(terms.loss, mask, bounds, counts, aggregation="sequence_mean", tokens=3, rollouts=2)
    (gradient,) = torch.autograd.grad(total, logprobs)
    assert gradient.tolist() == pytest.approx([0, -s / 2, 0, -s / 2, 0, 0])


def test_gspo_with_a_sequence_mean_has_the_gradient_of_the_sequence_objective():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    old = logprobs.detach() + 0.1 * torch.randn(7, generator=generator, dtype=torch.float64)
    bounds, advantages = torch.tensor([0, 3, 7]), torch.tensor([1.5, -0.7], dtype=torch.float64)
    terms = policy_loss(
        logprobs,
        old_logprobs=old,
        advantages=advantages.repeat_interleave(bounds.diff()),
        response_mask=ones(7),
        clip_low=0.5,
        clip_high=0.5,
        kind="gspo",
        cu_seqlens=bounds,
    )
    ours = aggregate(terms.loss, ones(7), bounds, bounds.diff(), aggregation="sequence_mean", tokens=7, rollouts=2)
    ratios = torch.stack([(logprobs - old)[:3].mean(), (logprobs - old)[3:].mean()]).exp()
    direct = -torch.minimum(ratios * advantages, ratios.clamp(0.5, 1.5) * advantages).mean()
    assert ours.item() == pytest.approx(direct.item())
    for a, b in zip(torch.autograd.grad(ours, logprobs), torch.autograd.grad(direct, logprobs), strict=True):
        assert torch.allclose(a, b)


def test_cispo_cuts_the_weight_of_a_token_and_never_its_gradient():
    terms, gradient = loss_at([2.0, 0.5, 1.1], [1, -2, 1], kind="cispo", clip_low=1.0, clip_high=0.28)
    logprobs = [math.log(2) - 3, math.log(0.5) - 3, math.log(1.1) - 3]
    assert terms.loss.tolist() == pytest.approx([-1.28 * logprobs[0], 0.5 * 2 * logprobs[1], -1.1 * logprobs[2]])
    assert gradient.tolist() == pytest.approx([-1.28, 1.0, -1.1])
    assert terms.clipped.tolist() == [True, False, False]


# --- SAPO ---


def test_sapo_hand_numbers():
    # tau 1 and 2: -(4 / tau) sigmoid(tau (r - 1)) A, which at r = 1 is -2 A / tau with the gradient -A.
    terms, gradient = loss_at([1.0, 1.0, 1 + math.log(3)], [3, -1, 1], kind="sapo", tau_positive=1.0, tau_negative=2.0)
    assert terms.loss.tolist() == pytest.approx([-6, 1, -3])
    assert gradient.tolist() == pytest.approx([-3, 1, -(1 + math.log(3)) * 4 * 0.75 * 0.25])
    assert not terms.clipped.any()


@pytest.mark.parametrize("advantage", [1.5, -0.7])
def test_the_gradient_of_sapo_is_that_of_the_policy_gradient_times_its_gate(advantage):
    """r A sech(tau (r - 1) / 2)^2 by the paper's derivation, without a sigmoid; the gate never widens away from 1."""
    ratios = [0.01, 0.3, 0.9, 1.0, 1.1, 2.0, 5.0, 1e9]
    tau = 1.3 if advantage > 0 else 1.8
    options = {"kind": "sapo", "tau_positive": 1.3, "tau_negative": 1.8}
    _, gradient = loss_at(ratios, [advantage] * len(ratios), **options)
    gates = [1 / math.cosh(min(tau * (ratio - 1) / 2, 300)) ** 2 for ratio in ratios]
    assert gradient.tolist() == pytest.approx([-advantage * r * g for r, g in zip(ratios, gates, strict=True)])
    assert gates == sorted(gates[:4]) + sorted(gates[4:], reverse=True)


# --- DPPO ---


def binary_tv(p: float, q: float) -> float:
    """Total variation of two distributions over this token and all others."""
    return (abs(p - q) + abs((1 - p) - (1 - q))) / 2


@pytest.mark.parametrize("advantage", [2.0, -0.5, 0.0])
def test_dppo_leaves_out_what_moves_away_from_a_trust_region_of_total_variation(advantage):
    """Over a grid of probabilities, against autograd through the definition: mask, ratio, advantage."""
    grid = torch.tensor([1e-6, 0.01, 0.1, 0.28, 0.42, 0.6, 0.77, 0.99], dtype=torch.float64)
    pi, mu = grid.repeat(8), grid.repeat_interleave(8)
    logprobs = pi.log().requires_grad_()
    terms = policy_loss(
        logprobs, old_logprobs=mu.log(), advantages=torch.full_like(pi, advantage), response_mask=ones(64),
        clip_low=0.15, clip_high=0.3, kind="dppo_tv",
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss.sum(), logprobs)
    reference = pi.log().requires_grad_()
    losses, masks = [], []
    for index in range(64):
        ratio = torch.exp(reference[index]) / mu[index]
        away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        too_far = binary_tv(float(pi[index]), float(mu[index])) > (0.3 if advantage > 0 else 0.15)
        masks.append(bool(away) and too_far)
        if ratio > 20:  # a rare token may gain little and its ratio much: the weight of its gradient is bounded
            ratio = 20 * (1 + reference[index] - reference[index].detach())
        losses.append(-(0.0 if masks[-1] else 1.0) * ratio * advantage)
    assert terms.clipped.tolist() == masks
    assert 0 < sum(masks) < 32 or advantage == 0
    assert torch.allclose(terms.loss, torch.stack(losses))
    assert torch.allclose(gradient, torch.autograd.grad(sum(losses), reference)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", [2, 5])
def test_dppo_never_leaves_a_token_out_within_the_total_variation_of_the_whole_vocabulary(vocabulary):
    """By enumeration of all tokens of random policies; with two tokens the bound of the token is the exact one."""
    for _ in range(20):
        mu, pi = torch.randn(2, vocabulary, dtype=torch.float64).softmax(-1)
        total_variation = (mu - pi).abs().sum() / 2
        for advantage in (1.0, -1.0):
            clipped = policy_loss(
                pi.log(), old_logprobs=mu.log(), advantages=torch.full_like(pi, advantage),
                response_mask=ones(vocabulary), clip_low=0.2, clip_high=0.2, kind="dppo_tv",
            ).clipped  # fmt: skip
            away = (pi > mu) if advantage > 0 else (pi < mu)
            if vocabulary == 2:
                assert torch.equal(clipped, away & (total_variation > 0.2))
            assert not (clipped & ~(away & (total_variation > 0.2))).any()


def test_a_rare_token_that_ppo_clips_still_learns_and_a_common_one_that_ppo_lets_fall_is_held():
    for probability, old, advantage, dppo_learns in ((1e-3, 1e-5, 1.0, True), (0.8, 0.99, -1.0, False)):
        gradients = []
        for kind in ("ppo", "dppo_tv"):
            logprobs = torch.tensor([probability]).log().requires_grad_()
            terms = policy_loss(
                logprobs, old_logprobs=torch.tensor([old]).log(), advantages=torch.tensor([advantage]),
                response_mask=ones(1), clip_low=0.2 if kind == "ppo" else 0.15, clip_high=0.2, kind=kind,
            )  # fmt: skip
            gradients.append(bool(torch.autograd.grad(terms.loss.sum(), logprobs)[0]))
        assert gradients == [not dppo_learns, dppo_learns]


# --- value loss ---


def test_value_loss_takes_the_larger_of_plain_and_clipped():
    # Return 0, old value 1, clip 0.2. At 0.5 the clipped value 0.8 is worse: no gradient; at 1.5 the plain one is.
    values = torch.tensor([0.5, 1.5, 1.1], dtype=torch.float64).requires_grad_()
    old, returns = torch.ones(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    terms = value_loss(values, old, returns, ones(3), clip=0.2)
    assert terms.loss.tolist() == pytest.approx([0.32, 1.125, 0.605])
    assert terms.clipped.tolist() == [True, False, False]
    assert torch.autograd.grad(terms.loss.sum(), values)[0].tolist() == pytest.approx([0, 1.5, 1.1])
    plain = value_loss(values, old, returns, ones(3), clip=None)
    assert plain.loss.tolist() == pytest.approx([0.125, 1.125, 0.605])
    assert not plain.clipped.any()


# --- importance correction ---


def corrected(weights: list[float], bounds: list[int], mode: str, level: str, cap: float = 2.0, **options: float):
    log_weights = torch.log(torch.tensor(weights, dtype=torch.float64))
    rollout = torch.full_like(log_weights, -1)
    return importance_weights(
        rollout + log_weights,
        rollout,
        ones(len(weights)),
        torch.tensor(bounds),
        mode=mode,
        level=level,
        cap=cap,
        **options,
    )


def test_importance_weights_hand_numbers_by_token():
    expected = {
        "none": ([1, 1, 1, 1], [False, False, False, False]),
        "truncated": ([2, 0.25, 1.5, 1], [True, False, False, False]),
        "masked": ([0, 0, 1.5, 1], [True, True, False, False]),
    }
    for mode, (weights, outside) in expected.items():
        ours = corrected([3, 0.25, 1.5, 1], [0, 2, 4], mode, "token")
        assert ours.weights.tolist() == pytest.approx(weights)
        assert ours.outside.tolist() == outside


def test_importance_weights_by_sequence_multiply_within_each_response_of_a_packed_row():
    expected = {"truncated": [0.75, 0.75, 2, 2], "masked": [0.75, 0.75, 0, 0], "none": [1, 1, 1, 1]}
    for mode, weights in expected.items():
        assert corrected([3, 0.25, 1.5, 2], [0, 2, 4], mode, "sequence").weights.tolist() == pytest.approx(weights)


@pytest.mark.parametrize("level", IMPORTANCE_LEVELS)
def test_responses_in_one_packed_row_weigh_what_each_weighs_alone(level):
    old, rollout = torch.randn(2, 9)
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    bounds = [0, 3, 7, 7, 9]
    together = importance_weights(old, rollout, mask, torch.tensor(bounds), mode="truncated", level=level)
    alone = [
        importance_weights(old[s:e], rollout[s:e], mask[s:e], torch.tensor([0, e - s]), mode="truncated", level=level)
        for s, e in zip(bounds[:-1], bounds[1:], strict=True)  # noqa: RUF007
    ]
    assert torch.equal(together.weights, torch.cat([part.weights for part in alone]))
    for field in ("samples", "ratio_sum", "ratio_square_sum"):
        assert float(getattr(together, field)) == pytest.approx(sum(float(getattr(part, field)) for part in alone))


def test_the_two_bounds_of_a_weight_are_separate():
    masked = corrected([6, 4, 0.6, 0.4], [0, 4], "masked", "token", cap=5.0, floor=0.5)
    assert masked.weights.tolist() == pytest.approx([0, 4, 0.6, 0])
    truncated = corrected([6, 4, 0.6, 0.4], [0, 4], "truncated", "token", cap=5.0, floor=0.5)
    assert truncated.weights.tolist() == pytest.approx([5, 4, 0.6, 0.5])
    assert masked.outside.tolist() == truncated.outside.tolist() == [True, False, False, True]


def test_the_geometric_mean_of_a_sequence_does_not_grow_with_its_length_as_its_product_does():
    lengths = torch.tensor([10, 1000])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask = ones(1010)
    rollout = torch.full((1010,), -1.0, dtype=torch.float64)
    for shift in (0.01, -0.01):
        inside = geometric_outside(rollout + shift, rollout, mask, bounds, low=0.98, high=1.02)
        beyond = geometric_outside(rollout + shift, rollout, mask, bounds, low=0.995, high=1.005)
        assert not inside.any()
        assert beyond.all()
        product = importance_weights(
            rollout + shift, rollout, mask, bounds, mode="masked", level="sequence", cap=2.0
        ).outside
        assert product.tolist() == [False] * 10 + [True] * 1000


def test_masked_correction_and_geometric_mask_have_the_gradient_of_the_objective_written_by_sequence():
    """arXiv:2510.18855 multiplies the clipped objective by M(k); one sequence after the other, by plain autograd."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(16, generator=generator) < 0.7
    old = torch.randn(16, generator=generator, dtype=torch.float64) - 2
    rollout = old + 0.4 * torch.randn(16, generator=generator, dtype=torch.float64)
    rollout[6:9] -= 0.6  # of the second sequence the engine has moved away
    bounds = [0, 6, 9, 16]
    advantages = torch.tensor([1.5, -0.7, 0.4], dtype=torch.float64)
    by_token = advantages.repeat_interleave(torch.tensor(bounds).diff())
    start = old + 0.2 * torch.randn(16, generator=generator, dtype=torch.float64)

    logprobs = start.clone().requires_grad_()
    terms = policy_loss(
        logprobs, old_logprobs=old, advantages=by_token, response_mask=mask, clip_low=0.2, clip_high=0.2
    )
    cu_seqlens = torch.tensor(bounds)
    weights = importance_weights(old, rollout, mask, cu_seqlens, mode="masked", cap=1.6, floor=0.6).weights
    left_out = geometric_outside(old, rollout, mask, cu_seqlens, low=0.8, high=1.25)
    (ours,) = torch.autograd.grad(torch.where(left_out, 0.0, terms.loss * weights).sum(), logprobs)

    reference = start.clone().requires_grad_()
    total, kept = torch.zeros((), dtype=torch.float64), 0
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        tokens = [t for t in range(first, last) if mask[t]]
        ks = [math.exp(float(old[t] - rollout[t])) for t in tokens]
        if not 0.8 <= math.prod(ks) ** (1 / len(ks)) <= 1.25:
            continue
        kept += 1
        for t, k in zip(tokens, ks, strict=True):
            ratio = torch.exp(reference[t] - old[t])
            if 0.6 <= k <= 1.6:
                total = total - k * torch.min(ratio * advantages[number], ratio.clamp(0.8, 1.2) * advantages[number])
    assert kept == 2
    assert torch.allclose(ours, torch.autograd.grad(total, reference)[0])
    assert (ours[mask] != 0).sum() < mask.sum()


def test_sequences_that_the_policy_has_left_are_left_out_where_the_advantage_is_negative():
    # Mean log(engine / policy): 0.6 twice, then 0.4 (with a hole), then -5: the policy now prefers it.
    mask = torch.tensor([False, True, True, True, True, True, False, True, True])
    engine = torch.full((9,), -1.0)
    policy = engine - torch.tensor([9, 0.2, 1.0, 0.2, 1.0, 0.1, 9, 0.7, -5])
    bounds = torch.tensor([0, 3, 5, 8, 9])
    advantages = torch.tensor([-1.0, -1, -1, 1, 1, -1, -1, -1, -1])
    outside = off_policy_outside(policy, engine, advantages, mask, bounds, threshold=0.5)
    assert outside.tolist() == [False, True, True] + [False] * 6
    outside = off_policy_outside(policy, engine, advantages, mask, bounds, threshold=0.3)
    assert outside.tolist() == [False, True, True, False, False, True, False, True, False]


def test_the_off_policy_mask_has_the_gradient_of_the_objective_written_by_sequence():
    generator = torch.Generator().manual_seed(1)
    bounds = torch.tensor([0, 5, 11, 16, 24])
    advantages = torch.tensor([-1.0, -0.5, 0.8, -2.0], dtype=torch.float64)
    mask = torch.rand(24, generator=generator) < 0.8
    old = torch.randn(24, generator=generator, dtype=torch.float64) - 2
    start = old + 0.1 * torch.randn(24, generator=generator, dtype=torch.float64)
    rollout = start + torch.tensor([0.7, -0.7, 0.7, 0.2], dtype=torch.float64).repeat_interleave(bounds.diff())
    by_token = advantages.repeat_interleave(bounds.diff())

    logprobs = start.clone().requires_grad_()
    terms = policy_loss(
        logprobs, old_logprobs=old, advantages=by_token, response_mask=mask, clip_low=0.2, clip_high=0.2
    )
    left_out = off_policy_outside(logprobs, rollout, by_token, mask, bounds, threshold=0.5)
    (ours,) = torch.autograd.grad(torch.where(left_out, 0.0, terms.loss).sum(), logprobs)

    reference = start.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for advantage, (first, last) in zip(advantages, itertools.pairwise(bounds.tolist()), strict=True):
        one, here = reference[first:last][mask[first:last]], slice(first, last)
        sampled_by, before = rollout[here][mask[here]], old[here][mask[here]]
        keep = 0.0 if advantage < 0 and float((sampled_by - one.detach()).mean()) > 0.5 else 1.0
        ratio = torch.exp(one - before)
        total = total - keep * torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    assert torch.allclose(ours, torch.autograd.grad(total, reference)[0])
    assert [bool(part.any()) for part in ours.split(bounds.diff().tolist())] == [False, True, True, True]


def test_effective_sample_fraction_hand_numbers():
    tokens = corrected([1, 1, 2], [0, 3], "truncated", "token", cap=1.5)
    sums = [float(x) for x in (tokens.samples, tokens.ratio_sum, tokens.ratio_square_sum)]
    assert sums == pytest.approx([3, 4, 6])
    assert EffectiveSampleFraction(*sums).value() == pytest.approx(16 / 18)
    sequences = corrected([1, 1, 2], [0, 2, 3], "truncated", "sequence")
    assert [float(x) for x in sequences[2:]] == pytest.approx([2, 3, 5])
    assert EffectiveSampleFraction(4, 4, 4).value() == 1
    assert math.isnan(EffectiveSampleFraction(0, 0, 0).value())


# --- aggregation ---

MASK = torch.tensor([False, True, True, True, False, True, False, False])
BOUNDS = torch.tensor([0, 4, 6, 8])
ALONE = torch.tensor([3, 1, 0])  # response tokens of each sequence
JOINED = torch.tensor([4, 4, 0])  # the first two are one rollout
VALUES = torch.tensor([9.0, 1, 2, 6, 9, 5, 9, 9])


def test_aggregation_hand_numbers():
    totals = {
        kind: float(aggregate(VALUES, MASK, BOUNDS, ALONE, aggregation=kind, tokens=4, rollouts=2, constant_length=7))
        for kind in LOSS_AGGREGATIONS
    }
    assert totals == pytest.approx({"token_mean": 14 / 4, "sequence_mean": (3 + 5) / 2, "constant": 14 / 14})
    one = aggregate(VALUES, MASK, BOUNDS, JOINED, aggregation="sequence_mean", tokens=4, rollouts=1)
    assert float(one) == (1 + 2 + 6 + 5) / 4


@pytest.mark.parametrize("counts", [ALONE, JOINED], ids=["alone", "joined"])
@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_shares_of_microbatches_add_up_to_the_minibatch_in_loss_and_gradient(aggregation, counts):
    options = {"aggregation": aggregation, "tokens": 4, "rollouts": 2, "constant_length": 7}
    values = VALUES.double().requires_grad_()
    whole = aggregate(values, MASK, BOUNDS, counts, **options)
    parts = [
        aggregate(values[:4], MASK[:4], torch.tensor([0, 4]), counts[:1], **options),
        aggregate(values[4:], MASK[4:], torch.tensor([0, 2, 4]), counts[1:], **options),
    ]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item())
    for a, b in zip(torch.autograd.grad(sum(parts), values), torch.autograd.grad(whole, values), strict=True):  # type: ignore[arg-type]
        assert torch.allclose(a, b)


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_nothing_to_train_is_a_loss_of_zero_that_stays_in_the_graph(aggregation):
    values = torch.full((4,), math.nan).requires_grad_()
    nothing = torch.zeros(4, dtype=torch.bool)
    bounds, counts = torch.tensor([0, 2, 4]), torch.tensor([0, 0])
    loss = aggregate(values, nothing, bounds, counts, aggregation=aggregation, tokens=0, rollouts=0, constant_length=7)
    assert loss.item() == 0
    assert torch.autograd.grad(loss, values)[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_a_row_that_is_masked_throughout_has_no_loss_no_gradient_and_no_weight(kind):
    nothing, nan, bounds = torch.zeros(4, dtype=torch.bool), torch.full((4,), math.nan), torch.tensor([0, 3, 4])
    logprobs = nan.clone().requires_grad_()
    terms = policy_loss(
        logprobs, old_logprobs=nan, advantages=nan, response_mask=nothing, clip_low=0.2, clip_high=0.2, kind=kind,
        cu_seqlens=bounds,
    )  # fmt: skip
    (terms.loss.sum() + value_loss(logprobs, nan, nan, nothing, clip=0.2).loss.sum()).backward()
    assert terms.loss.tolist() == terms.ratio.tolist() == logprobs.grad.tolist() == [0, 0, 0, 0]
    assert not terms.clipped.any()
    for level in IMPORTANCE_LEVELS:
        for mode in IMPORTANCE_CORRECTIONS:
            weights = importance_weights(nan, nan, nothing, bounds, mode=mode, level=level)
            assert weights.weights.tolist() == [0, 0, 0, 0]
            assert [float(x) for x in weights[2:]] == [0, 0, 0]


# --- garbage and refusals ---


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_garbage_outside_of_the_mask_changes_no_bit_of_loss_or_gradient(kind, garbage):
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(8, generator=generator) for _ in range(4)]

    def outcome(logprobs: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor) -> list[Tensor]:
        logprobs = logprobs.clone().requires_grad_()
        dual_clip = 3.0 if kind in ("ppo", "gspo") else None
        terms = policy_loss(
            logprobs,
            old_logprobs=old,
            advantages=advantages,
            response_mask=MASK,
            clip_low=0.2,
            clip_high=0.3,
            kind=kind,
            dual_clip=dual_clip,
            cu_seqlens=BOUNDS,
        )
        outputs = [terms.loss.detach(), terms.ratio, terms.clipped]
        outputs.append(geometric_outside(old, rollout, MASK, BOUNDS, low=0.9, high=1.1))
        outputs.append(off_policy_outside(logprobs, rollout, advantages, MASK, BOUNDS, threshold=0.1))
        per_token = terms.loss
        for mode in IMPORTANCE_CORRECTIONS:
            for level in IMPORTANCE_LEVELS:
                correction = importance_weights(old, rollout, MASK, BOUNDS, mode=mode, level=level)
                outputs += correction
                per_token = per_token + terms.loss * correction.weights
        per_token = per_token + value_loss(logprobs, old, rollout, MASK, clip=0.2).loss
        for aggregation in LOSS_AGGREGATIONS:
            loss = aggregate(
                per_token, MASK, BOUNDS, ALONE, aggregation=aggregation, tokens=4, rollouts=2, constant_length=7
            )
            (gradient,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
            assert (gradient[~MASK] == 0).all()
            outputs += [loss.detach(), gradient]
        return outputs

    dirty = [torch.where(MASK, x, garbage) for x in clean]
    assert all(torch.equal(a, b) for a, b in zip(outcome(*clean), outcome(*dirty), strict=True))
