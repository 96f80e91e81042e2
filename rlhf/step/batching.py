"""Groups of one training step -> minibatches, then targets: the arithmetic between the scorer and the learners.

Minibatches are drawn and denominators fixed before ranks or budgets are looked at, and long before any backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlhf.algo import advantages as adv
from rlhf.algo.kl import kl_per_token
from rlhf.algo.packing import (
    bundle_samples,
    bundle_sizes,
    draw_minibatches,
    gather,
    pack,
    pack_microbatches,
    scatter,
)
from rlhf.config.run import GRPOConfig
from rlhf.learner.messages import LearnerMinibatch, LogprobPass
from rlhf.types import (
    Denominators,
    Mean,
    Minibatch,
    PackedTokens,
    PolicyTargets,
    Rollout,
    RolloutGroup,
    ScoredRollout,
    StepMetrics,
    Sum,
    merge_metrics,
)

Rows = Mapping[int, np.ndarray]  # rollout of the step -> [L] one value a token


def flatten(groups: Sequence[RolloutGroup]) -> list[ScoredRollout]:
    """All samples of a step, group after group; the index in this list is the row of a rollout everywhere."""
    return [sample for group in groups for sample in group.samples]


def trained_rows(samples: Sequence[ScoredRollout], *, mask_truncated: bool) -> np.ndarray:
    """[B] bool, True for responses that enter the loss: not the unscorable ones, nor (if asked) the cut-off ones."""
    return np.array(
        [s.reward is not None and not (mask_truncated and s.rollout.finish_reason != "stop") for s in samples], bool
    )


def work_rows(trains: np.ndarray, advantages: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """[B] bool, True for the trained responses that the learner computes at all.

    Without a KL and an entropy bonus in the loss every gradient of a policy loss is a multiple of the advantage, so a
    response whose advantage is exactly 0 has none. It stays in the denominators. What is logged of log-probs is then of
    the others alone; `algo.log_kl` wants the KL of all responses, and so computes them.

    Args:
        advantages: [B], known before any log-prob: without a KL in the reward.
    """
    assert not (config.algo.kl_place == "reward" and config.algo.kl_coef > 0), "advantages wait for the log-probs"
    if config.algo.kl_coef > 0 or config.algo.entropy_coef or config.algo.log_kl:
        return trains
    return trains & (advantages != 0)


def plan_epochs(
    samples: Sequence[ScoredRollout],
    trains: np.ndarray,
    config: GRPOConfig,
    *,
    step: int,
    works: np.ndarray | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
) -> list[list[Minibatch]]:
    """Draw, pack and balance every minibatch of the step: [epoch][minibatch].

    The draw covers all rollouts, so it does not depend on which are left out of the loss.

    Args:
        trains: [B] bool, what the denominators count.
        works: [B] bool, what is packed and computed; null is all of `trains`.
        epochs, minibatches: passes and minibatches of one; null is what the policy takes.
    """
    works = trains if works is None else works
    minibatches = minibatches or config.learner.minibatches_per_epoch
    planned = []
    for epoch in range(epochs or config.learner.epochs_per_step):
        drawn = draw_minibatches(len(samples), minibatches=minibatches, seed=config.run.seed, step=step, epoch=epoch)
        planned.append([_minibatch(samples, rows[trains[rows]], rows[works[rows]], config) for rows in drawn])
    return planned


def _minibatch(
    samples: Sequence[ScoredRollout], counted: np.ndarray, packed: np.ndarray, config: GRPOConfig
) -> Minibatch:
    rollouts = [sample.rollout for sample in samples]
    return Minibatch(
        microbatches=tuple(
            tuple(pack(rollouts, members) for members in rank) for rank in _microbatches(rollouts, packed, config)
        ),
        denominators=Denominators(
            tokens=sum(rollouts[row].response_length for row in counted),
            sequences=sum(rollouts[row].response_length > 0 for row in counted),
        ),
    )


def _microbatches(rollouts: Sequence[Rollout], rows: np.ndarray, config: GRPOConfig) -> list[list[list[int]]]:
    """[rank][microbatch] -> rows, ordered by their tokens: what sequences begin with alike is then computed once."""
    chosen = [rollouts[row] for row in rows]
    lengths = np.array([len(rollout.token_ids) for rollout in chosen], np.int64)
    prompt_lengths = np.array([min(r.prompt_length, len(r.token_ids) - 1) for r in chosen], np.int64)
    budget, ranks = config.learner.max_tokens_per_microbatch, config.cluster.learners
    prompts = [r.token_ids[:length].tobytes() for r, length in zip(chosen, prompt_lengths, strict=True)]
    keys = {int(row): rollouts[row].token_ids.tobytes() for row in rows}
    bundles = bundle_samples(lengths, prompts, prompt_lengths, max_tokens=budget, ranks=ranks)
    sizes, costs = bundle_sizes(bundles, lengths, prompt_lengths)
    plan = pack_microbatches(sizes, max_tokens=budget, ranks=ranks, costs=costs)
    return [
        [
            sorted((int(rows[i]) for bundle in members for i in bundles[bundle]), key=lambda row: keys[row])
            for members in rank
        ]
        for rank in plan
    ]


def rows_of(minibatches: Sequence[Minibatch], by_rank: Sequence[Sequence[Sequence[LogprobPass]]], which: str) -> Rows:
    """Undo the packing: `old` or `ref` of by_rank[rank][minibatch][microbatch] -> row -> [L]."""
    found: dict[int, np.ndarray] = {}
    for rank, by_minibatch in enumerate(by_rank):
        for minibatch, passes in zip(minibatches, by_minibatch, strict=True):
            for packed, one in zip(minibatch.microbatches[rank], passes, strict=True):
                found |= gather(one.old if which == "old" else one.ref, packed)
    return found


def kl_rewards(old: Rows, ref: Rows, estimator: str) -> Rows:
    """Per-token KL of the sampling policy to the reference, for a penalty in the reward: row -> [L]."""
    return {
        row: kl_per_token(torch.from_numpy(old[row]), torch.from_numpy(ref[row]), estimator=estimator).numpy()
        for row in old
    }


def penalized_rewards(samples: Sequence[ScoredRollout], kl: Rows | None, kl_coef: float) -> np.ndarray:
    """[B] float64 rewards, minus kl_coef times the KL summed over the response where one is given; NaN: unscorable.

    Rows that `kl` lacks are not trained and their penalty is unknown: they leave the baseline of the others.
    """
    rewards = np.array([np.nan if s.reward is None else s.reward for s in samples], np.float64)
    if kl is not None:
        rewards[[row not in kl for row in range(len(samples))]] = np.nan
        for row, values in kl.items():
            mask = samples[row].rollout.response_mask
            rewards[row] -= kl_coef * float(values[mask].sum(dtype=np.float64))
    return rewards


def step_advantages(rewards: np.ndarray, groups: Sequence[RolloutGroup], kind: str) -> np.ndarray:
    """[B] advantage of each response; 0 for the unscorable. The kinds are those of `algo.advantage`."""
    tensor = torch.from_numpy(rewards)
    sizes = [len(group.samples) for group in groups]
    group_ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes))
    match kind:
        case "grpo" | "dr_grpo":
            parts = [adv.group_advantages(part, normalize_std=kind == "grpo") for part in tensor.split(sizes)]
            return torch.cat(parts).numpy()
        case "rloo":
            return torch.cat([adv.rloo_advantages(part) for part in tensor.split(sizes)]).numpy()
        case "reinforce_pp":
            return adv.reinforce_plus_plus_advantages(tensor).numpy()
        case "reinforce_pp_baseline":
            return adv.reinforce_plus_plus_advantages(tensor, group_ids).numpy()
    raise AssertionError(kind)


def learner_minibatches(
    minibatches: Sequence[Minibatch], advantages: np.ndarray | Rows, old: Rows, ref: Rows
) -> list[list[LearnerMinibatch]]:
    """One pass's work, [rank][minibatch]."""
    ranks = len(minibatches[0].microbatches)
    return [
        [
            LearnerMinibatch(
                microbatches=m.microbatches[rank],
                targets=tuple(policy_targets(packed, advantages, old, ref) for packed in m.microbatches[rank]),
                denominators=m.denominators,
            )
            for m in minibatches
        ]
        for rank in range(ranks)
    ]


def merge_ranks(by_rank: Sequence[Sequence[StepMetrics]]) -> list[StepMetrics]:
    """Metrics [rank][minibatch] -> one for each minibatch."""
    return [merge_metrics(list(parts)) for parts in zip(*by_rank, strict=True)]


def mean_over_updates(metrics: StepMetrics) -> StepMetrics:
    """A sum over the ranks of one update (the loss) becomes a mean over the updates of the step."""
    return {name: Mean(m.value(), 1.0) if isinstance(m, Sum) else m for name, m in metrics.items()}


def penalize_non_stop(sample: ScoredRollout, reward: float | None, penalty: float = 0.0) -> ScoredRollout:
    """Replace (reject) or lower the reward of a response that did not stop by itself; the unscorable stay so.

    Args:
        reward: what it gets in place of its own; None leaves its own.
        penalty: subtracted from that.
    """
    if sample.rollout.finish_reason == "stop" or sample.reward is None:
        return sample
    return dataclasses.replace(sample, reward=(sample.reward if reward is None else reward) - penalty)


def policy_targets(packed: PackedTokens, advantages: np.ndarray | Rows, old: Rows, ref: Rows) -> PolicyTargets:
    """Targets of one microbatch; a map without rows stands for log-probs that nothing reads.

    Args:
        advantages: [B] one a response, or row -> [L] one a token.
    """
    zeros = np.zeros(len(packed.token_ids), np.float32)
    return PolicyTargets(
        advantages=scatter(advantages.tolist() if isinstance(advantages, np.ndarray) else advantages, packed),
        old_logprobs=scatter(old, packed) if old else zeros,
        ref_logprobs=scatter(ref, packed) if ref else zeros,
    )
