"""Credit of tokens in PPO: rewards of responses and the KL -> rewards, advantages and returns a token.

    score of the response, clipped, at its last token
    - kl_coef x KL at each token                          (algo.kl_place=reward)
    -> whitened over the step, if asked
    -> GAE with the critic's values; what follows the last token has value 0
    -> advantages whitened over the step; returns are not

All of it runs on the driver, over all rollouts of a step at once, so no number of learners or budget can change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf.algo import advantages as adv
from rlhf.algo.kl import AdaptiveKLController, FixedKLController, kl_per_token
from rlhf.algo.packing import gather, scatter
from rlhf.step.batching import Rows
from rlhf.config.ppo import PPOAlgoConfig
from rlhf.learner.messages import ValueMinibatch
from rlhf.types import Minibatch, ScoredRollout, ValueTargets

KLController = FixedKLController | AdaptiveKLController


@dataclass(frozen=True)
class Credit:
    """What the updates of a step aim at, [L] a rollout, and the numbers that a log shows of it."""

    advantages: dict[int, np.ndarray]
    returns: dict[int, np.ndarray]
    metrics: dict[str, float]

    def mean_advantages(self, samples: Sequence[ScoredRollout]) -> np.ndarray:
        """[B] mean over the response tokens; 0 for rollouts that are not trained on."""
        found = np.zeros(len(samples))
        for row, values in self.advantages.items():
            mask = samples[row].rollout.response_mask
            found[row] = values[mask].mean() if mask.any() else 0.0
        return found


def make_controller(algo: PPOAlgoConfig) -> KLController:
    """The controller of kl_coef that the config asks for."""
    if algo.kl_controller == "adaptive":
        return AdaptiveKLController(init=algo.kl_coef, target=algo.kl_target, horizon=algo.kl_horizon)
    return FixedKLController(algo.kl_coef)


def response_kl(samples: Sequence[ScoredRollout], old: Rows, ref: Rows) -> float:
    """Mean over rollouts of log pi - log pi_ref summed over the response (k1): what the controller steers, nats.

    Args:
        old, ref: row -> [L], of the rollouts that are trained on; at least one.
    """
    sums = []
    for row, values in old.items():
        mask = samples[row].rollout.response_mask
        sums.append(float((values[mask] - ref[row][mask]).sum(dtype=np.float64)))
    return float(np.mean(sums))


def assign_credit(
    samples: Sequence[ScoredRollout], values: Rows, old: Rows, ref: Rows, *, kl_coef: float, algo: PPOAlgoConfig
) -> Credit:
    """Token rewards, GAE and whitening over all rollouts that are trained on, which are the rows of `values`.

    Args:
        values: row -> [L], the critic's values before the first update of the step.
        old, ref: row -> [L] log-probs; read where the KL is part of the reward.
        kl_coef: of the controller; 0 where the KL is not part of the reward.
    """
    rows = sorted(values)
    if not rows:
        return Credit({}, {}, {})
    rollouts = [samples[row].rollout for row in rows]
    mask = torch.from_numpy(np.concatenate([rollout.response_mask for rollout in rollouts]))
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    cu_seqlens = torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=torch.int32)
    scores = torch.tensor([_score(samples[row], algo.reward_clip) for row in rows], dtype=torch.float64)
    flat_values = _flat(values, rows)
    penalties = torch.zeros_like(flat_values)
    if kl_coef > 0:
        penalties = kl_coef * kl_per_token(
            _flat(old, rows), _flat(ref, rows), estimator=algo.kl_estimator, response_mask=mask
        )
    rewards = adv.token_rewards(scores, penalties, mask, cu_seqlens)
    if algo.whiten_rewards != "none":
        rewards = adv.whiten(rewards, mask, shift_mean=algo.whiten_rewards == "shift")
    found = adv.gae(rewards, flat_values, mask, cu_seqlens, gamma=algo.gamma, lam=algo.lam)
    advantages = adv.whiten(found.advantages, mask) if algo.whiten_advantages else found.advantages
    metrics = {
        "critic/return": float(found.returns[mask].mean()),
        "critic/return_std": float(found.returns[mask].std(correction=0)),
        "policy/advantage_raw_std": float(found.advantages[mask].std(correction=0)),
        "reward/token_sum": float(rewards[mask].sum() / len(rows)),
    }
    explained = adv.explained_variance(flat_values, found.returns, mask)
    if np.isfinite(explained):
        metrics["critic/explained_variance"] = explained
    return Credit(_split(advantages, rows, lengths), _split(found.returns, rows, lengths), metrics)


def _score(sample: ScoredRollout, clip: float | None) -> float:
    assert sample.reward is not None, "an unscorable rollout is not trained on"
    return sample.reward if clip is None else min(max(sample.reward, -clip), clip)


def _flat(values: Rows, rows: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([values[row] for row in rows])).double()


def _split(flat: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> dict[int, np.ndarray]:
    parts = flat.float().split(list(lengths))
    return {row: part.numpy() for row, part in zip(rows, parts, strict=True)}


# --- the critic's work ---


def value_rows(
    minibatches: Sequence[Minibatch], by_rank: Sequence[Sequence[Sequence[np.ndarray]]]
) -> dict[int, np.ndarray]:
    """Undo the packing of by_rank[rank][minibatch][microbatch] [T] -> row -> [L]."""
    found: dict[int, np.ndarray] = {}
    for rank, by_minibatch in enumerate(by_rank):
        for minibatch, passes in zip(minibatches, by_minibatch, strict=True):
            for packed, values in zip(minibatch.microbatches[rank], passes, strict=True):
                found |= gather(values, packed)
    return found


def value_minibatches(
    minibatches: Sequence[Minibatch], values: Rows, returns: Mapping[int, np.ndarray]
) -> list[list[ValueMinibatch]]:
    """One pass's work of the critic, [rank][minibatch]."""
    ranks = len(minibatches[0].microbatches)
    return [
        [
            ValueMinibatch(
                microbatches=m.microbatches[rank],
                targets=tuple(
                    ValueTargets(scatter(values, packed), scatter(returns, packed)) for packed in m.microbatches[rank]
                ),
                denominators=m.denominators,
            )
            for m in minibatches
        ]
        for rank in range(ranks)
    ]
