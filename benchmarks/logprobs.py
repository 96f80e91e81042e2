"""Log-probabilities of sampled tokens, forward and backward, from hidden states and the head: time, memory, error.

    python -m benchmarks.logprobs [--device cuda] [--quick]

T tokens, vocabulary 151,936, hidden 896, bf16: the head of Qwen2.5-0.5B. Peers: full logits in float32 (transformers'
own loss), TRL's selective_log_softmax on full bf16 logits, TRL's head in vocabulary chunks, Liger where it is installed
(GPU). The error is the mean |log-prob - that of a float32 product|, over 256 tokens. `products alone` is a lower
bound for all: the three matrix products in bf16 without a softmax (ours needs a fourth, since it computes the logits
again instead of keeping them). On CPU a process warms up on 64 tokens and times one pass, which takes seconds; on GPU
it warms up at full size and times several passes, the fastest of which counts.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.harness import Case, Row

if TYPE_CHECKING:
    from torch import Tensor

V, H = 151_936, 896
CHECKED_TOKENS = 256
TOY_TOKENS, PASSES_ON_GPU = 64, 5
OURS, FULL, SELECTIVE, CHUNKED, LIGER = "rlhf", "full logits, float32", "TRL selective", "TRL chunked head", "Liger"
FLOOR = "products alone (3)"


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    import torch.nn.functional as F

    logits = F.linear(hidden, weight).float()
    return F.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(1)


def trl_selective(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    import torch.nn.functional as F
    from trl.trainer.utils import selective_log_softmax

    logprobs: Tensor = selective_log_softmax(F.linear(hidden, weight)[None], targets[None])[0]
    return logprobs


def trl_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    outputs = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("log_probs",)
    )
    logprobs: Tensor = outputs[0]
    return logprobs


def liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    loss: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, targets, None, None, -100, 0.0, 0.0, "none"
    )[0]
    return -loss


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    import torch

    from rlhf.algo.logprobs import token_logprobs

    count = len(targets)
    mask = torch.ones(count + 1, dtype=torch.bool, device=hidden.device)
    mask[0] = False
    ids = torch.cat([targets[:1], targets])
    bounds = torch.tensor([0, count + 1], dtype=torch.int32, device=hidden.device)
    states = torch.cat([hidden, hidden[-1:].detach()])
    return token_logprobs(states, weight, ids, mask, bounds).logprobs[1:]


VARIANTS = {OURS: ours, FULL: full_logits, SELECTIVE: trl_selective, CHUNKED: trl_chunked, LIGER: liger}


def measure(case: Case) -> Row:
    """Time and peak memory of one forward and backward, warm."""
    import torch

    torch.manual_seed(0)
    device, tokens = case["device"], case["tokens"]
    hidden = torch.randn(tokens, H).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(V, H) * 3 / H**0.5).to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(0, V, (tokens,), device=device)
    upstream = torch.randn(tokens, device=device)
    warm_up, passes = (TOY_TOKENS, 1) if device == "cpu" else (tokens, PASSES_ON_GPU)
    if case["variant"] == FLOOR:
        products = _products(hidden.detach(), weight.detach(), device)
        products(warm_up)
        return {"seconds": min(products(tokens) for _ in range(passes))}
    variant = VARIANTS[case["variant"]]

    def run(rows: int) -> tuple[Row, Tensor]:
        hidden.grad = weight.grad = None
        harness.synchronize(device)
        started = time.perf_counter()
        logprobs = variant(hidden[:rows], weight, targets[:rows])
        harness.synchronize(device)
        forward = time.perf_counter() - started
        logprobs.backward(upstream[:rows].to(logprobs.dtype))
        harness.synchronize(device)
        return {"seconds": time.perf_counter() - started, "forward": forward}, logprobs.detach()

    run(warm_up)
    hidden.grad = weight.grad = None
    with harness.Peak(device) as peak:
        timed = [run(tokens) for _ in range(passes)]
    row, logprobs = min(timed, key=lambda result: float(result[0]["seconds"]))
    checked = slice(0, min(CHECKED_TOKENS, tokens))
    with torch.no_grad():
        exact = full_logits(hidden[checked].float(), weight.float(), targets[checked])
    error = (logprobs[checked].float() - exact).abs().mean().item()
    return row | {"peak_mib": peak.mib, "error": error}


def _products(hidden: Tensor, weight: Tensor, device: str) -> Callable[[int], float]:
    """Seconds of the three products of forward and backward, in pieces that keep the logits out of memory."""
    import torch

    columns = 2048 if device == "cpu" else 16384
    grad_hidden, grad_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(weight)

    def run(rows: int) -> float:
        states, gradient = hidden[:rows], grad_hidden[:rows]
        harness.synchronize(device)
        started = time.perf_counter()
        for start in range(0, V, columns):
            part = weight[start : start + columns]
            logits = states @ part.t()
            torch.mm(logits.t(), states, out=grad_weight[start : start + columns])
            gradient += logits @ part
        harness.synchronize(device)
        return time.perf_counter() - started

    return run


def rows_for(tokens: int, variants: list[str], rounds: int, device: str, need_mib: dict[str, float]) -> list[Row]:
    """One size. A variant that would not fit the memory at hand is not run, and its row says what it needs."""
    fits, rows = [], []
    for variant in variants:
        need = need_mib.get(variant, 0.0) * tokens
        if device == "cpu" and need > 0.9 * harness.available_mib():
            rows.append({"tokens": tokens, "variant": variant, "peak MiB": f"out of memory ({need / 1024:.0f} GiB)"})
        else:
            fits.append(variant)
    cases = [{"function": "measure", "variant": v, "tokens": tokens, "device": device} for v in fits]
    measured = dict(zip(fits, harness.interleaved("benchmarks.logprobs", cases, rounds), strict=True))
    base = measured.get(SELECTIVE)
    for variant, row in measured.items():
        shown = {"tokens": tokens, "variant": variant, "seconds": row["seconds"]}
        if "peak_mib" in row:
            need_mib[variant] = row["peak_mib"] / tokens
            shown |= {"forward s": row["forward"], "peak MiB": row["peak_mib"], "error": row["error"]}
        if base is not None:
            shown["x time"] = row["seconds"] / base["seconds"]
            if "peak_mib" in row:
                shown["x memory"] = row["peak_mib"] / base["peak_mib"]
        elif "peak_mib" in row and SELECTIVE in need_mib:
            shown["x memory"] = row["peak_mib"] / (need_mib[SELECTIVE] * tokens)
        rows.append(shown)
    return rows


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    harness.run_if_case(options, {"measure": measure})
    variants = [OURS, FULL, SELECTIVE, CHUNKED, FLOOR]
    if options.device == "cuda" and importlib.util.find_spec("liger_kernel"):
        variants.insert(4, LIGER)
    need: dict[str, float] = {}
    rows: list[Row] = []
    for tokens, rounds in [(256, 1)] if options.quick else [(2048, 2), (8192, 1), (16384, 1)]:
        rows += rows_for(tokens, variants, rounds, options.device, need)
        if options.device == "cpu":  # both grow with the tokens; on two cores TRL's chunks would take minutes
            variants = [variant for variant in variants if variant not in (FLOOR, CHUNKED)]
    notes = ["x time, x memory: against TRL selective (its memory scaled from the size before where it was not run)"]
    harness.report("logprobs", f"log-probs of T tokens, V {V:,}, H {H}, bf16", rows, options, notes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
