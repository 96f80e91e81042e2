"""Memory and work of a long sequence on one learner, shared by two (`cluster.sequence_parallel`), and with tiled MLPs.

    python -m benchmarks.sequence_parallel [--quick]

Forward, loss and backward of one sequence in float32 with full or tiled gradient checkpointing, for a model of random
weights, on CPU; ranks exchange through gloo, one thread each. `peak` is the largest memory of a rank over what it has
after an update of a few tokens: model and gradients are not in it. CPU seconds are those of all ranks. The last rows
say how long a sequence two learners hold in the memory that one learner needs for the first length.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Case, Row

SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": True}  # fmt: skip
TINY = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
LENGTH, QUICK_LENGTH = 8192, 512
LAYOUTS = [  # learners, factor of the length, checkpointing
    (1, 1.0, True), (1, 1.0, "tiled"), (2, 1.0, True), (2, 1.0, "tiled"), (2, 1.8, True), (2, 2.0, True),
]  # fmt: skip
WARM_UP = 64
PROMPT_SHARE = 0.25
LIMITS = {"longer": 1.8, "cpu": 1.3}  # the least, and the most, that is aimed at


def measure(case: Case) -> Row:
    """One sequence on `ranks` learners, each a process."""
    from rlhf.learner.port import free_port

    ranks, port = case["ranks"], free_port()
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        by_rank = list(pool.map(_rank, range(ranks), [port] * ranks, [case] * ranks))
    return {
        "seconds": max(row["seconds"] for row in by_rank), "cpu_seconds": sum(row["cpu_seconds"] for row in by_rank),
        "peak_mib": max(row["peak_mib"] for row in by_rank), "loss": by_rank[0]["loss"],
    }  # fmt: skip


def _rank(rank: int, port: int, case: Case) -> Row:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.models import run_config
    from rlhf.algo.packing import pack
    from rlhf.learner.deepspeed_settings import join_world
    from rlhf.learner.packed_attention import PACKED
    from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer
    from rlhf.learner.sequence_parallel import SequenceGroup
    from rlhf.learner.update import policy_microbatch
    from rlhf.types import Denominators, PolicyTargets, World

    ranks = case["ranks"]
    world = World(rank, ranks, rank, "127.0.0.1", port, threads=1, sequence_parallel=ranks)
    device, group = join_world("cpu", world), SequenceGroup.of(world)
    torch.manual_seed(0)
    transformer: Any = Qwen2ForCausalLM(Qwen2Config(**case["shape"], max_position_embeddings=1 << 20))
    transformer.set_attn_implementation(PACKED)
    prepare_transformer(transformer, gradient_checkpointing=case["checkpointing"])
    policy = PolicyModel(transformer, temperature=1.0)
    config = run_config("nowhere", algo={"importance_correction": "none"})

    def step(length: int) -> float:
        rng = np.random.default_rng(0)
        ids = rng.integers(0, case["shape"]["vocab_size"], length).astype(np.int32)
        row = pack([ids], [np.arange(length) >= length * PROMPT_SHARE])
        advantages = rng.normal(size=length).astype(np.float32)
        targets, denominators = PolicyTargets(advantages, None, None), Denominators(int(row.response_mask.sum()), 1, 1)
        loss, _ = policy_microbatch(policy, DeviceTokens.of(row, device, group), targets, denominators, config)
        loss.backward()
        return float(loss.detach())

    step(WARM_UP)
    with harness.Peak("cpu") as peak:
        started, cpu = time.perf_counter(), time.process_time()
        loss = step(case["length"])
        row = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
    return row | {"peak_mib": peak.mib, "loss": loss}


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    length, shape = (QUICK_LENGTH, TINY) if options.quick else (LENGTH, SHAPE)
    cases = [
        {"function": "measure", "ranks": ranks, "length": int(length * factor), "shape": shape, "checkpointing": kind}
        for ranks, factor, kind in LAYOUTS
    ]
    # glibc keeps what was freed below a limit that grows; with a fixed one the peak is that of what is in use
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    rounds = [
        [harness.fresh("benchmarks.sequence_parallel", case, environment=environment) for case in cases]
        for _ in range(1 if options.quick else 3)
    ]
    rows = []
    for number, case in enumerate(cases):
        measured = [rows_of_round[number] for rows_of_round in rounds]
        rows.append({
            "learners": case["ranks"], "tokens": case["length"],
            "checkpointing": "tiled" if case["checkpointing"] == "tiled" else "full",
            "peak, MiB per learner": max(row["peak_mib"] for row in measured),
            "CPU seconds": statistics.median(row["cpu_seconds"] for row in measured),
            "seconds": statistics.median(row["seconds"] for row in measured),
            "loss": measured[0]["loss"],
        })  # fmt: skip
    # Memory grows in proportion to the length: the line through the two longer ones.
    alone, alone_tiled, halved, halved_tiled, shared, longer = rows
    slope = (longer["peak, MiB per learner"] - shared["peak, MiB per learner"]) / (longer["tokens"] - shared["tokens"])
    fits = longer["tokens"] + (alone["peak, MiB per learner"] - longer["peak, MiB per learner"]) / slope
    ratio, *work = (
        statistics.median(r[i]["cpu_seconds"] / r[j]["cpu_seconds"] for r in rounds)
        for i, j in ((2, 0), (1, 0), (3, 2))
    )
    memory = [
        tiled["peak, MiB per learner"] / full["peak, MiB per learner"]
        for tiled, full in ((alone_tiled, alone), (halved_tiled, halved))
    ]
    notes = [
        f"In the memory of one learner with {alone['tokens']:,} tokens, two hold {fits:,.0f}: "
        f"{fits / alone['tokens']:.2f} times as many (at least {LIMITS['longer']}).",
        f"CPU seconds of two learners over one, the same sequence: {ratio:.2f} (at most {LIMITS['cpu']}).",
        f"Tiled over full checkpointing, on one learner and on two: {memory[0]:.2f} and {memory[1]:.2f} of the memory, "
        f"{work[0]:.2f} and {work[1]:.2f} of the CPU seconds.",
    ]
    harness.report("sequence_parallel", "One sequence on one learner and on two", rows, options, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
