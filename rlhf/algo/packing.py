"""Sequences -> token-budget microbatches without padding, the same amount of work for every data shard.

The minibatches are drawn first, from a seeded permutation that does not depend on shards or budgets. Packing decides
only where and when a sequence is computed, never which optimizer step it belongs to.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Sequence, Sized

import numpy as np

from rlhf.algo.sizes import WHOLE_TOKENS
from rlhf.types import PackedTokens, Support

# Attention costs as much as everything else in a transformer at a length of about six times its hidden size
# (12 H^2 multiply-adds per token and layer against 2 L H): 8,192 stands for hidden sizes of 1,000 to 2,000.
QUADRATIC_LENGTH = 8192.0

FILLER_TOKENS = 2


def draw_minibatches(count: int, *, minibatches: int, seed: int, step: int, epoch: int) -> list[np.ndarray]:
    """Split rollouts 0..count-1 into minibatches by a permutation seeded by run, training step and epoch.

    Returns `minibatches` int64 arrays whose sizes differ by at most one; together every index exactly once.
    """
    order = np.random.default_rng([seed, step, epoch]).permutation(count)
    return np.array_split(order, minibatches)


def bundle_samples(
    lengths: np.ndarray, prompts: Sequence[Hashable], prompt_lengths: np.ndarray, *, max_tokens: int, shards: int
) -> list[list[int]]:
    """Bundles of samples of one prompt, units of `pack_microbatches`: a microbatch computes their prompt once.

    The responses of a bundle take at most an eighth of a microbatch, or of a shard's share where that is less, so that
    bundles fill budgets and shards nearly as well as single samples would. Returns indices into `lengths`, ascending in
    each bundle.

    Args:
        lengths: [B] int, tokens of each sequence, prompt and response.
        prompts: [B], equal for sequences whose first `prompt_lengths` [B] tokens are equal.
    """
    by_prompt: dict[Hashable, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_prompt[prompt].append(index)
    responses = lengths - prompt_lengths
    computed = int(responses.sum()) + sum(int(prompt_lengths[members[0]]) for members in by_prompt.values())
    limit = min(max_tokens, -(-computed // shards)) // 8
    bundles: list[list[int]] = []
    for members in by_prompt.values():
        prompt, taken = int(prompt_lengths[members[0]]), 0
        for number, index in enumerate(members):
            response = int(responses[index])
            if number == 0 or taken + response > min(limit, max_tokens - prompt):
                bundles.append([])
                taken = 0
            bundles[-1].append(index)
            taken += response
    return bundles


def bundle_sizes(
    bundles: Sequence[Sequence[int]], lengths: np.ndarray, prompt_lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the budget that each bundle takes, and its cost, both [bundles]: arguments of `pack_microbatches`.

    A bundle takes its computed tokens, or the tokens of its whole sequences divided by WHOLE_TOKENS if that is more:
    keys and values are held for whole sequences. The cost of attention is counted as that of whole sequences too.
    """
    saved = np.array([(len(members) - 1) * int(prompt_lengths[members[0]]) for members in bundles], np.int64)
    whole = np.array([int(lengths[members].sum()) for members in bundles], np.int64)
    costs = np.array([sequence_cost(lengths[members]).sum() for members in bundles], np.float64)
    return np.maximum(whole - saved, -(-whole // WHOLE_TOKENS)), costs - saved


def pack_microbatches(
    lengths: np.ndarray, *, max_tokens: int, shards: int, costs: np.ndarray | None = None
) -> list[list[list[int]]]:
    """Distribute the sequences of one minibatch over microbatches of at most `max_tokens` and over data shards.

    Best-fit decreasing finds how many microbatches are needed, rounded up to a multiple of `shards`. Then sequences are
    distributed again, the largest first, each to the microbatch with the least cost; if the budget is too tight for
    that, the best-fit microbatches stay. A reduction follows each microbatch, so shards compute similar costs at once.

    Args:
        lengths: [B] int, tokens of each sequence, prompt and response; or of each bundle of sequences.
        costs: [B] float; None: `sequence_cost`, for single sequences.

    Returns:
        By shard and microbatch: indices into `lengths`, ascending. Equally many microbatches for every shard, at least
        one; empty lists are fillers.

    Raises:
        ValueError: a single sequence is longer than the budget.
    """
    if len(lengths) and int(lengths.max()) > max_tokens:
        raise ValueError(
            f"learner.max_tokens_per_microbatch={max_tokens}: a sequence has {int(lengths.max())} tokens, and one "
            f"sequence is never split. Raise it to {int(lengths.max())} or more, or shorten prompts and responses."
        )
    order = np.argsort(-lengths, kind="stable")
    sizes = lengths[order].tolist()
    costs = sequence_cost(lengths.astype(np.float64)) if costs is None else costs
    packed = _best_fit(sizes, max_tokens)
    microbatches = max(1, -(-len(packed) // shards))
    spread = _spread(sizes, costs[order].tolist(), max_tokens, shards * microbatches)
    bins = packed if spread is None else spread
    bins += [[] for _ in range(shards * microbatches - len(bins))]
    return _assign_shards([sorted(order[members].tolist()) if members else [] for members in bins], costs, shards)


def sequence_cost(lengths: np.ndarray) -> np.ndarray:
    """Compute of sequences, in units of one token outside of attention: L + L^2 / QUADRATIC_LENGTH, any shape."""
    return lengths * (1 + lengths / QUADRATIC_LENGTH)


def _best_fit(sizes: list[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing; `sizes` is sorted downwards."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # room and number of each bin, sorted
    for index, size in enumerate(sizes):
        tightest = bisect_left(rooms, (size, 0))
        if tightest == len(rooms):
            room, target = max_tokens, len(bins)
            bins.append([])
        else:
            room, target = rooms.pop(tightest)
        bins[target].append(index)
        insort(rooms, (room - size, target))
    return bins


def _spread(sizes: list[int], costs: list[float], max_tokens: int, count: int) -> list[list[int]] | None:
    """Give each size, largest first, to the cheapest of `count` bins; None as soon as that bin lacks the room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [max_tokens] * count
    heap = [(0.0, target) for target in range(count)]
    for index, (size, cost) in enumerate(zip(sizes, costs, strict=True)):
        load, target = heap[0]
        if size > room[target]:
            return None
        bins[target].append(index)
        room[target] -= size
        heapq.heapreplace(heap, (load + cost, target))
    return bins


def _assign_shards(bins: list[list[int]], costs: np.ndarray, shards: int) -> list[list[list[int]]]:
    """Deal bins, costliest first, in rounds of one per shard; within a round the costliest goes to the least loaded."""
    loads_of = [float(costs[members].sum()) if members else 0.0 for members in bins]
    dealt = sorted(range(len(bins)), key=lambda index: (-loads_of[index], index))
    loads = [0.0] * shards
    result: list[list[list[int]]] = [[] for _ in range(shards)]
    for start in range(0, len(dealt), shards):
        by_load = sorted(range(shards), key=lambda shard: (loads[shard], shard))
        for shard, index in zip(by_load, dealt[start : start + shards], strict=True):
            result[shard].append(bins[index])
            loads[shard] += loads_of[index]
    return result


def pack(
    sequences: Sequence[np.ndarray],
    response_masks: Sequence[np.ndarray] | None = None,
    rollout_logprobs: Sequence[np.ndarray] | None = None,
    supports: Sequence[Support | None] | None = None,
    experts: Sequence[np.ndarray | None] | None = None,
) -> PackedTokens:
    """Put sequences of token ids one after another; each is a rollout of its own.

    Args:
        response_masks: [L] bool of each sequence; None: every token but its first.
        rollout_logprobs: [L] float32 of each sequence; None: zeros.
        supports: of each sequence; None: every token was sampled from the whole vocabulary.
        experts: [L, layers, k] of each sequence; None: they were not recorded.

    Raises:
        ValueError: a column is not as long as its sequence; it would shift against the tokens.
    """
    lengths = [len(sequence) for sequence in sequences]
    if response_masks is None:
        response_masks = [np.arange(length) > 0 for length in lengths]
    if rollout_logprobs is None:
        rollout_logprobs = [np.zeros(length, np.float32) for length in lengths]
    supports = [None] * len(lengths) if supports is None else supports
    experts = [None] * len(lengths) if experts is None else experts
    columns_of: dict[str, Sequence[Sized | None]] = {
        "response_mask": response_masks, "rollout_logprobs": rollout_logprobs, "support": supports, "experts": experts
    }  # fmt: skip
    for name, columns in columns_of.items():
        for row, (length, column) in enumerate(zip(lengths, columns, strict=True)):
            if column is not None and len(column) != length:
                raise ValueError(f"row {row}: {length} tokens, but {len(column)} values in {name}")
    return PackedTokens(
        token_ids=np.concatenate(sequences).astype(np.int32, copy=False),
        response_mask=np.concatenate(response_masks),
        rollout_logprobs=np.concatenate(rollout_logprobs).astype(np.float32, copy=False),
        cu_seqlens=np.cumsum([0, *lengths]),
        rollout_tokens=np.array([np.count_nonzero(mask) for mask in response_masks], np.int64),
        support=Support.concatenated(list(zip(supports, lengths, strict=True))),
        experts=_joined_experts(experts, lengths),
    )


def _joined_experts(experts: Sequence[np.ndarray | None], lengths: Sequence[int]) -> np.ndarray | None:
    """[T, layers, k]; None if no sequence has a record. A sequence without one has nothing sampled: any experts do."""
    like = next((recorded for recorded in experts if recorded is not None), None)
    if like is None:
        return None
    first = np.arange(like.shape[2], dtype=like.dtype)
    return np.concatenate([
        np.broadcast_to(first, (length, *like.shape[1:])) if recorded is None else recorded
        for recorded, length in zip(experts, lengths, strict=True)
    ])  # fmt: skip


def filler() -> PackedTokens:
    """Two tokens with nothing to train: their forward and backward keep the ranks in step, their gradient is 0."""
    return pack([np.zeros(FILLER_TOKENS, np.int32)], [np.zeros(FILLER_TOKENS, bool)])


def shared_beginnings(packed: PackedTokens) -> np.ndarray:
    """[S] int64, the number of leading tokens that each sequence shares with the previous sequence in the row.

    Their states are the same and are computed once. At least one token of each sequence counts as its own.
    """
    shared = np.zeros(len(packed.lengths), np.int64)
    bounds = packed.cu_seqlens.tolist()
    for i in range(1, len(shared)):
        before, start, end = bounds[i - 1 : i + 2]
        longest = min(start - before, end - start - 1)
        differs = packed.token_ids[before : before + longest] != packed.token_ids[start : start + longest]
        shared[i] = int(np.argmax(differs)) if differs.any() else longest
    return shared
