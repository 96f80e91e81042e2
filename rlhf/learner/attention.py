"""Causal attention inside each segment of a packed row, as an attention function of transformers.

A packed row holds S sequences, T tokens and no padding. transformers would build a dense [T, T] mask from the position
ids; here each token attends to the earlier tokens of its own segment and nothing else is computed:

    CPU   segments of similar length are gathered into [n, longest] blocks, with one causal sdpa per block. Padding
          is on the right, where no earlier token can attend to it, and its outputs are dropped. Segments that begin
          like another have fewer queries than keys; they are in blocks of their own, by their number of queries.
    CUDA  torch's variable-length flash attention takes the row, with fewer queries than keys if beginnings are shared.
          It has no float32: a pass in float32 is computed in blocks, as on CPU.

A prompt that samples share goes through the transformer once. If a sequence begins like the previous one, the shared
tokens are not computed again: U of the row's T tokens are computed, and the transformer sees only those. Keys and
values are repeated here, and nowhere else, for each sequence that begins with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from rlhf.algo.numerics import add_rows, full_precision

PACKED = "packed"
# In bfloat16 the CPU kernel's backward pass sets up each of its small products anew: with so few queries float32 is up
# to 2.5 times as fast (keys 111 to 600), and no slower from there to 256.
SHORT_QUERIES = 128
SIMILAR_LENGTH = 0.75  # segments of one block are at least this share of its longest: at most 1/3 padding


class UnpackableError(Exception):
    """Raised for a model whose sequences cannot share a row; the message is a clause that gives the reason."""

    def of(self, key: str, path: str) -> str:
        """The whole message for a user."""
        return (
            f"{key}={path}: sequences cannot be packed into one row for this model, since {self}. Use a model such as "
            "Qwen2, Qwen3, Llama or Mistral."
        )


@dataclass(frozen=True)
class Block:
    """Segments that are computed as one batch: `count` of them, each with `queries` and `keys` tokens, padded.

    Attributes:
        seen: [count, 1, queries, keys] bool, True where a query attends to a key; None: plain causal attention.
    """

    count: int
    queries: int
    keys: int
    seen: Tensor | None


@dataclass(frozen=True)
class Segments:
    """The sequences of a packed row, in the form that the device's attention needs.

    Attributes:
        cu_seqlens: [S+1] int32 of the whole row. longest: tokens of the longest segment.
        shared: [S] int64, the leading tokens of each segment that are shared with the previous one.
        cu_computed: [S+1] int32 of the computed tokens alone; they are the last of each segment.
        computed: [U] int64, the row's tokens that are computed.
        expand: [T] int64, which of the U each token of the row is; None where all are computed.
        blocks: how the segments are put together on CPU.
        keys: [K] int64, the computed token at each place of the blocks; padding repeats a segment's last token.
        queries: [Q] int64, the same for the tokens that are computed in each segment.
        restore: [U] int64, the place of each computed token among the queries.
    """

    cu_seqlens: Tensor
    longest: int
    shared: np.ndarray
    cu_computed: Tensor
    computed: Tensor
    expand: Tensor | None
    blocks: tuple[Block, ...]
    keys: Tensor
    queries: Tensor
    restore: Tensor

    def state_of(self, tokens: Tensor) -> Tensor:
        """The index of the computed state of each of these tokens of the row; int64, any shape."""
        return tokens if self.expand is None else self.expand[tokens]


def segments_of(
    cu_seqlens: np.ndarray, shared: np.ndarray, device: torch.device, *, in_float32: bool = False
) -> Segments:
    """Prepare a row's segments once, for all layers.

    Args:
        cu_seqlens: [S+1] int64.
        shared: [S] int64, the leading tokens of each sequence that equal those of the previous one.
        in_float32: the pass will be computed in float32.
    """
    lengths = np.diff(cu_seqlens)
    computed, expand = _computed_once(cu_seqlens, shared)
    in_blocks = device.type == "cpu" or in_float32
    nowhere = np.zeros(0, np.int64)
    keys, queries, blocks = _blocks(cu_seqlens, shared, device) if in_blocks else (nowhere, nowhere, [])
    restore = np.zeros(int(cu_seqlens[-1]), np.int64)
    restore[queries[::-1]] = np.arange(len(queries))[::-1]  # padding repeats a token: its first place counts

    def put(array: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Segments(
        cu_seqlens=put(cu_seqlens, np.int32),
        longest=int(lengths.max()),
        shared=shared,
        cu_computed=put(np.concatenate([[0], np.cumsum(lengths - shared)]), np.int32),
        computed=put(computed),
        expand=put(expand) if shared.any() else None,
        blocks=tuple(blocks),
        keys=put(expand[keys]),
        queries=put(expand[queries]),
        restore=put(restore[computed]),
    )


def _computed_once(cu_seqlens: np.ndarray, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """-> computed [U], which tokens of the row are computed, and expand [T], which of those U each token is."""
    expand = np.zeros(int(cu_seqlens[-1]), np.int64)
    own = np.ones(len(expand), bool)
    for start, count in zip(cu_seqlens[:-1].tolist(), shared.tolist(), strict=True):
        own[start : start + count] = False
    expand[own] = np.arange(own.sum())
    before = 0
    for start, count in zip(cu_seqlens[:-1].tolist(), shared.tolist(), strict=True):
        expand[start : start + count] = expand[before : before + count]
        before = start
    return np.flatnonzero(own), expand


def _blocks(
    cu_seqlens: np.ndarray, shared: np.ndarray, device: torch.device
) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """-> the row's tokens that are keys [K] and queries [Q] of the blocks, block after block, and the blocks."""
    lengths = np.diff(cu_seqlens)
    own = lengths - shared
    # Segments that share nothing are in blocks of class 0; the others in classes of up to twice as many queries.
    classes = np.where(shared > 0, np.ceil(np.log2(own)).astype(np.int64) + 1, 0)
    order = np.lexsort((-lengths, classes))
    keys: list[np.ndarray] = []
    queries: list[np.ndarray] = []
    blocks: list[Block] = []
    start = 0
    while start < len(order):
        first = order[start]
        fits = (classes[order[start:]] == classes[first]) & (lengths[order[start:]] >= SIMILAR_LENGTH * lengths[first])
        stop = start + (len(fits) if fits.all() else int(np.argmin(fits)))
        rows = order[start:stop, None]
        key = np.arange(lengths[first])
        query = np.minimum(shared[rows] + np.arange(own[rows].max()), lengths[rows] - 1)
        keys.append((cu_seqlens[rows] + np.minimum(key, lengths[rows] - 1)).ravel())
        queries.append((cu_seqlens[rows] + query).ravel())
        seen = torch.from_numpy(key <= query[:, :, None]).unsqueeze(1).to(device) if classes[first] else None
        blocks.append(Block(stop - start, query.shape[1], len(key), seen))
        start = stop
    return np.concatenate(keys), np.concatenate(queries), blocks


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return add_rows(full_precision(grad), index, ctx.rows).to(grad.dtype), None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first dimension. The gradients of a row that is taken several times are summed in float32.

    In bfloat16 a sum of hundreds, as for a prompt that all sequences share, would stop growing.
    """
    taken: Tensor = _TakeRows.apply(x, index)
    return taken


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row; query [1, heads, U, d], key and value [1, kv_heads, U, d] -> [1, U, heads, d].

    Raises:
        UnpackableError: not supported here: the model caps its attention scores, adds sinks to them, or has a window
            that is shorter than a segment.
        AssertionError: with a batch of rows, an attention mask or dropout.
    """
    if softcap is not None or s_aux is not None:
        raise UnpackableError("it caps its attention scores" if s_aux is None else "its attention has sinks")
    assert query.shape[0] == 1, "a packed row is a batch of one"
    assert attention_mask is None, "segments say what may be attended to"
    assert dropout == 0.0, "dropout would make old and current log-probabilities differ"
    if sliding_window is not None and segments.longest > sliding_window:
        raise UnpackableError(f"sequences of {segments.longest} tokens exceed its attention window of {sliding_window}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [U, heads, d]
    if query.device.type == "cuda" and query.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        if segments.expand is not None:
            k, v = take_rows(k, segments.expand), take_rows(v, segments.expand)
        # Fewer queries than keys: both are aligned at their last token, which is always computed.
        out = varlen_attn(
            q, k, v, segments.cu_computed, segments.cu_seqlens, segments.longest, segments.longest,
            scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.unsqueeze(0), None
    return _blockwise_attention(q, k, v, segments, scaling).unsqueeze(0), None


def _blockwise_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """[U, heads, d] each -> [U, heads, d]; a block of n segments is one batch of n."""
    of_keys = [block.count * block.keys for block in segments.blocks]
    of_queries = [block.count * block.queries for block in segments.blocks]
    queries = take_rows(q, segments.queries).split(of_queries)
    keys, values = (take_rows(x, segments.keys).split(of_keys) for x in (k, v))
    outputs = []
    for block, *parts in zip(segments.blocks, queries, keys, values, strict=True):
        query, key, value = (x.view(block.count, -1, *x.shape[1:]).transpose(1, 2) for x in parts)
        if q.device.type == "cpu" and block.queries <= SHORT_QUERIES:
            query, key, value = full_precision(query), full_precision(key), full_precision(value)
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=block.seen, is_causal=block.seen is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        outputs.append(out.to(q.dtype).transpose(1, 2).reshape(-1, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, segments.restore)


def load_packed(auto_class: Any, path: str, *, key: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`auto_class.from_pretrained` with packed attention; -> the model and transformers' loading report.

    This checks what is known before a forward; `model.check_packed` checks a forward.

    Args:
        key: of the config, for messages.

    Raises:
        ValueError: the model does not take packed rows.
    """
    try:
        try:
            transformer, info = auto_class.from_pretrained(
                path, attn_implementation=PACKED, output_loading_info=True, **options
            )
        except KeyError as error:
            if error.args != (PACKED,):
                raise
            raise UnpackableError("its attention cannot be replaced") from None
        if not transformer._supports_attention_backend:
            raise UnpackableError("its attention cannot be replaced")
    except UnpackableError as error:
        raise ValueError(error.of(key, path)) from None
    _restore_rotary_frequencies(transformer)
    return transformer, info


def _restore_rotary_frequencies(transformer: PreTrainedModel) -> None:
    """Compute rotary frequencies again in float32 where DeepSpeed made them bfloat16, as ZeRO-3 does while it loads.

    Rounded by up to 0.4%, they would turn token 1,000 by radians too much: another model than the engine's.
    """
    for module in transformer.modules():
        frequencies = [b for name, b in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
        if any(buffer.dtype != torch.float32 for buffer in frequencies):
            for buffer in frequencies:
                buffer.data = buffer.data.float()
            transformer._init_weights(module)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
