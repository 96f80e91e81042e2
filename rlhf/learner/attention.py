"""Causal attention inside each segment of a packed row, as an attention function of transformers.

A packed row holds S sequences, T tokens and no padding. transformers would build a dense [T, T] mask from the position
ids; here each token attends to the earlier tokens of its own segment and nothing else is computed:

    CPU   segments of similar length are gathered into [n, longest] blocks, with one causal sdpa per block. Padding
          is on the right, where no earlier token can attend to it, and its outputs are dropped.
    CUDA  torch's variable-length flash attention takes the row, with fewer queries than keys if beginnings are shared.
          It has no float32: a pass in float32 is computed in blocks, as on CPU.

A prompt that samples share goes through the transformer once. If a sequence begins like the previous one, the shared
tokens are not computed again: U of the row's T tokens are computed, and the transformer sees only those. Keys and
values (on CPU queries too) are repeated here, and nowhere else, for each sequence that begins with them.
"""

from __future__ import annotations

import sys
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
class Segments:
    """The sequences of a packed row, in the form that the device's attention needs.

    Attributes:
        cu_seqlens: [S+1] int32 of the whole row. longest: tokens of the longest segment.
        shared: [S] int64, the leading tokens of each segment that are shared with the previous one.
        cu_computed: [S+1] int32 of the computed tokens alone; they are the last of each segment.
        computed: [U] int64, the row's tokens that are computed.
        expand: [T] int64, which of the U each token of the row is; None where all are computed.
        gather: [P] int64, the computed token at each place of the blocks; padding repeats a segment's last token.
        blocks: (segments, longest) of each block; their products add up to P.
        restore: [U] int64, the place of each computed token in that layout.
    """

    cu_seqlens: Tensor
    longest: int
    shared: np.ndarray
    cu_computed: Tensor
    computed: Tensor
    expand: Tensor | None
    gather: Tensor
    blocks: tuple[tuple[int, int], ...]
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
    laid_out, blocks, restore = _blocks(cu_seqlens, lengths) if in_blocks else (expand[:0], [], expand[:0])

    def put(array: np.ndarray, dtype: type = np.int64) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Segments(
        cu_seqlens=put(cu_seqlens, np.int32),
        longest=int(lengths.max()),
        shared=shared,
        cu_computed=put(np.concatenate([[0], np.cumsum(lengths - shared)]), np.int32),
        computed=put(computed),
        expand=put(expand) if shared.any() else None,
        gather=put(expand[laid_out]),
        blocks=tuple(blocks),
        restore=put(restore[computed] if len(restore) else restore),
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


def _blocks(cu_seqlens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]], np.ndarray]:
    """-> the row's tokens block after block [P], (segments, longest) of each block, where each token stands [T]."""
    order = np.argsort(-lengths, kind="stable")
    rows: list[np.ndarray] = []
    blocks: list[tuple[int, int]] = []
    restore = np.zeros(int(cu_seqlens[-1]), np.int64)
    start = filled = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        fits = lengths[order[start:]] >= SIMILAR_LENGTH * longest
        stop = start + (len(fits) if fits.all() else int(np.argmin(fits)))
        starts, sizes = cu_seqlens[order[start:stop], None], lengths[order[start:stop], None]
        columns = np.arange(longest)
        laid_out = starts + np.minimum(columns, sizes - 1)
        real = columns < sizes
        restore[laid_out[real]] = filled + np.flatnonzero(real)
        rows.append(laid_out.ravel())
        blocks.append((stop - start, longest))
        start, filled = stop, filled + real.size
    return np.concatenate(rows), blocks, restore


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
    """[U, heads, d] each -> [U, heads, d]; a block of n segments is one batch of n, shared beginnings and all."""
    sizes = [n * longest for n, longest in segments.blocks]
    parts = [take_rows(x, segments.gather).split(sizes) for x in (q, k, v)]
    outputs = []
    for (n, longest), *block in zip(segments.blocks, *parts, strict=True):
        query, key, value = (x.view(n, longest, *x.shape[1:]).transpose(1, 2) for x in block)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(n * longest, *q.shape[1:]))
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
        looks_up = hasattr(sys.modules[type(transformer).__module__], "ALL_ATTENTION_FUNCTIONS")  # hybrids set no flag
        if not (transformer._supports_attention_backend or looks_up):
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
