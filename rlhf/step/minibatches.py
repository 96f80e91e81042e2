"""Plans the optimizer steps of a training step: rows, microbatches of each rank, denominators.

Minibatches are drawn and denominators fixed first, so neither depends on the number of ranks or the token budget.
"""

from __future__ import annotations

import numpy as np

from rlhf.algo.packing import bundle_samples, bundle_sizes, draw_minibatches, pack_microbatches
from rlhf.config.run import GRPOConfig
from rlhf.types import Denominators, Minibatch, StepBatch


def rows_with_gradient(batch: StepBatch, advantages: np.ndarray, config: GRPOConfig) -> np.ndarray:
    """[B] bool, True for the trained responses that the learner computes at all.

    Without a KL, entropy bonus or balancing loss, the gradient is a multiple of the advantage, so a response whose
    advantage is exactly 0 has none. It stays in the denominators. Metrics of log-probs then cover only the other
    responses; `algo.log_kl` asks for the KL of all responses, so all are computed.

    Args:
        advantages: [B]; they are known before any log-prob, since the KL is not in the reward.
    """
    assert not config.kl_in_reward, "with the KL in the reward, advantages need the log-probs first"
    algo = config.algo
    if algo.kl_coef > 0 or algo.entropy_coef or algo.log_kl or config.learner.router_balance_coef:
        return batch.trained
    return batch.trained & (advantages != 0)


def plan_epochs(
    batch: StepBatch,
    config: GRPOConfig,
    *,
    step: int,
    computed: np.ndarray | None = None,
    epochs: int | None = None,
    minibatches: int | None = None,
) -> list[list[Minibatch]]:
    """Draw, pack and balance every minibatch of the step: [epoch][minibatch].

    The draw covers all rollouts, so leaving some out of the loss does not change it.

    Args:
        computed: [B] bool, the rows that are packed and computed; None: all trained rows.
        epochs, minibatches: passes, and minibatches per pass; None: those of the policy.
    """
    computed = batch.trained if computed is None else computed
    minibatches = minibatches or config.learner.minibatches_per_epoch
    planned = []
    for epoch in range(epochs or config.learner.epochs_per_step):
        drawn = draw_minibatches(
            len(batch.trained), minibatches=minibatches, seed=config.run.seed, step=step, epoch=epoch
        )
        planned.append(
            [
                Minibatch(
                    microbatches=_microbatches(batch, rows[computed[rows]], config),
                    denominators=_denominators(batch.response_lengths[rows[batch.trained[rows]]]),
                )
                for rows in drawn
            ]
        )
    return planned


def _denominators(responses: np.ndarray) -> Denominators:
    return Denominators(tokens=int(responses.sum()), sequences=int((responses > 0).sum()))


def _microbatches(batch: StepBatch, rows: np.ndarray, config: GRPOConfig) -> tuple[tuple[np.ndarray, ...], ...]:
    """[rank][microbatch] -> rows, sorted by their token ids, so that shared beginnings are computed once."""
    tokens, budget, ranks = batch.tokens, config.learner.max_tokens_per_microbatch, config.cluster.learners
    lengths = tokens.lengths[rows]
    prompt_lengths = np.minimum(batch.prompt_lengths[rows], lengths - 1)
    ids = [tokens.token_ids[tokens.cu_seqlens[row] : tokens.cu_seqlens[row + 1]].tobytes() for row in rows]
    prompt_bytes = (prompt_lengths * tokens.token_ids.itemsize).tolist()
    prompts = [sequence[:size] for sequence, size in zip(ids, prompt_bytes, strict=True)]
    bundles = bundle_samples(lengths, prompts, prompt_lengths, max_tokens=budget, ranks=ranks)
    sizes, costs = bundle_sizes(bundles, lengths, prompt_lengths)
    plan = pack_microbatches(sizes, max_tokens=budget, ranks=ranks, costs=costs)

    def in_order(members: list[int]) -> np.ndarray:
        chosen = sorted((i for bundle in members for i in bundles[bundle]), key=ids.__getitem__)
        return rows[np.array(chosen, np.int64)]

    return tuple(tuple(in_order(members) for members in rank) for rank in plan)
