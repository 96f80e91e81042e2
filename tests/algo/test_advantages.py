"""Group-relative advantages, GAE and whitening (rlhf/algo/advantages.py)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf.algo.advantages import (
    advantages_by_name,
    distillation_advantages,
    explained_variance,
    gae,
    group_advantages,
    maximum_likelihood_advantages,
    reinforce_plus_plus_advantages,
    rloo_advantages,
    token_rewards,
    whiten,
)
from rlhf.algo.losses import policy_loss

NAN = math.nan


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def grpo(*rewards: float) -> list[float]:
    return group_advantages(torch.tensor(rewards), normalize_std=True).tolist()


# --- groups ---


def test_grpo_and_dr_grpo_hand_numbers():
    # mean 1, deviations -1, 1, 1, -1; std with n - 1 is sqrt(4/3).
    assert grpo(0, 2, 2, 0) == pytest.approx([-(0.75**0.5), 0.75**0.5, 0.75**0.5, -(0.75**0.5)])
    assert group_advantages(torch.tensor([0.0, 2, 2, 0]), normalize_std=False).tolist() == [-1, 1, 1, -1]


def test_equal_rewards_give_exactly_zero_although_their_float32_std_does_not():
    rewards = torch.full((8,), 0.1)
    assert rewards.std() > 0
    assert group_advantages(rewards, normalize_std=True).tolist() == [0.0] * 8
    assert group_advantages(rewards, normalize_std=False).tolist() == [0.0] * 8
    assert rloo_advantages(rewards).tolist() == [0.0] * 8
    assert maximum_likelihood_advantages(rewards).tolist() == [0.0] * 8
    assert reinforce_plus_plus_advantages(rewards).tolist() == [0.0] * 8


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ([0.1 + 0.2, 0.3, 0.3], True),
        ([1.1 - 1.0, 0.1], True),
        ([0.1 + 0.2 - 0.3, 0.0, NAN], True),  # the parts that cancel were large
        ([sum([0.01] * 100), 1.0, sum([1e-4] * 10_000)], True),
        ([1e6 * (0.1 + 0.2), 3e5], True),
        ([-0.7 - 0.1, -0.8], True),
        ([0.3, 0.3 + 1e-9], False),
        ([1e-6, 2e-6, 0.0], False),
        ([1e6, 1e6 + 1e-3], False),
    ],
)
def test_rewards_that_differ_by_rounding_alone_are_equal(rewards: list[float], equal: bool):
    given = torch.tensor(rewards, dtype=torch.float64)
    group = torch.zeros(len(rewards), dtype=torch.long)
    kinds = [*KINDS, "maxrl"] if not given.min() < 0 else KINDS
    for kind in kinds:
        for lengths in (None, group + 3):
            advantages = advantages_by_name(kind, given, group, lengths=lengths)
            assert (advantages.tolist() == [0.0] * len(rewards)) == equal, kind
    penalty = torch.arange(len(rewards)) * 2e-3
    with_penalty = advantages_by_name("grpo", given - penalty, group, rewards_before_kl=given)
    assert (with_penalty.abs().max() < 1e-2) == equal  # only the penalties differ: no std divides them
    values, everything = torch.randn(len(rewards), dtype=torch.float64), ~given.isnan()
    assert math.isnan(explained_variance(values, given, everything)) == equal


def test_a_group_of_one_has_no_advantage():
    one = torch.tensor([3.0])
    for advantages in (grpo(3.0), rloo_advantages(one).tolist(), maximum_likelihood_advantages(one).tolist()):
        assert advantages == [0]
    assert reinforce_plus_plus_advantages(torch.tensor([3.0])).tolist() == [0]
    assert reinforce_plus_plus_advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0]


def test_an_unscorable_response_leaves_the_baseline_and_gets_zero():
    assert grpo(0, NAN, 1, NAN, 1) == pytest.approx([-1.1547, 0, 0.57735, 0, 0.57735], abs=1e-5)
    assert rloo_advantages(torch.tensor([1, NAN, 0])).tolist() == [1, 0, -1]
    assert maximum_likelihood_advantages(torch.tensor([1, NAN, 0])).tolist() == [1, 0, -1]
    assert maximum_likelihood_advantages(torch.tensor([NAN, NAN])).tolist() == [0, 0]
    assert grpo(NAN, NAN) == [0, 0]
    assert grpo(NAN, 1) == [0, 0]
    assert grpo(NAN, 1, 1) == [0, 0, 0]


def test_a_tiny_spread_is_not_blown_up():
    rewards = torch.tensor([1.0, 1.0 + 2**-23])
    for advantages in (
        group_advantages(rewards, normalize_std=True),
        rloo_advantages(rewards),
        reinforce_plus_plus_advantages(rewards),
        reinforce_plus_plus_advantages(rewards, torch.tensor([4, 4])),
        whiten(rewards, torch.ones(2, dtype=torch.bool)),
    ):
        assert 0 < advantages.abs().max() < 0.1


def test_an_unscorable_response_is_left_out_of_the_batch_as_of_the_group():
    groups = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    with_nan = torch.tensor([0.0, 3, NAN, 1, 2, NAN, NAN])
    kept = ~with_nan.isnan()
    for ids in (None, groups):
        advantages = reinforce_plus_plus_advantages(with_nan, ids)
        alone = reinforce_plus_plus_advantages(with_nan[kept], None if ids is None else ids[kept])
        assert advantages[~kept].tolist() == [0, 0, 0]
        assert torch.equal(advantages[kept], alone)
    assert reinforce_plus_plus_advantages(torch.full((2,), NAN), torch.tensor([0, 0])).tolist() == [0, 0]


# --- a KL in the reward ---

KINDS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline")


def with_kl(kind: str, rewards: Tensor, kl: Tensor, beta: float, *, lengths: Tensor | None = None) -> Tensor:
    groups = torch.arange(len(rewards)) // 8
    return advantages_by_name(kind, rewards - beta * kl, groups, rewards_before_kl=rewards, lengths=lengths)


@pytest.mark.parametrize("beta", [1e-2, 1e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_get_minus_beta_times_the_centred_kl_whatever_the_advantage_divides_by(kind, beta):
    rewards, kl = torch.ones(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64) * 0.5  # nats per response
    divided = group_advantages(rewards - beta * kl, normalize_std=True)
    assert divided.abs().mean() > 0.5  # what any beta would become
    advantages = with_kl(kind, rewards, kl, beta)
    expected = beta * (kl.mean() - kl) * (8 / 7 if kind == "rloo" else 1)
    assert torch.allclose(advantages, expected, rtol=1e-6, atol=0)
    assert advantages.abs().mean() < beta
    assert with_kl(kind, rewards, kl, 0.0).tolist() == [0.0] * 8
    if kind.startswith("reinforce"):
        lengths = torch.arange(1, 9)
        by_token = with_kl(kind, rewards, kl, beta, lengths=lengths)
        mean = (lengths * kl).sum() / lengths.sum()
        assert torch.allclose(by_token, beta * (mean - kl), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_is_not_tied_has_the_same_bits_next_to_one_that_is(kind):
    kl = torch.randn(16, dtype=torch.float64)
    rewards = torch.tensor([1.0] * 8 + [0, 1, 0, 0, 1, 1, 0, 1], dtype=torch.float64)
    advantages = with_kl(kind, rewards, kl, 0.1)
    without_ties = advantages_by_name(kind, rewards - 0.1 * kl, torch.arange(16) // 8)
    assert torch.equal(advantages[8:], without_ties[8:])
    if kind == "grpo":
        assert without_ties[:8].abs().mean() > 0.5
        assert torch.equal(advantages[:8], group_advantages((rewards - 0.1 * kl)[:8], normalize_std=False))
    else:
        assert torch.equal(advantages, without_ties)  # a std of the step has rewards that differ in it


def test_a_tiny_beta_changes_nothing_where_half_of_the_groups_are_tied():
    rewards = torch.tensor([1.0] * 8 + [0, 1, 0, 0, 1, 1, 0, 1] + [0.0] * 8 + [0, 0, 0, 1, 0, 0, 0, 0]).double()
    kl = torch.randn(32, dtype=torch.float64)
    for kind in KINDS:
        assert (with_kl(kind, rewards, kl, 1e-5) - with_kl(kind, rewards, kl, 0.0)).abs().max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_that_is_not_in_the_baseline_does_not_untie_a_group(kind):
    """Unscorable itself, or its KL is not known: NaN once the KL is subtracted, whatever its reward is."""
    kl = torch.randn(8, dtype=torch.float64)
    for left_out in ((NAN, 0.0), (0.0, NAN)):
        rewards = torch.ones(8, dtype=torch.float64)
        rewards[3], kl[3] = left_out
        advantages = with_kl(kind, rewards, kl, 1e-4)
        assert advantages[3] == 0
        assert 0 < advantages.abs().max() < 1e-3
    unscorable = torch.full((8,), NAN, dtype=torch.float64)
    assert with_kl(kind, unscorable, torch.zeros(8), 1e-4).tolist() == [0.0] * 8


# --- what the expected gradient of each is, by enumeration ---


REWARDS = (0.0, 1.0, 0.25)


def expected_gradients(
    advantages_of: object, *, samples: int, rewards: tuple[float, ...] = REWARDS
) -> tuple[Tensor, Tensor]:
    """(E[mean of A_i grad log pi(y_i)], gradient of the expected reward) of a softmax over 3 answers, float64."""
    theta = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64)
    reward = torch.tensor(rewards, dtype=torch.float64)
    probability = theta.softmax(0)
    score = torch.eye(3, dtype=torch.float64) - probability  # [answer, parameter] gradient of log pi(answer)
    mean = torch.zeros(3, dtype=torch.float64)
    for answers in torch.cartesian_prod(*[torch.arange(3)] * samples):
        advantages = advantages_of(reward[answers])  # type: ignore[operator]
        mean += probability[answers].prod() * (advantages[:, None] * score[answers]).mean(0)
    return mean, (probability * reward) @ score


def test_rloo_is_unbiased_dr_grpo_up_to_its_factor_and_dividing_by_the_std_is_neither():
    samples = 3
    rloo, exact = expected_gradients(rloo_advantages, samples=samples)
    assert (rloo - exact).abs().max() < 1e-12
    dr_grpo, _ = expected_gradients(lambda r: group_advantages(r, normalize_std=False), samples=samples)
    assert (dr_grpo - exact * (samples - 1) / samples).abs().max() < 1e-12
    grpo_mean, _ = expected_gradients(lambda r: group_advantages(r, normalize_std=True), samples=samples)
    assert 1 - torch.cosine_similarity(grpo_mean, exact, dim=0) > 1e-3


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_maxrl_has_the_gradient_of_the_log_of_the_pass_rate_up_to_its_order(samples):
    right = (0.0, 1.0, 1.0)
    ours, of_pass_rate = expected_gradients(maximum_likelihood_advantages, samples=samples, rewards=right)
    theta = torch.tensor([0.3, -0.5, 0.1], dtype=torch.float64, requires_grad=True)
    failure = theta.softmax(0)[0]
    (exact,) = torch.autograd.grad(-sum(failure**k / k for k in range(1, samples)), theta)  # type: ignore[arg-type]
    assert (ours - exact).abs().max() < 1e-12
    if samples == 2:
        assert (ours - of_pass_rate).abs().max() < 1e-12  # the first term alone


def test_maxrl_hand_numbers_and_rewards_that_it_cannot_divide_by():
    assert maximum_likelihood_advantages(torch.tensor([1.0, 0, 0, 0])).tolist() == [3, -1, -1, -1]
    assert maximum_likelihood_advantages(torch.tensor([1.0, 1, 1, 0])).tolist() == pytest.approx([1 / 3] * 3 + [-1])
    assert maximum_likelihood_advantages(torch.zeros(4)).tolist() == [0] * 4
    with pytest.raises(ValueError, match=r"maxrl: a reward is -0\.5.*dr_grpo"):
        maximum_likelihood_advantages(torch.tensor([1.0, -0.5]))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=16), st.integers(-3, 3))
def test_group_advantages_sum_to_zero_and_ignore_a_shift(rewards, shift):
    scores = torch.tensor(rewards, dtype=torch.float64)
    for normalize_std in (True, False):
        advantages = group_advantages(scores, normalize_std=normalize_std)
        assert abs(float(advantages.sum())) < 1e-9
        assert torch.allclose(group_advantages(scores + shift, normalize_std=normalize_std), advantages, atol=1e-9)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 4.0, 7.0, 0.0], dtype=torch.float64)
    others = [(rewards.sum() - reward) / 3 for reward in rewards]
    assert rloo_advantages(rewards).tolist() == pytest.approx(
        [float(r - o) for r, o in zip(rewards, others, strict=True)]
    )


def test_reinforce_plus_plus_normalizes_over_the_batch_not_the_group():
    rewards = torch.tensor([0.0, 0, 1, 1, NAN])
    # mean 0.5, std with n - 1 sqrt(1/3)
    assert reinforce_plus_plus_advantages(rewards).tolist() == pytest.approx(
        [-math.sqrt(0.75)] * 2 + [math.sqrt(0.75)] * 2 + [0], abs=1e-5
    )
    # Within the groups {0, 0} and {1, 1} there is nothing to learn.
    groups = torch.tensor([0, 0, 1, 1, 1])
    assert reinforce_plus_plus_advantages(rewards, groups).tolist() == [0] * 5


def test_reinforce_plus_plus_baseline_divides_all_groups_by_one_std():
    rewards = torch.tensor([0.0, 2, 5, 5, 1, 1.5])
    groups = torch.tensor([7, 7, 3, 3, 5, 5])
    centered = torch.tensor([-1, 1, 0, 0, -0.25, 0.25])
    advantages = reinforce_plus_plus_advantages(rewards, groups)
    assert torch.allclose(advantages, centered / centered.std(), atol=1e-5)
    assert advantages[2:4].tolist() == [0, 0]


def test_reinforce_plus_plus_over_tokens_counts_a_response_as_often_as_it_has_tokens():
    """Wrong answers of twice the length: +1 and -1 become sqrt(2) and -sqrt(1/2), by hand and by listing the tokens."""
    rewards, lengths = torch.tensor([1.0, 0, 1, 0] * 64), torch.tensor([5, 10] * 128)
    by_response = reinforce_plus_plus_advantages(rewards)
    assert by_response[:2].tolist() == pytest.approx([1.0, -1.0], abs=3e-3)  # n - 1
    by_token = reinforce_plus_plus_advantages(rewards, lengths=lengths)
    assert by_token[:2].tolist() == pytest.approx([math.sqrt(2), -math.sqrt(0.5)], abs=1e-5)
    tokens = rewards.repeat_interleave(lengths)
    listed = (tokens - tokens.mean()) / tokens.std(correction=0)
    assert torch.allclose(by_token.repeat_interleave(lengths), listed, atol=1e-5)


def test_reinforce_plus_plus_baseline_over_tokens_subtracts_the_mean_of_the_batch_after_that_of_the_group():
    rewards, lengths = torch.tensor([1.0, 0, 1, 1, NAN, 5]), torch.tensor([1, 3, 2, 2, 9, 0])
    advantages = reinforce_plus_plus_advantages(rewards, torch.tensor([0, 0, 1, 1, 1, 2]), lengths=lengths)
    # Differences 0.5, -0.5, 0, 0 at 1, 3, 2 and 2 of 8 tokens: mean -1/8, variance 1/8 - 1/64 = 7/64.
    expected = [(0.5 + 1 / 8) / math.sqrt(7 / 64), (-0.5 + 1 / 8) / math.sqrt(7 / 64), *[1 / 8 / math.sqrt(7 / 64)] * 2]
    assert advantages.tolist() == pytest.approx([*expected, 0, 0], abs=1e-5)
    equal = torch.full((4,), 0.1)
    assert reinforce_plus_plus_advantages(equal, lengths=torch.tensor([1, 2, 3, 4])).tolist() == [0] * 4
    nothing = reinforce_plus_plus_advantages(torch.tensor([1.0, 2.0]), lengths=torch.tensor([0, 0]))
    assert nothing.tolist() == [0, 0]


# --- GAE ---


def gae_of_one_response(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, one response at a time: A_t = sum over l of (gamma lam)^l delta_{t+l}."""
    following = [*values, 0.0][1:]
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, following, strict=True)]
    return [sum((gamma * lam) ** lag * delta for lag, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_gae_on_a_packed_row_with_holes_is_the_plain_sum_over_each_response(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    rewards, values = torch.randn(2, total, generator=generator, dtype=torch.float64)
    mask = torch.rand(total, generator=generator) < 0.7
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    ours = gae(rewards, values, mask, bounds.int(), gamma=gamma, lam=lam)
    expected = torch.zeros(total, dtype=torch.float64)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        members = torch.arange(start, end)[mask[start:end]]
        expected[members] = torch.tensor(
            gae_of_one_response(rewards[members].tolist(), values[members].tolist(), gamma, lam), dtype=torch.float64
        )
    assert torch.allclose(ours.advantages, expected, atol=1e-10)
    assert torch.allclose(ours.returns, torch.where(mask, expected + values, 0.0), atol=1e-10)


def test_gae_hand_numbers_across_a_hole():
    # Response tokens 1 and 3: delta_3 = 1 - 0.5, delta_1 = 0 + 0.9 * 0.5 - 0.2, A_1 = delta_1 + 0.9 * 0.8 * delta_3.
    ours = gae(
        torch.tensor([9.0, 0, 9, 1]),
        torch.tensor([9.0, 0.2, 9, 0.5]),
        torch.tensor([False, True, False, True]),
        torch.tensor([0, 4]),
        gamma=0.9,
        lam=0.8,
    )
    assert ours.advantages.tolist() == pytest.approx([0, 0.25 + 0.72 * 0.5, 0, 0.5])
    assert ours.returns.tolist() == pytest.approx([0, 0.45 + 0.72 * 0.5, 0, 1.0])


def test_without_discount_and_critic_the_advantage_is_the_reward_to_go():
    rewards = torch.tensor([5.0, 0, 0, 1, 2, 3])
    mask = torch.tensor([False, True, True, True, True, True])
    ours = gae(rewards, torch.zeros(6), mask, torch.tensor([0, 4, 6]), gamma=1.0, lam=1.0)
    assert ours.advantages.tolist() == [0, 1, 1, 1, 5, 3]
    assert torch.equal(ours.returns, ours.advantages)


def test_gae_of_nothing_is_nothing():
    empty = gae(torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.bool), torch.tensor([0, 2, 3]), gamma=1, lam=1)
    assert empty.advantages.tolist() == empty.returns.tolist() == [0, 0, 0]


# --- rewards of tokens, quality of the critic ---


def test_the_score_is_paid_at_the_last_response_token_and_the_kl_at_each():
    # Segments: response tokens 1 and 2 before a hole at the end; none at all; token 6.
    mask = torch.tensor([False, True, True, False, False, False, True])
    penalties = torch.tensor([NAN, 0.1, 0.2, NAN, NAN, NAN, 0.3])
    rewards = token_rewards(torch.tensor([1.0, NAN, 2.0]), penalties, mask, torch.tensor([0, 4, 5, 7]))
    assert rewards.tolist() == pytest.approx([0, -0.1, 0.8, 0, 0, 0, 1.7])


def test_explained_variance_of_a_perfect_a_constant_and_a_harmful_critic():
    returns, mask = torch.tensor([1.0, 2, 3, NAN]), torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 7.0), returns, mask) == pytest.approx(0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))
    assert math.isnan(explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)))


# --- whitening and garbage ---


def test_whitening_gives_mean_zero_and_variance_one_or_keeps_the_mean():
    x, mask = torch.tensor([1.0, 100, 3, 5]), torch.tensor([True, False, True, True])
    scale = math.sqrt(8 / 3)
    assert whiten(x, mask).tolist() == pytest.approx([-2 / scale, 0, 0, 2 / scale])
    assert whiten(x, mask, shift_mean=False).tolist() == pytest.approx([3 - 2 / scale, 0, 3, 3 + 2 / scale])


def test_whitening_equal_values_or_nothing_is_finite():
    assert whiten(torch.full((4,), 0.5), torch.ones(4, dtype=torch.bool)).tolist() == [0, 0, 0, 0]
    assert whiten(torch.full((4,), NAN), torch.zeros(4, dtype=torch.bool)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf, 1e30])
def test_garbage_outside_of_the_mask_changes_no_bit(garbage):
    mask = torch.rand(30, generator=torch.Generator().manual_seed(0)) < 0.5
    rewards, values = torch.randn(2, 30)
    cu_seqlens = torch.tensor([0, 11, 11, 30])

    def outcome(rewards: Tensor, values: Tensor) -> list[Tensor]:
        return [*gae(rewards, values, mask, cu_seqlens, gamma=0.9, lam=0.9), whiten(values, mask)]

    clean = outcome(rewards, values)
    dirty = outcome(torch.where(mask, rewards, garbage), torch.where(mask, values, garbage))
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))


# --- teachers ---


def test_the_expected_gradient_of_distillation_is_that_of_the_reverse_kl_times_its_coefficient():
    """By enumeration: each token of a softmax policy counts with its probability, as sampling would give it."""
    theta, of_teacher = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64).log_softmax(-1)
    sampled, exact = theta.clone().requires_grad_(), theta.clone().requires_grad_()
    log_pi = sampled.log_softmax(-1)
    old = log_pi.detach()
    advantages = distillation_advantages(old, of_teacher, coef=0.7)
    terms = policy_loss(
        log_pi.flatten(), old_logprobs=old.flatten(), advantages=advantages.flatten(),
        response_mask=torch.ones(15, dtype=torch.bool), clip_low=0.2, clip_high=0.2,
    )  # fmt: skip
    (old.exp().flatten() * terms.loss).sum().backward()
    log_pi = exact.log_softmax(-1)
    (0.7 * log_pi.exp() * (log_pi - of_teacher)).sum().backward()
    assert (sampled.grad - exact.grad).abs().max() < 1e-12
    assert exact.grad.abs().max() > 0.01
