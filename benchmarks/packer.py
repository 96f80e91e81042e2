"""Packing sequences into microbatches: bins over budget, bins above the bound, balance, time.

    python -m benchmarks.packer [--quick]

Lengths are log-normal, 16 to 8,192 tokens, into a budget of 16,384, for 8 ranks. Peers: first fit (arrival order), and
Karmarkar-Karp largest differencing into as many bins as best-fit needs, which balances and does not know a budget. The
bound is the tokens over the budget, rounded up. `ours` is what a training step runs, ranks and balance included;
`ours, 1 rank` is the packing alone. All run in one process, round after round; the fastest round counts.
"""

from __future__ import annotations

import heapq
import math
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks import harness
from benchmarks.harness import Row
from rlhf.algo.packing import pack_microbatches, sequence_cost

BUDGET, RANKS, ROUNDS = 16_384, 8, 3
SINGLE = "ours, 1 rank"
Bins = list[list[int]]


def lengths_of(count: int) -> np.ndarray:
    return np.clip(np.random.default_rng(0).lognormal(6.0, 1.1, count), 16, 8192).astype(np.int64)


def ours(lengths: np.ndarray, ranks: int) -> Bins:
    return [part for rank in pack_microbatches(lengths, max_tokens=BUDGET, shards=ranks) for part in rank]


def first_fit(lengths: np.ndarray) -> Bins:
    bins: Bins = []
    rooms = np.zeros(len(lengths), np.int64)  # of the open bins
    for index, length in enumerate(lengths.tolist()):
        fitting = rooms[: len(bins)] >= length
        target = int(np.argmax(fitting)) if fitting.any() else len(bins)
        if target == len(bins):
            bins.append([])
            rooms[target] = BUDGET
        bins[target].append(index)
        rooms[target] -= length
    return bins


def karmarkar_karp(lengths: np.ndarray, count: int) -> Bins:
    """Largest differencing (Karmarkar & Karp, 1982): merge the two widest spreads, large parts with small ones."""
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for order, length in enumerate(lengths.tolist()):
        heap.append((-length, order, [(0, [])] * (count - 1) + [(length, [order])]))
    heapq.heapify(heap)
    order = len(lengths)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: part[0])
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], order, merged))
        order += 1
    return [members for _, members in heap[0][2]]


Packer = Callable[[np.ndarray], Bins]


def measured(lengths: np.ndarray, packers: dict[str, Packer], rounds: int) -> list[Row]:
    """One row per packer: its fastest round, and statistics of its bins."""
    best = dict.fromkeys(packers, math.inf)
    packed: dict[str, Bins] = {}
    for _ in range(rounds):
        for name, pack in packers.items():
            started = time.perf_counter()
            packed[name] = pack(lengths)
            best[name] = min(best[name], time.perf_counter() - started)
    return [row(name, lengths, packed[name], best[name]) for name in packers]


def row(name: str, lengths: np.ndarray, bins: Bins, seconds: float) -> Row:
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    full = [members for members in bins if members]
    costs = np.array([sequence_cost(lengths[members]).sum() for members in full])
    bound = math.ceil(lengths.sum() / BUDGET)
    return {
        "lengths": len(lengths),
        "packer": name,
        "seconds": seconds,
        "bins": len(full),
        "above the bound": len(full) / bound - 1,
        "over budget": sum(int(lengths[members].sum()) > BUDGET for members in full),
        "cost, max / mean": float(costs.max() / costs.mean()),
    }


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    rows = []
    for count in (2_048,) if options.quick else (2_048, 16_384, 100_000):
        lengths = lengths_of(count)
        packers: dict[str, Packer] = {
            f"ours, {RANKS} ranks": lambda lengths: ours(lengths, RANKS),
            SINGLE: lambda lengths: ours(lengths, 1),
        }
        if count <= 16_384:  # both grow with lengths times bins
            bins = len(ours(lengths, 1))
            packers["first fit"] = first_fit
            packers["Karmarkar-Karp"] = lambda lengths, n=bins: karmarkar_karp(lengths, n)  # type: ignore[misc]
        measurements = measured(lengths, packers, 1 if options.quick else ROUNDS)
        unit = next(row_of_packer["seconds"] for row_of_packer in measurements if row_of_packer["packer"] == SINGLE)
        rows += [row_of_packer | {"x time": row_of_packer["seconds"] / unit} for row_of_packer in measurements]
    harness.report("packer", f"lengths into bins of {BUDGET:,} tokens", rows, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
