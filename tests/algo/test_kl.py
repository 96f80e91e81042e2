"""What the KL estimators do as a loss and in the reward, proved by enumerating small softmax policies in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.algo.kl import KL_ESTIMATORS, KLController, kl_per_token
from rlhf.algo.losses import aggregate
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


def expected_loss_gradient(estimator: str, *, sampled_from: Tensor, ratio_weighted: bool = False) -> Tensor:
    """The sum over all tokens of P(token) times the gradient of its KL loss: the expectation, without sampling."""
    theta = THETA.clone().requires_grad_()
    log_old = sampled_from.log_softmax(-1)
    penalty = kl_per_token(
        theta.log_softmax(-1),
        REF.log_softmax(-1),
        estimator=estimator,
        old_logprobs=log_old,
        ratio_weighted=ratio_weighted,
    )
    (log_old.exp() * penalty).sum().backward()
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


# --- two tokens: what a loss on tokens does not see ---


def two_token_gradients(
    estimator: str, place: str, *, ratio_weighted: bool = False, later_reference: int = 7
) -> tuple[Tensor, Tensor]:
    """Expected gradients in (logits of the first token, logits of the second given the first), by enumeration.

    `later_reference` draws what the reference says of the second token.
    """
    first, second = policy(4).requires_grad_(), policy(5, V).requires_grad_()
    log_pi = torch.stack(torch.broadcast_tensors(first.log_softmax(-1)[:, None], second.log_softmax(-1)))
    ref_first, ref_second = policy(6).log_softmax(-1), policy(later_reference, V).log_softmax(-1)
    log_ref = torch.stack(torch.broadcast_tensors(ref_first[:, None], ref_second))
    probability = log_pi.sum(0).exp().detach()
    if place == "exact":
        ((log_pi.sum(0).exp()) * (log_pi - log_ref).sum(0)).sum().backward()
    else:
        penalty = kl_per_token(
            log_pi, log_ref, estimator=estimator, old_logprobs=log_pi.detach(), ratio_weighted=ratio_weighted
        )
        if place == "loss":
            (probability * penalty.sum(0)).sum().backward()
        else:
            (probability * penalty.sum(0).detach() * log_pi.sum(0)).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    return first.grad, second.grad


def test_no_estimator_in_the_loss_sees_the_effect_of_a_token_on_later_prefixes():
    exact_first, exact_second = two_token_gradients("k1", "exact")
    # What is missing: the first token chooses under which prefix the second token's KL is paid.
    first = policy(4).requires_grad_()
    log_second, log_ref_second = policy(5, V).log_softmax(-1), policy(7, V).log_softmax(-1)
    later_kl = (log_second.exp() * (log_second - log_ref_second)).sum(-1)
    (first.softmax(-1) * later_kl).sum().backward()
    for estimator, weighted in (("k2", False), ("k4", False), ("k3", True)):
        ours_first, ours_second = two_token_gradients(estimator, "loss", ratio_weighted=weighted)
        assert_same(ours_second, exact_second)
        assert_same(ours_first + first.grad, exact_first)
    assert first.grad.abs().max() > 0.01


def test_in_the_loss_the_first_token_does_not_feel_what_the_reference_says_of_the_second_and_in_the_reward_it_does():
    elsewhere = 8
    for estimator, weighted in (*((name, False) for name in KL_ESTIMATORS), ("k3", True)):
        here, _ = two_token_gradients(estimator, "loss", ratio_weighted=weighted)
        there, _ = two_token_gradients(estimator, "loss", ratio_weighted=weighted, later_reference=elsewhere)
        assert_same(here, there)
    for estimator, place in (("k1", "exact"), ("k1", "reward")):
        here, _ = two_token_gradients(estimator, place)
        there, _ = two_token_gradients(estimator, place, later_reference=elsewhere)
        assert (here - there).abs().max() > 0.01


def test_k1_in_the_loss_has_no_expected_gradient_at_any_token_of_a_sequence():
    for gradient in two_token_gradients("k1", "loss"):
        assert_same(gradient, torch.zeros_like(gradient))


def test_one_gradient_of_k1_is_not_zero_and_grows_with_the_coefficient():
    """What it adds is noise: the mean over tokens is 0 and the mean square is not."""
    log_pi, log_ref = THETA.log_softmax(-1), REF.log_softmax(-1)
    square = 0.0
    for token in range(V):
        theta = THETA.clone().requires_grad_()
        kl_per_token(theta.log_softmax(-1)[token], log_ref[token], estimator="k1").backward()
        square += float(log_pi[token].exp() * theta.grad.square().sum())
    # Of grad log pi(token) = onehot - pi: sum of pi_t (1 - 2 pi_t + |pi|^2) = 1 - |pi|^2.
    assert square == pytest.approx(float(1 - log_pi.exp().square().sum()))


def test_k1_in_the_reward_is_the_exact_gradient_of_the_sequence_kl_and_k2_and_k3_are_not():
    exact = torch.cat([part.flatten() for part in two_token_gradients("k1", "exact")])
    in_reward = {
        estimator: torch.cat([part.flatten() for part in two_token_gradients(estimator, "reward")])
        for estimator in KL_ESTIMATORS
    }
    assert_same(in_reward["k1"], exact)
    assert_same(in_reward["k4"], in_reward["k1"])
    for biased in ("k2", "k3"):
        assert (in_reward[biased] - exact).abs().max() > 0.01


# --- responses that end: a division by a sampled length ---

END, LONGEST, WORDS = 0, 3, 3
RESPONSES = [
    ids
    for length in range(1, LONGEST + 1)
    for ids in itertools.product(range(WORDS), repeat=length)
    if END not in ids[:-1] and (ids[-1] == END or length == LONGEST)
]
PREFIXES = sorted({ids[:at] for ids in RESPONSES for at in range(len(ids))})


def response_logprobs(theta: Tensor, ids: tuple[int, ...]) -> Tensor:
    rows = [PREFIXES.index(ids[:at]) for at in range(len(ids))]
    return theta.log_softmax(-1)[rows, list(ids)]


def expected_gradient_of_pairs(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Gradient of a minibatch of two responses to one prompt, over all 225 pairs of responses.

    Args:
        loss: of log-probs and reference log-probs [T] and cu_seqlens of a pair.
    """
    theta = policy(1, len(PREFIXES))[:, :WORDS].clone().requires_grad_()
    ref = policy(2, len(PREFIXES))[:, :WORDS]
    total = torch.zeros((), dtype=torch.float64)
    for pair in itertools.product(RESPONSES, repeat=2):
        logprobs, ref_logprobs = (torch.cat([response_logprobs(each, ids) for ids in pair]) for each in (theta, ref))
        cu_seqlens = torch.tensor([0, len(pair[0]), len(logprobs)])
        total = total + loss(logprobs, ref_logprobs, cu_seqlens)
    total.backward()
    return theta.grad


def expected_kl_gradient(estimator: str, aggregation: str) -> Tensor:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
        old = logprobs.detach()
        kl = kl_per_token(logprobs, ref_logprobs, estimator=estimator, old_logprobs=old)
        mask = torch.ones(len(kl), dtype=torch.bool)
        sizes = {"tokens": len(kl), "rollouts": 2, "constant_length": LONGEST}
        return old.sum().exp() * aggregate(kl, mask, cu_seqlens, cu_seqlens.diff(), aggregation=aggregation, **sizes)

    return expected_gradient_of_pairs(loss)


def test_k1_in_the_loss_has_no_expected_gradient_where_the_loss_is_summed_over_tokens():
    assert len(RESPONSES) ** 2 == 225
    assert expected_kl_gradient("k1", "constant").abs().max() < EXACT
    assert expected_kl_gradient("k2", "constant").abs().max() > 0.01


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_where_the_loss_is_divided_by_a_sampled_length_k1_has_the_gradient_of_its_inverse(aggregation):
    """So it lengthens responses, wherever the reference is; k4 has this term in addition to what k2 has."""

    def inverse_length(logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor) -> Tensor:
        lengths = cu_seqlens[-1:] if aggregation == "token_mean" else cu_seqlens.diff()
        return logprobs.sum().exp() * (1 / lengths.double()).mean()

    expected = expected_gradient_of_pairs(inverse_length)
    assert expected.abs().max() > 0.01
    assert_same(expected_kl_gradient("k1", aggregation), expected)
    assert_same(expected_kl_gradient("k4", aggregation), expected + expected_kl_gradient("k2", aggregation))


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
