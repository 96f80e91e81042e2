"""Plans the optimizer steps of a training step: rows, microbatches of each data shard, denominators.

Minibatches are drawn and denominators fixed first, so neither depends on the number of shards or the token budget.
"""

from __future__ import annotations

import numpy as np

from rlhf.algo.packing import bundle_samples, bundle_sizes, draw_minibatches, pack_microbatches
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import Training
from rlhf.types import Denominators, Minibatch, StepBatch


def rows_with_gradient(batch: StepBatch, advantages: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """[B] bool, the rows of trained rollouts that can have a gradient: the learner computes only these.

    Without a KL, teacher, entropy bonus, balancing loss or loss of the user, the gradient is a multiple of the
    advantage, so a rollout whose advantage [R] is exactly 0 has no gradient. It still counts in the denominators.
    Metrics of log-probs then cover only the other rollouts; `algo.log_kl` needs all of them, so all are computed.
    """
    assert not config.kl_in_reward, "with the KL in the reward, advantages need the log-probs first"
    algo = config.algo
    other_gradient = algo.has_own_loss or algo.entropy_coef or config.learner.router_balance_coef
    if config.kl_in_loss or algo.log_kl or algo.teacher or other_gradient:
        return batch.trained_rows
    return batch.trained_rows & (advantages != 0)[batch.rollouts]


def plan_epochs(
    batch: StepBatch,
    config: GRPOConfig,
    *,
    step: int,
    rows_to_compute: np.ndarray | None = None,
    training: Training | None = None,
) -> list[list[Minibatch]]:
    """Draw, pack and balance every minibatch of the step: [epoch][minibatch].

    The draw covers all rollouts, so leaving some out of the loss does not change it. All rows of a rollout are in one
    minibatch.

    Args:
        rows_to_compute: [B] bool, the rows that are packed and computed; None: all trained rows.
        training: the number of epochs and minibatches; None: as for the policy.
    """
    rows_to_compute = batch.trained_rows if rows_to_compute is None else rows_to_compute
    training = training or config.training
    trained_tokens = batch.response_lengths * batch.trained_rows
    rollout_tokens = batch.per_rollout(trained_tokens)

    def minibatch(rollouts: np.ndarray) -> Minibatch:
        rows = batch.rows_of(rollouts)
        denominators = Denominators(
            tokens=int(rollout_tokens[rollouts].sum()),
            rollouts=int(np.count_nonzero(rollout_tokens[rollouts])),
            sequences=int(np.count_nonzero(trained_tokens[rows])),
        )
        return Minibatch(_microbatches(batch, rows[rows_to_compute[rows]], config), denominators)

    count, draws, seed = len(batch.trained), training.minibatches_per_epoch, config.run.seed
    return [
        list(map(minibatch, draw_minibatches(count, minibatches=draws, seed=seed, step=step, epoch=epoch)))
        for epoch in range(training.epochs_per_step)
    ]


def _microbatches(batch: StepBatch, rows: np.ndarray, config: GRPOConfig) -> tuple[tuple[np.ndarray, ...], ...]:
    """[shard][microbatch] -> rows, sorted by their token ids, so that shared beginnings are computed once."""
    tokens, budget, shards = batch.tokens, config.row_tokens, config.cluster.data_shards
    lengths, width = tokens.lengths[rows], tokens.token_ids.itemsize
    ids = [tokens.token_ids[tokens.cu_seqlens[row] : tokens.cu_seqlens[row + 1]].tobytes() for row in rows]
    prompt_lengths = np.minimum(batch.prompt_lengths[rows], lengths - 1)
    # A branch begins with a longer prompt; it is bundled by the part that all samples of the group begin with.
    firsts = batch.row_bounds[batch.rollouts[rows]]
    for i in np.flatnonzero(firsts != rows):
        start, count = tokens.cu_seqlens[firsts[i]], min(batch.prompt_lengths[firsts[i]], prompt_lengths[i])
        if ids[i].startswith(tokens.token_ids[start : start + count].tobytes()):
            prompt_lengths[i] = count
    prompts = [sequence[:size] for sequence, size in zip(ids, (prompt_lengths * width).tolist(), strict=True)]
    bundles = bundle_samples(lengths, prompts, prompt_lengths, max_tokens=budget, shards=shards)
    sizes, costs = bundle_sizes(bundles, lengths, prompt_lengths)
    plan = pack_microbatches(sizes, max_tokens=budget, shards=shards, costs=costs)

    def in_order(members: list[int]) -> np.ndarray:
        chosen = sorted((i for bundle in members for i in bundles[bundle]), key=ids.__getitem__)
        return rows[np.array(chosen, np.int64)]

    return tuple(tuple(in_order(members) for members in shard) for shard in plan)
