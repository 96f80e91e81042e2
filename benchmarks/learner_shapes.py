"""Tokens per second and MFU of one microbatch of the update at the shapes of Qwen2.5, next to the account of roofline.

    python -m benchmarks.learner_shapes [--device cuda] [--quick]

Forward, loss and backward of 16,384 tokens in bf16 with random weights, in sequences of 512 and of 4,096, for each kind
of gradient checkpointing; half of the tokens, then a quarter, where that does not fit, and the row says so. MFU counts
the model's FLOPs (no recomputation) over the peak of an H100's data sheet; `account` is what benchmarks.roofline says
of sequences of 4,096. No optimizer. Also the ceilings of the device: a copy, and one large product.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from typing import Any

import numpy as np

from benchmarks import harness, roofline
from benchmarks.harness import Case, Row

SIZES = ["1.5B", "3B", "7B"]
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
CHECKPOINTING = {"off": False, "selective": "selective", "full": True}
LENGTHS = [512, 4096]
TIMED = 3


def ceilings(case: Case) -> Row:
    """A copy within the device's memory, bytes read and written, and a square product in bf16."""
    import torch

    device, side = case["device"], case["side"]
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.empty(case["bytes"] // 4, device=device).normal_()
    target = torch.empty_like(source)

    def fastest(run: Any) -> float:
        seconds = []
        for _ in range(6):  # the first warms up
            harness.synchronize(device)
            started = time.perf_counter()
            run()
            harness.synchronize(device)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    return {
        "copy, GB/s": 2 * source.nbytes / fastest(lambda: target.copy_(source)) / 1e9,
        "product, TFLOP/s": 2 * side**3 / fastest(lambda: a @ b) / 1e12,
    }


def measure(case: Case) -> Row:
    """All rows of one size of model, in one process that has imported and compiled."""
    import torch

    device = torch.device(case["device"])
    rows: list[Row] = []
    for name, length in itertools.product(case["checkpointing"], case["lengths"]):
        for tokens in (case["tokens"], case["tokens"] // 2, case["tokens"] // 4):
            row = {"model": case["size"], "checkpointing": name, "sequence": length, "tokens": tokens}
            try:
                measured = _microbatch(case, name, length, tokens, device)
            except torch.OutOfMemoryError:
                measured = {"tokens/s": "out of memory"}
            rows.append(row | measured)
            gc.collect()  # the model before it, whose kernels make cycles
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if "ms" in measured:
                break
    return {"rows": rows}


def _microbatch(case: Case, checkpointing: str, length: int, tokens: int, device: Any) -> Row:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from benchmarks.models import run_config
    from rlhf.learner.packed_attention import PACKED
    from rlhf.learner.policy_model import DeviceTokens, PolicyModel, prepare_transformer
    from rlhf.learner.update import policy_microbatch
    from rlhf.step.batch import broadcast_to_tokens, make_batch
    from rlhf.step.minibatches import plan_epochs
    from rlhf.types import PolicyTargets, Prompt, Rollout, RolloutGroup, ScoredRollout, TokenSequence

    shape = case["shape"]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        transformer: Any = Qwen2ForCausalLM(Qwen2Config(**shape, max_position_embeddings=32768))
    torch.set_default_dtype(torch.float32)
    transformer.set_attn_implementation(PACKED)
    prepare_transformer(transformer, gradient_checkpointing=CHECKPOINTING[checkpointing])
    policy = PolicyModel(transformer, temperature=1.0)
    rng = np.random.default_rng(0)
    prompt = length - int(length * roofline.RESPONSE_SHARE)
    samples = []
    for i in range(tokens // length):
        ids = rng.integers(0, shape["vocab_size"], length).astype(np.int32)
        sequence = TokenSequence(ids, np.arange(length) >= prompt, np.zeros(length, np.float32), ())
        samples.append(ScoredRollout(Rollout(f"p/{i}", 0, 0, (sequence,), "stop"), "", "", 0.0, {}, "ok"))
    algo = {"importance_correction": "none"}  # these rollouts have no log-probs of an engine
    config = run_config("nowhere", algo=algo, learner={"max_tokens_per_microbatch": tokens})
    empty = np.zeros(1, np.int32)
    groups = [RolloutGroup(Prompt(s.rollout.prompt_id, 0, empty, (), "", "p"), (s,)) for s in samples]
    batch = make_batch(groups, mask_truncated=False)
    ((minibatch,),) = plan_epochs(batch, config, step=0)
    (rows,) = minibatch.microbatches[0]
    advantages = rng.normal(size=len(samples)).astype(np.float32)
    targets = PolicyTargets(broadcast_to_tokens(batch, advantages), None, None).take(batch.tokens.token_indices(rows))
    packed = DeviceTokens.of(batch.tokens.take(rows), device)

    def run() -> float:
        policy.zero_grad(set_to_none=True)
        harness.synchronize(device.type)
        started = time.perf_counter()
        policy_microbatch(policy, packed, targets, minibatch.denominators, config)[0].backward()
        harness.synchronize(device.type)
        return time.perf_counter() - started

    run()
    policy.zero_grad(set_to_none=True)
    with harness.Peak(device.type) as peak:
        seconds = min(run() for _ in range(TIMED))
    flops = roofline.model_flops(shape, tokens=tokens, sequence=length)
    return {
        "tokens/s": tokens / seconds, "ms": seconds * 1e3, "MFU": flops / seconds / roofline.PEAK,
        "peak GiB over weights": peak.mib / 1024,
    }  # fmt: skip


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure, "ceilings": ceilings})
    tiny = options.quick or options.device == "cpu"
    sizes = {"tiny": TINY} if tiny else {size: roofline.SIZES[size] for size in SIZES}
    tokens, lengths = (256, [32, 128]) if tiny else (16384, LENGTHS)
    large = {"side": 512, "bytes": 2**24} if tiny else {"side": 8192, "bytes": 2**33}
    top = harness.fresh(
        "benchmarks.learner_shapes", {"function": "ceilings", "device": options.device, **large}, timeout_s=120
    )
    rows: list[Row] = []
    for name, shape in sizes.items():
        checkpointing = list(CHECKPOINTING) if name != "7B" else ["selective", "full"]
        case = {"function": "measure", "size": name, "shape": shape, "tokens": tokens, "lengths": lengths,
                "checkpointing": checkpointing, "device": options.device}  # fmt: skip
        account = {
            kind: "" if tiny else roofline.update(name, with_kernels=True, checkpointing=CHECKPOINTING[kind])["of peak"]
            for kind in checkpointing
        }
        for row in harness.fresh("benchmarks.learner_shapes", case, timeout_s=300)["rows"]:
            at_4096 = row["sequence"] == roofline.SEQUENCE
            rows.append(row | {"account": account[row["checkpointing"]] if at_4096 else ""})
    notes = [f"{key}: {value:,.4g}" for key, value in top.items() if key != "process_seconds"]
    harness.report("learner_shapes", "forward, loss and backward of one microbatch, bf16", rows, options, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
