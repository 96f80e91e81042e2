"""From rewards of responses to advantages and returns of tokens, against a plain loop over single sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from worlds import make_groups

from rlhf import batching
from rlhf.algo.kl import AdaptiveKLController
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.credit import assign_credit, make_controller, response_kl
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
