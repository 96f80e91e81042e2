"""Attention with capped scores or sinks on a GPU, by torch's flex attention: flash attention supports neither."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from rlhf.learner.packed_attention import Scoring
from rlhf.learner.segments import Segments


def scored_attention_on_gpu(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    """q [U, heads, d] of the computed tokens, k and v [T, kv_heads, d] of the whole row -> [U, heads, d].

    The softmax leaves the sink out, and its share is removed afterwards: with l the log-sum-exp of the scores, the
    values keep exp(l) / (exp(l) + exp(sink)) = sigmoid(l - sink).
    """

    def capped(cap: Tensor, score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    # a tensor, since a score_mod compiled for any length may hold only tensors and whole numbers
    cap = None if scoring.softcap is None else torch.full((), scoring.softcap, device=q.device)
    out, aux = _compiled(flex_attention, q.device.type)(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        score_mod=None if cap is None else functools.partial(capped, cap),
        block_mask=_block_mask(segments, scoring.window),
        scale=scoring.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if scoring.sinks is not None:
        out = (out * torch.sigmoid(aux.lse - scoring.sinks.float()[:, None])[..., None]).to(v.dtype)
    attended: Tensor = out[0].transpose(0, 1)
    return attended


def _block_mask(segments: Segments, window: int | None) -> BlockMask:
    """Which tokens of the row each computed token sees, made once for all layers with this window."""
    masks = segments.block_masks
    if window not in masks:
        segment, place = segments.positions()
        own, at = segment[segments.computed], place[segments.computed]

        def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            past = (own[query] == segment[key]) & (place[key] <= at[query])
            return past if window is None else past & (place[key] > at[query] - window)

        device = segment.device
        make = _compiled(create_block_mask, device.type)
        masks[window] = make(seen, B=None, H=None, Q_LEN=len(own), KV_LEN=len(segment), device=device)
    return masks[window]


@functools.cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function compiled for any length; on CPU, where only tests run it, traced and then run step by step."""
    return torch.compile(function, dynamic=True, backend="inductor" if device == "cuda" else "aot_eager")
