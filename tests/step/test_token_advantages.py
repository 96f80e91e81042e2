"""From rewards of responses to advantages and returns of tokens, against a plain loop over single sequences."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from documented import check_documented
from worlds import group_of, make_groups, rollout_of

from rlhf.config.ppo import PPOAlgoConfig
from rlhf.config.teacher import TeacherConfig
from rlhf.step.advantages import (
    add_teacher_advantages,
    assign_credit,
    make_kl_controller,
    mean_over_responses,
    response_kl,
)
from rlhf.step.batch import make_batch
from rlhf.types import StepBatch

GROUPS: dict[str, Any] = {"groups": 3, "samples": 3, "vocabulary": 50, "longest": 12, "seed": 1}
PLAIN = {"whiten_advantages": False, "kl_coef": 0.1, "gamma": 0.9, "lam": 0.8}


def batch_and_columns() -> tuple[StepBatch, list[np.ndarray]]:
    """A step, and three random values per token: of the critic, the old policy and the reference."""
    batch = make_batch(make_groups(**GROUPS), mask_truncated=False)
    columns = np.random.default_rng(0).normal(size=(3, len(batch.tokens.token_ids))).astype(np.float32)
    return batch, list(columns)


def responses(batch: StepBatch) -> Iterator[np.ndarray]:
    """Of each row, where its response tokens are in a column."""
    for start, end in itertools.pairwise(batch.tokens.cu_seqlens):
        yield start + np.flatnonzero(batch.tokens.response_mask[start:end])


def plain_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    advantages, following, ahead = np.zeros(len(rewards)), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * ahead - values[t] + gamma * lam * following
        advantages[t], ahead = following, values[t]
    return advantages


def test_credit_of_a_step_equals_a_loop_over_single_responses_with_the_kl_at_each_token_and_the_score_at_the_last() -> (
    None
):
    batch, (values, old, ref) = batch_and_columns()
    credit = assign_credit(batch, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**PLAIN))
    for reward, tokens in zip(batch.rewards, responses(batch), strict=True):
        rewards = -0.1 * (old - ref)[tokens].astype(np.float64)
        rewards[-1] += reward
        expected = plain_gae(rewards, values[tokens].astype(np.float64), 0.9, 0.8)
        np.testing.assert_allclose(credit.advantages[tokens], expected, atol=1e-5)
        np.testing.assert_allclose(credit.returns[tokens], expected + values[tokens], atol=1e-5)
    assert not credit.advantages[~batch.tokens.response_mask].any()


def test_with_lambda_and_gamma_1_and_values_0_each_advantage_is_the_reward() -> None:
    batch, (values, old, ref) = batch_and_columns()
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=1.0, lam=1.0)
    credit = assign_credit(batch, np.zeros_like(values), old, ref, kl_coef=0.0, algo=algo)
    for reward, tokens in zip(batch.rewards, responses(batch), strict=True):
        np.testing.assert_allclose(credit.advantages[tokens], reward, rtol=1e-6)
    assert mean_over_responses(batch, credit.advantages) == pytest.approx(batch.rewards)


def test_advantages_are_whitened_over_the_tokens_of_the_whole_step_and_returns_are_not() -> None:
    batch, (values, old, ref) = batch_and_columns()
    raw = assign_credit(batch, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**PLAIN))
    whitening = PPOAlgoConfig(**{**PLAIN, "whiten_advantages": True})
    white = assign_credit(batch, values, old, ref, kl_coef=0.1, algo=whitening)
    tokens = white.advantages[batch.tokens.response_mask]
    assert tokens.mean() == pytest.approx(0.0, abs=1e-6)
    assert tokens.std() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_array_equal(white.returns, raw.returns)


def test_rewards_are_clipped_before_the_kl_and_rollouts_that_are_not_trained_take_no_part() -> None:
    rollouts = [sample.rollout for group in make_groups(**GROUPS) for sample in group.samples]
    batch = make_batch([group_of(rollouts, [100.0, None, *[1.0] * 7])], mask_truncated=False)
    untrained = batch.tokens.token_indices(np.array([1]))
    values = np.zeros(len(batch.tokens.token_ids), np.float32)
    values[untrained] = np.nan
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=1.0, lam=1.0, reward_clip=2.0)
    credit = assign_credit(batch, values, None, None, kl_coef=0.0, algo=algo)
    assert not credit.advantages[untrained].any()
    assert not credit.returns[untrained].any()
    assert np.isfinite([*credit.advantages, *credit.metrics.values()]).all()
    assert mean_over_responses(batch, credit.advantages) == pytest.approx([2.0, 0.0, *[1.0] * 7])


@pytest.mark.parametrize("trained", [False, True], ids=["no rollout is trained", "trained responses are empty"])
def test_a_step_without_a_token_to_train_has_no_credit_and_logs_no_nan(trained: bool) -> None:
    empty = rollout_of(np.zeros(3), np.zeros(3), finish_reason="abort")
    rollouts = [empty] if trained else [sample.rollout for group in make_groups(**GROUPS) for sample in group.samples]
    batch = make_batch([group_of(rollouts, [1.0 if trained else None] * len(rollouts))], mask_truncated=False)
    values = np.ones(len(batch.tokens.token_ids), np.float32)
    credit = assign_credit(batch, values, None, None, kl_coef=0.0, algo=PPOAlgoConfig())
    assert not credit.advantages.any()
    assert not credit.returns.any()
    assert credit.metrics == {}


# --- the details of the original RLHF code, by hand: two responses of 2 tokens and 1 token after a prompt of 1 ---


def by_hand(last: str = "stop") -> tuple[StepBatch, np.ndarray, np.ndarray, np.ndarray]:
    """Rewards 3 and -1; values, and log-probs of old policy and reference whose difference at a token is the KL."""
    nan = np.nan
    rollouts = [rollout_of(np.zeros(n), np.arange(n) > 0, finish_reason=end) for n, end in ((3, "stop"), (2, last))]
    values = np.array([nan, 0.5, 2.0, nan, 1.0], np.float32)
    old = np.array([nan, -1.0, -2.0, nan, -1.0], np.float32)
    ref = np.array([nan, -3.0, -1.0, nan, -1.5], np.float32)
    return make_batch([group_of(rollouts, [3.0, -1.0])], mask_truncated=False), values, old, ref


@pytest.mark.parametrize("last", ["stop", "length"])
def test_what_follows_the_last_token_has_value_0_however_the_response_ended(last: str) -> None:
    batch, values, old, ref = by_hand(last)
    algo = PPOAlgoConfig(whiten_advantages=False, gamma=0.5, lam=0.5)
    credit = assign_credit(batch, values, old, ref, kl_coef=0.0, algo=algo)
    # The last tokens: 3 + 0.5 x 0 - 2 = 1 and -1 + 0.5 x 0 - 1 = -2. The first one: 0 + 0.5 x 2 - 0.5 + 0.25 x 1.
    np.testing.assert_allclose(credit.advantages, [0, 0.75, 1.0, 0, -2.0])
    np.testing.assert_allclose(credit.returns, [0, 1.25, 3.0, 0, -1.0])  # advantage + value


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
    batch, values, old, ref = by_hand()
    algo = PPOAlgoConfig(whiten_advantages=False, whiten_rewards=whitening, kl_coef=0.5, gamma=0.0, lam=0.0)
    credit = assign_credit(batch, np.zeros_like(values), old, ref, kl_coef=0.5, algo=algo)
    # Without a critic and with gamma 0 an advantage is the token's own reward.
    np.testing.assert_allclose(credit.advantages[batch.tokens.response_mask], rewards, atol=2e-4)
    assert credit.metrics["reward/token_sum"] == pytest.approx(sum(rewards) / 2, abs=4e-4)


def test_explained_variance_compares_the_returns_with_the_values_before_the_update() -> None:
    batch, values, old, ref = by_hand()
    algo = PPOAlgoConfig(gamma=1.0, lam=1.0)
    credit = assign_credit(batch, values, old, ref, kl_coef=0.0, algo=algo)
    # Returns 3, 3, -1 and values 0.5, 2, 1: errors 2.5, 1, -2 of variance 3.5; the returns' own is 32/9.
    assert credit.metrics["critic/explained_variance"] == pytest.approx(1 - 3.5 / (32 / 9), abs=1e-9)
    assert credit.metrics["critic/return"] == pytest.approx(5 / 3)


@pytest.mark.parametrize("whitening", ["none", "scale"])
def test_explained_variance_is_that_of_the_sampled_return_whatever_lambda_is(whitening: Any) -> None:
    """Reimplemented with plain loops: rewards per token, their discounted sums, and both variances."""
    batch, (values, old, ref) = batch_and_columns()
    options = {**PLAIN, "gamma": 0.97, "whiten_rewards": whitening}
    credit = assign_credit(batch, values, old, ref, kl_coef=0.1, algo=PPOAlgoConfig(**options))
    rewards = -0.1 * (old - ref).astype(np.float64)
    for reward, tokens in zip(batch.rewards, responses(batch), strict=True):
        rewards[tokens[-1]] += reward
    spread = np.concatenate([rewards[tokens] for tokens in responses(batch)])
    rewards = rewards if whitening == "none" else (rewards - spread.mean()) / spread.std() + spread.mean()
    returns, guesses = [], []
    for tokens in responses(batch):
        for t in range(len(tokens)):
            returns.append(sum(0.97**i * rewards[token] for i, token in enumerate(tokens[t:])))
            guesses.append(float(values[tokens[t]]))
    errors = np.array(returns) - guesses
    assert credit.metrics["critic/explained_variance"] == pytest.approx(1 - errors.var() / np.var(returns), abs=1e-6)


def test_a_critic_that_knows_nothing_of_the_outcome_explains_nothing_though_its_own_values_are_in_its_target() -> None:
    """Right or wrong is a coin per response, and so is the critic's guess: 0 where it guesses 0.5, -1 where 0 or 1."""
    rng = np.random.default_rng(0)
    lengths, coin, guess = rng.integers(8, 32, 2000), rng.integers(0, 2, 2000), rng.integers(0, 2, 2000)
    rollouts = [rollout_of(np.zeros(n)) for n in lengths]
    batch = make_batch([group_of(rollouts, coin.astype(float).tolist())], mask_truncated=False)
    for values, expected in ((guess, -1.0), (np.full(2000, 0.5), 0.0)):
        of_tokens = np.repeat(values.astype(np.float32), lengths)
        credit = assign_credit(batch, of_tokens, None, None, kl_coef=0.0, algo=PPOAlgoConfig(gamma=1.0, lam=0.95))
        assert credit.metrics["critic/explained_variance"] == pytest.approx(expected, abs=0.1)


def test_the_controller_is_told_the_mean_kl_of_a_response_in_nats() -> None:
    batch, (_, old, ref) = batch_and_columns()
    expected = np.mean([(old - ref)[tokens].sum() for tokens in responses(batch)])
    assert response_kl(batch, old, ref) == pytest.approx(expected, rel=1e-5)
    some = dataclasses.replace(batch, trained=np.arange(9) < 2)
    of_two = np.mean([(old - ref)[tokens].sum() for tokens in itertools.islice(responses(batch), 2)])
    assert response_kl(some, old, ref) == pytest.approx(of_two, rel=1e-5)


def test_the_adaptive_controller_is_made_from_its_keys() -> None:
    algo = PPOAlgoConfig(kl_coef=0.2, kl_controller="adaptive", kl_target=3.0, kl_horizon=100)
    controller = make_kl_controller(algo, None)
    controller.update(6.0, 100)
    assert controller.coef == pytest.approx(0.2 * 1.2)


def test_a_resumed_run_goes_on_with_the_adapted_coefficient_and_a_fixed_one_follows_the_config() -> None:
    adaptive = PPOAlgoConfig(kl_coef=0.2, kl_controller="adaptive")
    assert make_kl_controller(adaptive, 0.7).coef == 0.7
    assert make_kl_controller(PPOAlgoConfig(kl_coef=0.2), 0.7).coef == 0.2


@pytest.mark.parametrize("kind", ["add", "replace"])
def test_what_a_teacher_says_is_added_to_the_advantages_of_the_reward_or_stands_alone(kind: Any) -> None:
    batch, (of_reward, old, of_teacher) = batch_and_columns()
    taught = np.arange(len(batch.trained_rows)) % 2 == 0
    settings = TeacherConfig(path="teacher", coef=0.5, reward=kind)
    of_reward = of_reward if kind == "add" else np.zeros_like(of_reward)  # as the step gives them
    advantages, metrics = add_teacher_advantages(batch, of_reward, old, of_teacher, taught, settings)
    differences = []
    for row, tokens in zip(taught, responses(batch), strict=True):
        judged = 0.5 * (of_teacher - old)[tokens] if row else 0.0
        np.testing.assert_allclose(advantages[tokens], of_reward[tokens] + judged, atol=1e-6)
        differences += (old - of_teacher)[tokens].tolist() if row else []
    assert metrics["policy/teacher_kl"] == pytest.approx(np.mean(differences))
    check_documented([metrics], logged={"teacher"})
