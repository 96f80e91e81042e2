"""From rewards of responses to advantages and returns of tokens, against a plain loop over single sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from worlds import make_groups

from rlhf.algo.kl import AdaptiveKLController
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.step import batching
from rlhf.step.credit import assign_credit, make_controller, response_kl
from rlhf.types import ScoredRollout

GROUPS: dict[str, Any] = {"groups": 3, "samples": 3, "vocabulary": 50, "longest": 12, "seed": 1}
PLAIN = {"whiten_advantages": False, "kl_coef": 0.1, "gamma": 0.9, "lam": 0.8}


def samples_and_rows() -> tuple[list[ScoredRollout], list[dict[int, np.ndarray]]]:
    """Samples, and three random values a token: of the critic, the old policy and the reference."""
    samples = batching.flatten(make_groups(**GROUPS))
    rng = np.random.default_rng(0)
    rows = [
        {row: rng.normal(size=len(s.rollout.token_ids)).astype(np.float32) for row, s in enumerate(samples)}
        for _ in range(3)
    ]
    return samples, rows


def plain_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    advantages, following, ahead = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * ahead - values[t] + gamma * lam * following
        advantages[t], ahead = following, values[t]
    return advantages


def test_credit_of_a_step_equals_a_loop_over_single_responses_with_the_kl_at_each_token_and_the_score_at_the_last() -> (
    None
):
    samples, (values, old, ref) = samples_and_rows()
    credit = assign_credit(samples, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**PLAIN))
    for row, sample in enumerate(samples):
        mask = sample.rollout.response_mask
        rewards = -0.1 * (old[row] - ref[row])[mask].astype(np.float64)
        rewards[-1] += sample.reward
        expected = plain_gae(rewards, values[row][mask].astype(np.float64), 0.9, 0.8)
        np.testing.assert_allclose(credit.advantages[row][mask], expected, atol=1e-5)
        np.testing.assert_allclose(credit.returns[row][mask], expected + values[row][mask], atol=1e-5)
        assert not credit.advantages[row][~mask].any()


def test_with_lambda_and_gamma_1_and_values_0_each_advantage_is_the_reward() -> None:
    samples, (values, old, ref) = samples_and_rows()
    nothing = {row: np.zeros_like(v) for row, v in values.items()}
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=1.0, lam=1.0)
    credit = assign_credit(samples, nothing, old, ref, kl_coef=0.0, algo=algo)
    for row, sample in enumerate(samples):
        mask = sample.rollout.response_mask
        np.testing.assert_allclose(credit.advantages[row][mask], sample.reward, rtol=1e-6)
        assert credit.mean_advantages(samples)[row] == pytest.approx(sample.reward)


def test_advantages_are_whitened_over_the_tokens_of_the_whole_step_and_returns_are_not() -> None:
    samples, (values, old, ref) = samples_and_rows()
    raw = assign_credit(samples, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**PLAIN))
    white = assign_credit(
        samples, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**{**PLAIN, "whiten_advantages": True})
    )
    tokens = np.concatenate([white.advantages[row][s.rollout.response_mask] for row, s in enumerate(samples)])
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std() == pytest.approx(1.0, abs=1e-5)
    for row in raw.returns:
        np.testing.assert_array_equal(white.returns[row], raw.returns[row])


def test_rewards_are_clipped_before_the_kl_and_rollouts_that_are_not_trained_take_no_part() -> None:
    samples, (values, old, ref) = samples_and_rows()
    samples[0] = dataclasses.replace(samples[0], reward=100.0)
    samples[1] = dataclasses.replace(samples[1], reward=None)
    kept = {row: v for row, v in values.items() if row != 1}
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=1.0, lam=1.0, reward_clip=2.0)
    nothing = {row: np.zeros_like(v) for row, v in kept.items()}
    credit = assign_credit(samples, nothing, old, ref, kl_coef=0.0, algo=algo)
    assert credit.advantages.keys() == kept.keys()
    assert credit.mean_advantages(samples)[0] == pytest.approx(2.0)
    assert credit.mean_advantages(samples)[1] == 0.0


# --- the details of the original RLHF code, by hand: two responses of 2 tokens and 1 token after a prompt of 1 ---


def by_hand() -> tuple[list[ScoredRollout], dict[int, np.ndarray], dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Rewards 3 and -1; values, and log-probs of old policy and reference whose difference at a token is the KL."""
    (first, second) = batching.flatten(make_groups(groups=1, samples=2, vocabulary=9, longest=2, seed=0))
    samples = []
    for sample, length, reward in ((first, 3, 3.0), (second, 2, -1.0)):
        rollout = dataclasses.replace(
            sample.rollout,
            token_ids=np.zeros(length, np.int32),
            response_mask=np.arange(length) > 0,
            rollout_logprobs=np.zeros(length, np.float32),
        )
        samples.append(dataclasses.replace(sample, rollout=rollout, reward=reward))
    values = {0: np.array([np.nan, 0.5, 2.0], np.float32), 1: np.array([np.nan, 1.0], np.float32)}
    old = {0: np.array([np.nan, -1.0, -2.0], np.float32), 1: np.array([np.nan, -1.0], np.float32)}
    ref = {0: np.array([np.nan, -3.0, -1.0], np.float32), 1: np.array([np.nan, -1.5], np.float32)}
    return samples, values, old, ref


def test_what_follows_the_last_token_has_value_0_however_the_response_ended() -> None:
    samples, values, old, ref = by_hand()
    cut = dataclasses.replace(samples[1], rollout=dataclasses.replace(samples[1].rollout, finish_reason="length"))
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=0.5, lam=0.5)
    credit = assign_credit([samples[0], cut], values, old, ref, kl_coef=0.0, algo=algo)
    # The last tokens: 3 + 0.5 x 0 - 2 = 1 and -1 + 0.5 x 0 - 1 = -2. The first one: 0 + 0.5 x 2 - 0.5 + 0.25 x 1.
    np.testing.assert_allclose(credit.advantages[0], [0, 0.75, 1.0])
    np.testing.assert_allclose(credit.advantages[1], [0, -2.0])
    np.testing.assert_allclose(credit.returns[0], [0, 1.25, 3.0])  # advantage + value
    np.testing.assert_allclose(credit.returns[1], [0, -1.0])


@pytest.mark.parametrize(
    ("whitening", "rewards"),
    [
        # At kl_coef 0.5 the tokens earn -0.5 x 2, 3 + 0.5 x 1, and -1 - 0.5 x 0.5: their sum is 1.25.
        ("none", [-1.0, 3.5, -1.25]),
        # The mean is 5/12 and the variance (1 + 12.25 + 1.5625) / 3 - 25/144 = 4.764; the std 2.183.
        ("shift", [-0.649, 1.4126, -0.7636]),
        ("scale", [-0.2324, 1.8293, -0.3469]),
    ],
)
def test_token_rewards_are_whitened_with_their_kl_and_keep_their_mean_unless_it_is_shifted(
    whitening: Any, rewards: list[float]
) -> None:
    samples, values, old, ref = by_hand()
    nothing = {row: np.zeros_like(v) for row, v in values.items()}
    algo = PPOAlgoConfig(whiten_advantages=False, whiten_rewards=whitening, kl_coef=0.5, gamma=0.0, lam=0.0)
    credit = assign_credit(samples, nothing, old, ref, kl_coef=0.5, algo=algo)
    # Without a critic and with gamma 0 an advantage is the token's own reward.
    found = [*credit.advantages[0][1:], *credit.advantages[1][1:]]
    np.testing.assert_allclose(found, rewards, atol=2e-4)
    assert credit.metrics["reward/token_sum"] == pytest.approx(sum(rewards) / 2, abs=4e-4)


def test_the_score_is_clipped_and_paid_at_the_last_token_and_the_kl_is_not_clipped() -> None:
    samples, values, old, ref = by_hand()
    nothing = {row: np.zeros_like(v) for row, v in values.items()}
    algo = PPOAlgoConfig(whiten_advantages=False, reward_clip=0.75, kl_coef=0.5, gamma=0.0, lam=0.0)
    credit = assign_credit(samples, nothing, old, ref, kl_coef=0.5, algo=algo)
    np.testing.assert_allclose(credit.advantages[0], [0, -1.0, 0.75 + 0.5])
    np.testing.assert_allclose(credit.advantages[1], [0, -0.75 - 0.25])


def test_explained_variance_compares_the_returns_with_the_values_before_the_update() -> None:
    samples, values, old, ref = by_hand()
    algo = PPOAlgoConfig(gamma=1.0, lam=1.0)
    credit = assign_credit(samples, values, old, ref, kl_coef=0.0, algo=algo)
    # Returns 3, 3, -1 and values 0.5, 2, 1: errors 2.5, 1, -2 of variance 3.5; the returns' own is 32/9.
    assert credit.metrics["critic/explained_variance"] == pytest.approx(1 - 3.5 / (32 / 9), abs=1e-9)
    assert credit.metrics["critic/return"] == pytest.approx(5 / 3)


def test_the_controller_is_told_the_mean_kl_of_a_response_in_nats() -> None:
    samples, (_, old, ref) = samples_and_rows()
    expected = np.mean([(old[r] - ref[r])[s.rollout.response_mask].sum() for r, s in enumerate(samples)])
    assert response_kl(samples, old, ref) == pytest.approx(expected, rel=1e-5)


def test_the_adaptive_controller_is_made_from_its_keys() -> None:
    algo = PPOAlgoConfig(kl_coef=0.2, kl_controller="adaptive", kl_target=3.0, kl_horizon=100)
    controller = make_controller(algo)
    assert isinstance(controller, AdaptiveKLController)
    controller.update(6.0, 100)
    assert controller.coef == pytest.approx(0.2 * 1.2)
