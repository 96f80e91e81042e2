"""What the doctor measures of kernels: a correct one passes, one that computes something else does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3 import modeling_qwen3

from rlhf.algo import logprobs
from rlhf.check.doctor import on_rank
from rlhf.learner import packed_attention, packed_mixers

pytestmark = pytest.mark.slow

ON_GPU = pytest.param("cuda", "bfloat16", marks=pytest.mark.gpu)
DEVICES = pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cpu", "bfloat16"), ON_GPU])


def rank_on(device: str) -> Any:
    return SimpleNamespace(device=torch.device(device))


@DEVICES
def test_the_kernels_compute_what_plain_ones_do_in_float32(device: str, dtype: str) -> None:
    rank, bound = rank_on(device), on_rank.TOLERANCE[dtype]
    assert on_rank.attention_error(rank, 8, 2, 64, dtype) < bound
    assert on_rank.head_error(rank, 5000, 256, dtype) < bound
    for kind in on_rank.TINY_MODELS:
        assert on_rank.model_error(rank, kind, dtype) < bound, kind


def test_kernels_that_are_a_little_wrong_are_beyond_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, bound = rank_on("cpu"), on_rank.TOLERANCE["bfloat16"]
    packed, head = packed_attention.packed_attention, logprobs.token_logprobs

    def scaled(*arguments: Any, **options: Any) -> Any:
        return packed(*arguments, **options, scaling=0.13)  # 0.125 is right for heads of 64

    def warm(*arguments: Any, **options: Any) -> Any:
        return head(*arguments, **options, temperature=1.1)

    def carried_over(mixer: torch.nn.Module) -> Any:
        whole = mixer.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            options.pop("segments", None)
            return whole(*arguments, **options)

        return forward

    monkeypatch.setattr(packed_attention, "packed_attention", scaled)
    assert on_rank.attention_error(rank, 8, 2, 64, "bfloat16") > bound
    monkeypatch.undo()
    monkeypatch.setattr(logprobs, "token_logprobs", warm)
    assert on_rank.head_error(rank, 5000, 256, "bfloat16") > bound
    monkeypatch.undo()
    monkeypatch.setattr(packed_mixers, "_by_segments", carried_over)
    hybrids = on_rank.TINY_MODELS.keys() - {"qwen3"}
    assert min(on_rank.model_error(rank, kind, "bfloat16") for kind in hybrids) > bound
    monkeypatch.undo()
    rotate = modeling_qwen3.rotate_half
    monkeypatch.setattr(modeling_qwen3, "rotate_half", lambda x: rotate(x) if x.dtype == torch.float32 else -rotate(x))
    assert on_rank.model_error(rank, "qwen3", "bfloat16") > bound
