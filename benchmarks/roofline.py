"""What one update costs on an H100 at best, from the operations that are dispatched: no GPU and no numbers needed.

    python -m benchmarks.roofline [--quick]

Forward and backward run on torch's meta device, which makes shapes and no values. Each operation takes the longest of
its floating-point operations over what matrix products reach, its bytes (each tensor argument and result once) over
what memory reaches, and the least that a kernel takes. Attention takes its own rates. These are assumptions, not
measurements: what a GPU reaches, `learner/mfu` of a run says. *Plain* is what transformers and torch compute, *kernels*
what a learner on a GPU computes; both in one run. Optimizer, communication and waiting are not in it.
"""

from __future__ import annotations

import collections
import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks import harness, models
from benchmarks.harness import Row
from rlhf.config.sections import Checkpointing

PEAK = 989e12  # bf16 FLOP/s of an H100 by its data sheet, without sparsity
GEMM = 680e12  # FLOP/s that large products reach
FLASH = {"forward": 380e12, "backward": 320e12}  # FLOP/s of flash attention 2
BANDWIDTH = 2.8e12  # bytes/s that elementwise kernels reach, of 3.35
FLOOR = 4e-6  # seconds of the smallest kernel

TOKENS, SEQUENCE, RESPONSE_SHARE = 16384, 4096, 0.85
OLD_TILES = 2048, 16384  # of logits, where torch computes several passes over them
KINDS = ("products", "attention", "other")
SIZES: dict[str, dict[str, Any]] = {
    "1.5B": {**models.SIZES["1.5b"], "tie_word_embeddings": True},
    "3B": {**models.SIZES["3b"], "tie_word_embeddings": True},
    "7B": models.SIZES["7b"],
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152_064},
}  # fmt: skip
NOT_COMPUTED = set(
    re.findall(
        r"\w+",
        "view _unsafe_view transpose t expand slice select unsqueeze squeeze permute detach alias split chunk narrow "
        "split_with_sizes as_strided reshape _reshape_alias unbind lift_fresh sym_size empty empty_like new_empty "
        "empty_strided new_empty_strided",
    )
)


def nbytes(*tensors: Any) -> int:
    """Bytes of all tensors in these arguments, each tensor once."""
    return sum({id(x): x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, Tensor)}.values())


class Account(TorchDispatchMode):
    """Seconds and bytes of everything that is computed while it is active, by kind."""

    def __init__(self, sequence: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.seconds: dict[str, float] = collections.Counter()
        self.bytes: dict[str, float] = collections.Counter()

    def add(self, kind: str, seconds: float, moved: float) -> None:
        self.seconds[kind] += seconds
        self.bytes[kind] += moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in NOT_COMPUTED:
            return out
        moved = nbytes(args, kwargs, out)
        if name.endswith("_") or "out" in kwargs:  # read and written
            moved += nbytes(out if isinstance(out, Tensor) else args[0])
        if "varlen_attn" in name:
            side = "backward" if "backward" in name else "forward"
            query = args[1] if side == "backward" else args[0]
            flops = 2 * query.numel() * self.sequence * (2.5 if side == "backward" else 1)  # causal: half of the pairs
            self.add("attention", flops / FLASH[side], moved)
            return out
        counts = func._overloadpacket in flop_registry
        flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out) if counts else 0
        self.add("products" if flops else "other", max(flops / GEMM, moved / BANDWIDTH, FLOOR), moved)
        return out

    def launch(self, kernel: Any, programs: Any, *arguments: Any, **constants: Any) -> None:
        """In place of `kernels.launch`: a kernel reads or writes each of its tensors once."""
        moved = nbytes(arguments)
        self.add("other", max(moved / BANDWIDTH, FLOOR), moved)


@contextlib.contextmanager
def on_meta(account: Account, *, with_kernels: bool) -> Iterator[None]:
    """A context in which a learner computes on the meta device as on a GPU, with the kernels or without."""
    from rlhf.algo import kernels, numerics

    def all_rows(mask: Tensor) -> Tensor:  # every token has a gradient
        return torch.arange(len(mask), device=mask.device).unsqueeze(1)

    with (
        mock.patch.object(numerics, "KERNEL_DEVICES", {"meta"} if with_kernels else set()),
        mock.patch.object(kernels, "launch", account.launch),
        mock.patch.object(Tensor, "nonzero", all_rows),
        account,
    ):
        yield


def model_of(size: str, *, checkpointing: Checkpointing, layers: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf.learner.packed_attention import PACKED
    from rlhf.learner.policy_model import prepare_transformer

    config = Qwen2Config(**{**SIZES[size], "num_hidden_layers": layers}, max_position_embeddings=32768)
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.set_attn_implementation(PACKED)
    prepare_transformer(model, gradient_checkpointing=checkpointing)
    return model


def account_of_body(model: Any, *, with_kernels: bool) -> Account:
    """Forward and backward of the transformer without its head."""
    from rlhf.learner.segments import row_of, segments_of

    starts = np.arange(0, TOKENS + 1, SEQUENCE)
    segments = segments_of(starts, np.zeros(len(starts) - 1, np.int64), torch.device("meta"))
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    account = Account(SEQUENCE)
    with on_meta(account, with_kernels=with_kernels), row_of(segments):
        out = model.model(input_ids=tokens, position_ids=tokens, use_cache=False, segments=segments)
        out.last_hidden_state.backward(torch.empty_like(out.last_hidden_state))
    return account


def account_of_head(weight: Tensor, *, with_kernels: bool) -> Account:
    """Forward and backward of log-probs and entropies, of which only the log-probs have a gradient."""
    from rlhf.algo import logprobs
    from rlhf.algo.sizes import HEAD_TILE

    hidden = torch.empty(TOKENS, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True)
    rows = torch.zeros(int(TOKENS * RESPONSE_SHARE), dtype=torch.long, device="meta")
    account = Account(SEQUENCE)
    with on_meta(account, with_kernels=with_kernels):
        tiles = HEAD_TILE["cuda"] if with_kernels else OLD_TILES
        values, _ = logprobs._FusedHead.apply(hidden, weight, None, rows, rows, 1.0, None, True, tiles, False, None)
        values.backward(torch.empty_like(values))
    return account


def model_flops(shape: dict[str, Any], *, tokens: int, sequence: int) -> float:
    """Forward and backward of so many tokens in sequences of one length, `RESPONSE_SHARE` of them through the head."""
    depth, hidden, inner = (shape[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    per_layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    flops = 6 * depth * (per_layer + hidden * sequence) * tokens
    return float(flops + 6 * shape["vocab_size"] * hidden * int(tokens * RESPONSE_SHARE))


def update(size: str, *, with_kernels: bool, checkpointing: Checkpointing) -> Row:
    """Milliseconds by kind of one microbatch, and its model FLOPs over what the GPU could compute in that time.

    Models of one and of two layers are computed; every further layer costs what the second does.
    """
    shape = SIZES[size]
    depth = shape["num_hidden_layers"]
    models = [model_of(size, checkpointing=checkpointing, layers=layers) for layers in (1, 2)]
    one, two = (account_of_body(model, with_kernels=with_kernels) for model in models)
    head = account_of_head(models[0].lm_head.weight, with_kernels=with_kernels)

    def whole(counter: str, kind: str) -> float:
        first, second = vars(one)[counter][kind], vars(two)[counter][kind]
        return first + (depth - 1) * (second - first)

    parts = {kind: whole("seconds", kind) for kind in KINDS} | {f"head, {kind}": head.seconds[kind] for kind in KINDS}
    total = sum(parts.values())
    flops = model_flops(shape, tokens=TOKENS, sequence=SEQUENCE)
    return {
        "model": size,
        "checkpointing": checkpointing if isinstance(checkpointing, str) else "full" if checkpointing else "off",
        "code": "kernels" if with_kernels else "plain",
        **{f"{kind}, ms": seconds * 1e3 for kind, seconds in parts.items() if seconds},
        "other, GB": (whole("bytes", "other") + head.bytes["other"]) / 1e9,
        "total, ms": total * 1e3, "of peak": flops / total / PEAK,
    }  # fmt: skip


def main() -> int:
    options = harness.parser(__doc__ or "").parse_args()
    kinds: tuple[Checkpointing, ...] = (False, "selective", True, "tiled")
    rows = [
        update(size, with_kernels=with_kernels, checkpointing=checkpointing)
        for size in ("1.5B", "7B", "32B")[: 1 if options.quick else None]
        for checkpointing in kinds
        for with_kernels in (False, True)
    ]
    title = f"Account of one microbatch: {TOKENS:,} tokens in sequences of {SEQUENCE:,}, {RESPONSE_SHARE:.0%} trained"
    harness.report("roofline", title, rows, options, notes=["Computed from assumed rates of an H100; not measured."])
    return 0


if __name__ == "__main__":
    sys.exit(main())
