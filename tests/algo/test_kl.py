"""What the KL estimators do as a loss and in the reward, proved by enumerating small softmax policies in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.studies.enumeration import (
    LENGTHS,
    LONGEST,
    PREFIX_OF_TOKEN,
    RESPONSES,
    gradient_of,
    per_response,
    probabilities,
    token_logprobs,
)
from benchmarks.studies.kl_responses import (
    AGGREGATIONS,
    Policies,
    cosine,
    length_gradient,
    minibatch_gradient,
    minibatches,
    prefix_kl_gradient,
    response_policies,
    sampler_kl_gradient,
)
from rlhf.algo.kl import KL_ESTIMATORS, KLController, kl_per_token
from rlhf.algo.numerics import MAX_LOG_RATIO

V = 5
EXACT = 1e-12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def policy(seed: int, *shape: int) -> Tensor:
    """Logits of a random softmax policy, one row a prefix."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, V, generator=generator, dtype=torch.float64)


THETA, REF, OLD = policy(1), policy(2), policy(3)


def reverse_kl_gradient(theta: Tensor, ref: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    log_pi = theta.log_softmax(-1)
    (log_pi.exp() * (log_pi - ref.log_softmax(-1))).sum().backward()
    return theta.grad


def forward_kl_gradient(theta: Tensor, ref: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    log_ref = ref.log_softmax(-1)
    (log_ref.exp() * (log_ref - theta.log_softmax(-1))).sum().backward()
    return theta.grad


def expected_loss_gradient(
    estimator: str, *, sampled_from: Tensor, old: Tensor | None = None, ratio_weighted: bool = False
) -> Tensor:
    """The sum over all tokens of P(token) times the gradient of its KL loss: the expectation, without sampling.

    old: logits of the policy of the ratio; None: the one that sampled.
    """
    theta = THETA.clone().requires_grad_()
    log_sampler = sampled_from.log_softmax(-1)
    log_old = log_sampler if old is None else old.log_softmax(-1)
    penalty = kl_per_token(
        theta.log_softmax(-1),
        REF.log_softmax(-1),
        estimator=estimator,
        old_logprobs=log_old,
        ratio_weighted=ratio_weighted,
    )
    (log_sampler.exp() * penalty).sum().backward()
    return theta.grad


def assert_same(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() < EXACT


# --- values ---


def test_hand_numbers():
    # d = log 2 and d = -log 2, pi/pi_old = 3.
    logprobs = torch.log(torch.tensor([0.4, 0.2], dtype=torch.float64))
    ref = torch.log(torch.tensor([0.2, 0.4], dtype=torch.float64))
    old = logprobs - math.log(3)
    expected = {
        "k1": [math.log(2), -math.log(2)],
        "k2": [math.log(2) ** 2 / 2] * 2,
        "k3": [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)],
        "k4": [3 * math.log(2), -3 * math.log(2)],
    }
    for estimator, values in expected.items():
        ours = kl_per_token(logprobs, ref, estimator=estimator, old_logprobs=old)
        assert ours.tolist() == pytest.approx(values)
    weighted = kl_per_token(logprobs, ref, estimator="k3", old_logprobs=old, ratio_weighted=True)
    assert weighted.tolist() == pytest.approx([3 * value for value in expected["k3"]])


def test_equal_policies_have_a_kl_of_exactly_zero():
    logprobs = torch.randn(100)
    for estimator in KL_ESTIMATORS:
        assert (kl_per_token(logprobs, logprobs, estimator=estimator, old_logprobs=logprobs) == 0).all()


def test_k1_k3_and_k4_measure_the_kl_without_bias_on_policy_and_k2_does_not():
    log_pi, log_ref = THETA.log_softmax(-1), REF.log_softmax(-1)
    exact = (log_pi.exp() * (log_pi - log_ref)).sum()
    for estimator in KL_ESTIMATORS:
        mean = (log_pi.exp() * kl_per_token(log_pi, log_ref, estimator=estimator, old_logprobs=log_pi)).sum()
        assert (abs(mean - exact) < EXACT) == (estimator != "k2")


# --- in the loss, on-policy, given the prefix ---


def test_k1_in_the_loss_has_no_expected_gradient():
    assert_same(expected_loss_gradient("k1", sampled_from=THETA), torch.zeros(V, dtype=torch.float64))


@pytest.mark.parametrize(("estimator", "ratio_weighted"), [("k2", False), ("k4", False), ("k3", True)])
def test_k2_k4_and_weighted_k3_in_the_loss_have_the_gradient_of_the_reverse_kl(estimator, ratio_weighted):
    ours = expected_loss_gradient(estimator, sampled_from=THETA, ratio_weighted=ratio_weighted)
    assert_same(ours, reverse_kl_gradient(THETA, REF))


def test_k3_in_the_loss_has_the_gradient_of_the_forward_kl():
    ours = expected_loss_gradient("k3", sampled_from=THETA)
    assert_same(ours, forward_kl_gradient(THETA, REF))
    assert (ours - reverse_kl_gradient(THETA, REF)).abs().max() > 0.01


# --- in the loss, off-policy ---


@pytest.mark.parametrize(("estimator", "ratio_weighted"), [("k4", False), ("k3", True)])
def test_k4_and_weighted_k3_stay_exact_off_policy(estimator, ratio_weighted):
    ours = expected_loss_gradient(estimator, sampled_from=OLD, ratio_weighted=ratio_weighted)
    assert_same(ours, reverse_kl_gradient(THETA, REF))


def test_k1_k2_and_plain_k3_become_sums_under_the_old_policy_off_policy():
    log_pi, log_ref, old = THETA.log_softmax(-1), REF.log_softmax(-1), OLD.softmax(-1)
    d = log_pi - log_ref
    score = torch.eye(V, dtype=torch.float64) - log_pi.exp()  # [token, parameter] gradient of log pi(token)
    for estimator, weight in (("k1", torch.ones_like(d)), ("k2", d), ("k3", 1 - torch.exp(-d))):
        ours = expected_loss_gradient(estimator, sampled_from=OLD)
        assert_same(ours, ((old * weight)[:, None] * score).sum(0))
        assert (ours - reverse_kl_gradient(THETA, REF)).abs().max() > 0.01
    assert expected_loss_gradient("k1", sampled_from=OLD).abs().max() > 0.01


def test_with_a_lag_k4_also_pushes_away_from_the_policy_that_sampled_and_weighted_k3_does_not():
    """An older policy sampled, and the ratio is that to the learner, 1 in the first update of a step."""
    k1, k2 = (expected_loss_gradient(name, sampled_from=OLD) for name in ("k1", "k2"))
    assert_same(k1, -forward_kl_gradient(THETA, OLD))
    assert_same(expected_loss_gradient("k4", sampled_from=OLD, old=THETA), k1 + k2)
    assert_same(expected_loss_gradient("k3", sampled_from=OLD, old=THETA, ratio_weighted=True), k2)


def test_one_gradient_of_k1_is_not_zero_and_grows_with_the_coefficient():
    """At one token and on-policy it is noise: the mean over tokens is 0 and the mean square is not."""
    log_pi, log_ref = THETA.log_softmax(-1), REF.log_softmax(-1)
    square = 0.0
    for token in range(V):
        theta = THETA.clone().requires_grad_()
        kl_per_token(theta.log_softmax(-1)[token], log_ref[token], estimator="k1").backward()
        square += float(log_pi[token].exp() * theta.grad.square().sum())
    # Of grad log pi(token) = onehot - pi: sum of pi_t (1 - 2 pi_t + |pi|^2) = 1 - |pi|^2.
    assert square == pytest.approx(float(1 - log_pi.exp().square().sum()))


# --- responses that end: a division by a sampled length, and another policy that sampled ---

POLICIES = response_policies(0)
ON_POLICY, OFF_POLICY = POLICIES.policy, POLICIES.old
WEIGHTED = "k3 weighted"
DIVIDED = ("token_mean", "sequence_mean")


def summed(name: str, sampler: Tensor) -> Tensor:
    """Expected gradient of the sum over the tokens of a response."""
    return LONGEST * minibatch_gradient(name, POLICIES, sampler, "constant")


def inverse_length_gradient(aggregation: str, size: int = 2) -> Tensor:
    """Of E[1/N] of a minibatch: N is the tokens of the minibatch, or of a response."""

    def expected(theta: Tensor) -> Tensor:
        probability = probabilities(theta)
        if aggregation == "sequence_mean":
            return probability @ (1 / LENGTHS.double())
        return sum(
            (probability[chosen].prod(-1) / LENGTHS[chosen].sum(-1)).sum() for chosen, _ in minibatches(size).values()
        )

    return gradient_of(expected, ON_POLICY)


def test_the_enumeration_is_of_responses_that_end_and_of_all_their_pairs():
    assert len(RESPONSES) == 15
    assert sorted(set(LENGTHS.tolist())) == [1, 2, 3]
    assert sum(len(chosen) for chosen, _ in minibatches(2).values()) == 225
    assert float(probabilities(ON_POLICY).sum()) == pytest.approx(1)


def test_summed_over_tokens_and_on_policy_k1_has_no_gradient_k3_that_of_the_forward_kl_and_the_others_the_reverse():
    assert summed("k1", ON_POLICY).abs().max() < EXACT
    for name in ("k2", "k4", WEIGHTED):
        assert_same(summed(name, ON_POLICY), prefix_kl_gradient(POLICIES, ON_POLICY))
    assert_same(summed("k3", ON_POLICY), prefix_kl_gradient(POLICIES, ON_POLICY, reverse=False))


def test_no_estimator_in_the_loss_sees_the_effect_of_a_token_on_later_prefixes():
    """A token also chooses under which prefix the KL of the next one is paid."""
    log_pi, log_ref = (logits.log_softmax(-1) for logits in (ON_POLICY, POLICIES.ref))
    of_response = per_response((log_pi.exp() * (log_pi - log_ref)).sum(-1)[PREFIX_OF_TOKEN])
    missing = gradient_of(lambda theta: probabilities(theta) @ of_response, ON_POLICY)
    assert missing.abs().max() > 0.01
    for name in ("k2", "k4", WEIGHTED):
        assert_same(summed(name, ON_POLICY) + missing, response_kl_gradient(POLICIES))


@pytest.mark.parametrize("aggregation", DIVIDED)
def test_where_the_loss_is_divided_by_a_sampled_length_k1_has_the_gradient_of_its_inverse(aggregation):
    """So it lengthens responses, wherever the reference is; k4 has this term in addition to what k2 has."""
    of_k1, of_k2, of_k4, of_weighted = (
        minibatch_gradient(name, POLICIES, ON_POLICY, aggregation) for name in ("k1", "k2", "k4", WEIGHTED)
    )
    assert_same(of_k1, inverse_length_gradient(aggregation))
    assert cosine(-of_k1, length_gradient(ON_POLICY)) > 0.9
    assert_same(of_k4, of_k1 + of_k2)
    assert_same(of_weighted, of_k2)
    assert 0.9 < cosine(of_k2, prefix_kl_gradient(POLICIES, ON_POLICY)) < 0.9999  # near, but 1/N weighs the tokens


def test_what_k1_says_of_the_length_falls_with_the_responses_of_a_minibatch_for_token_mean_alone():
    def size(aggregation: str, responses: int) -> float:
        return float(minibatch_gradient("k1", POLICIES, ON_POLICY, aggregation, responses=responses).norm())

    alone = size("sequence_mean", 1)
    assert size("token_mean", 1) == pytest.approx(alone)
    assert size("sequence_mean", 2) == pytest.approx(alone)
    assert alone / 4 < size("token_mean", 2) < alone / 2
    assert alone / 6 < size("token_mean", 3) < alone / 3


def test_off_policy_k1_pushes_away_from_the_policy_that_sampled_and_the_reference_is_not_in_it():
    away = -sampler_kl_gradient(POLICIES, OFF_POLICY)
    assert away.abs().max() > 0.01
    assert_same(summed("k1", OFF_POLICY), away)
    elsewhere = POLICIES._replace(ref=response_policies(1).ref)
    for aggregation in AGGREGATIONS:
        ours = minibatch_gradient("k1", POLICIES, OFF_POLICY, aggregation)
        assert ours.abs().max() > 0.01
        assert_same(ours, minibatch_gradient("k1", elsewhere, OFF_POLICY, aggregation))


def test_off_policy_weighted_k3_and_k4_stay_exact_on_the_prefixes_of_the_policy_that_sampled_where_loss_is_summed():
    exact = prefix_kl_gradient(POLICIES, OFF_POLICY)
    for name in ("k4", WEIGHTED):
        assert_same(summed(name, OFF_POLICY), exact)
    for name in ("k2", "k3"):
        assert (summed(name, OFF_POLICY) - exact).norm() > 0.01 * exact.norm()
    for aggregation in DIVIDED:
        of_k4, of_weighted = (minibatch_gradient(name, POLICIES, OFF_POLICY, aggregation) for name in ("k4", WEIGHTED))
        assert (of_k4 - of_weighted).norm() > 0.1 * of_weighted.norm()  # the length, as on-policy


def reward_gradient(name: str, policies: Policies) -> Tensor:
    """Expected policy gradient of responses whose KL, summed over their tokens, is subtracted from the reward."""
    log_pi, log_ref = token_logprobs(policies.policy), token_logprobs(policies.ref)
    penalty = per_response(kl_per_token(log_pi, log_ref, estimator=name, old_logprobs=log_pi))
    weights = per_response(log_pi).exp() * penalty
    return gradient_of(lambda theta: weights @ per_response(token_logprobs(theta)), policies.policy)


def response_kl_gradient(policies: Policies) -> Tensor:
    """Of KL(pi, ref) of whole responses."""

    def kl(theta: Tensor) -> Tensor:
        log_pi = token_logprobs(theta)
        return per_response(log_pi).exp() @ per_response(log_pi - token_logprobs(policies.ref))

    return gradient_of(kl, policies.policy)


def test_in_the_reward_k3_has_the_gradient_of_the_reverse_kl_less_that_of_the_forward_kl():
    """At a token e^-d has the mean 1 whatever came before, so it acts on that token alone: -KL(ref, pi)."""
    exact = response_kl_gradient(POLICIES)
    assert_same(reward_gradient("k1", POLICIES), exact)
    assert_same(reward_gradient("k4", POLICIES), exact)
    forward = prefix_kl_gradient(POLICIES, ON_POLICY, reverse=False)
    assert_same(reward_gradient("k3", POLICIES), exact - forward)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_in_the_reward_k2_and_k3_are_of_second_order_near_the_reference_so_that_nothing_holds_the_policy(name):
    def share(distance: float) -> float:
        near = POLICIES._replace(ref=ON_POLICY + distance * (POLICIES.ref - ON_POLICY))
        return float(reward_gradient(name, near).norm() / response_kl_gradient(near).norm())

    assert share(0.01) == pytest.approx(share(0.1) / 10, rel=0.1)
    assert share(0.1) < 0.1


# --- numerics, masks, refusals ---


def test_far_apart_policies_stay_finite_and_are_still_pulled_together():
    for gap in (-1e4, -MAX_LOG_RATIO - 1, MAX_LOG_RATIO + 1, 1e4):
        for estimator in KL_ESTIMATORS:
            logprobs = torch.tensor([gap]).requires_grad_()
            penalty = kl_per_token(logprobs, torch.zeros(1), estimator=estimator, old_logprobs=torch.zeros(1))
            penalty.sum().backward()
            assert penalty.isfinite().all()
            assert logprobs.grad.isfinite().all()
            if estimator in ("k2", "k3"):
                assert math.copysign(1, float(logprobs.grad)) == math.copysign(1, gap)


def test_gradients_are_exact_up_to_the_bound():
    difference = torch.linspace(-MAX_LOG_RATIO, MAX_LOG_RATIO, 41, dtype=torch.float64).requires_grad_()
    kl_per_token(difference, torch.zeros_like(difference), estimator="k3").sum().backward()
    assert torch.allclose(difference.grad, 1 - torch.exp(-difference.detach()), rtol=1e-14, atol=0)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_outside_of_the_mask_changes_no_bit(garbage):
    mask = torch.tensor([False, True, True, False])
    clean = [torch.randn(4) for _ in range(3)]
    dirty = [torch.where(mask, x, garbage) for x in clean]
    for estimator in KL_ESTIMATORS:
        outcomes = []
        for logprobs, ref, old in (clean, dirty):
            logprobs = logprobs.clone().requires_grad_()
            value = kl_per_token(logprobs, ref, estimator=estimator, old_logprobs=old, response_mask=mask)
            value.sum().backward()
            outcomes.append((value.detach(), logprobs.grad))
        for a, b in zip(*outcomes, strict=True):
            assert torch.equal(a, b)
        assert (outcomes[0][1][~mask] == 0).all()


def test_nothing_to_measure_is_zero_with_a_zero_gradient():
    nothing, nan = torch.zeros(3, dtype=torch.bool), torch.full((3,), math.nan)
    for estimator in KL_ESTIMATORS:
        logprobs = nan.clone().requires_grad_()
        value = kl_per_token(logprobs, nan, estimator=estimator, old_logprobs=nan, response_mask=nothing)
        value.sum().backward()
        assert value.tolist() == logprobs.grad.tolist() == [0, 0, 0]


# --- the controller ---


def test_adaptive_controller_hand_numbers():
    controller = KLController(0.2, target=6.0, horizon=10_000)
    controller.update(6.6, 500)  # error 0.1: 0.2 (1 + 0.1 * 0.05)
    assert controller.coef == pytest.approx(0.2 * 1.005)
    controller.update(60.0, 500)  # error cut to 0.2
    assert controller.coef == pytest.approx(0.2 * 1.005 * 1.01)
    controller.update(0.0, 500)  # error cut to -0.2
    assert controller.coef == pytest.approx(0.2 * 1.005 * 1.01 * 0.99)
    controller.update(6.0, 500)
    assert controller.coef == pytest.approx(0.2 * 1.005 * 1.01 * 0.99)


def test_adaptive_controller_finds_the_coefficient_that_holds_the_target():
    controller = KLController(1.0, target=3.0, horizon=1000)
    for _ in range(400):
        controller.update(0.6 / controller.coef, 100)  # a run whose KL falls as the coefficient rises
    assert 0.6 / controller.coef == pytest.approx(3.0, rel=0.01)


def test_a_controller_without_a_target_keeps_its_coefficient():
    fixed = KLController(0.05)
    fixed.update(60.0, 50)
    assert fixed.coef == 0.05


def test_a_kl_that_is_not_finite_does_not_spoil_the_coefficient():
    with pytest.raises(ValueError, match="measured KL is nan"):
        KLController(0.2, target=6.0, horizon=100).update(math.nan, 1)
