"""Causal attention inside each segment of a packed row, as an attention function of transformers.

A packed row holds S sequences, T tokens and no padding. transformers would build a dense [T, T] mask from the position
ids; here each token attends to the earlier tokens of its own segment and nothing else is computed:

    CPU   segments of similar length are gathered into [n, longest] blocks and go through one causal sdpa a block.
          The padding stands to the right, where no earlier token can see it, and its outputs are dropped.
    CUDA  torch's variable-length flash attention takes the row as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

PACKED = "packed"
SIMILAR_LENGTH = 0.75  # segments of one block are at least this share of its longest: at most 1/3 padding


class UnpackableError(Exception):
    """A model whose sequences cannot share a row; the message is a clause that says why."""

    def of(self, key: str, path: str) -> str:
        """The whole message for a user."""
        return (
            f"{key}={path}: sequences cannot be packed into one row for this model, since {self}. Use a model such as "
            "Qwen2, Qwen3, Llama or Mistral."
        )


@dataclass(frozen=True)
class Segments:
    """Where the sequences of a packed row lie, in the form that the device's attention takes.

    Attributes:
        cu_seqlens: [S+1] int32. longest: tokens of the longest segment.
        gather: [P] int64, the row's tokens laid out block after block, the padding repeating a segment's last token.
        blocks: (segments, longest) of each block; their products add up to P.
        restore: [T] int64, where in that layout each token of the row stands.
    """

    cu_seqlens: Tensor
    longest: int
    gather: Tensor
    blocks: tuple[tuple[int, int], ...]
    restore: Tensor


def segments_of(cu_seqlens: np.ndarray, device: torch.device) -> Segments:
    """Prepare a row's segments once, for all layers. `cu_seqlens` [S+1] int32. Blocks are laid out for CPU alone."""
    lengths = np.diff(cu_seqlens)
    rows: list[np.ndarray] = []
    blocks: list[tuple[int, int]] = []
    restore = np.zeros(int(cu_seqlens[-1]), np.int64)
    if device.type == "cpu":
        order = np.argsort(-lengths, kind="stable")
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
    gather = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)
    return Segments(
        torch.from_numpy(cu_seqlens.astype(np.int32)).to(device),
        int(lengths.max()),
        torch.from_numpy(gather),
        tuple(blocks),
        torch.from_numpy(restore),
    )


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
    """Attention of one packed row; query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d].

    Raises:
        UnpackableError: the model caps its attention scores or adds sinks to them, which is not computed here.
        AssertionError: with a batch of rows, an attention mask, dropout, or a window that is shorter than a segment.
    """
    if softcap is not None or s_aux is not None:
        raise UnpackableError("it caps its attention scores" if s_aux is None else "its attention has sinks")
    assert query.shape[0] == 1, "a packed row is a batch of one"
    assert attention_mask is None, "segments say what may be attended to"
    assert dropout == 0.0, "dropout would make old and current log-probabilities differ"
    assert sliding_window is None or segments.longest <= sliding_window, (
        f"a sequence of {segments.longest} tokens exceeds the model's attention window of {sliding_window}"
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, d]
    if query.device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        out = varlen_attn(
            q, k, v, segments.cu_seqlens, segments.cu_seqlens, segments.longest, segments.longest,
            scale=scaling, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.unsqueeze(0), None
    return _blockwise_attention(q, k, v, segments, scaling).unsqueeze(0), None


def _blockwise_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """[T, heads, d] each -> [T, heads, d]; a block of n segments is one batch of n."""
    sizes = [n * longest for n, longest in segments.blocks]
    parts = [x.index_select(0, segments.gather).split(sizes) for x in (q, k, v)]
    outputs = []
    for (n, longest), *block in zip(segments.blocks, *parts, strict=True):
        query, key, value = (x.view(n, longest, *x.shape[1:]).transpose(1, 2) for x in block)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).reshape(n * longest, *q.shape[1:]))
    return torch.cat(outputs).index_select(0, segments.restore)


def load_packed(auto_class: Any, path: str, *, key: str, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """`auto_class.from_pretrained` with packed attention; -> the model and transformers' account of the loading.

    What can be known before a forward; `model.check_packed` looks at one.

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
            raise UnpackableError("its attention takes no function from outside") from None
        if not transformer._supports_attention_backend:
            raise UnpackableError("its attention takes no function from outside")
    except UnpackableError as error:
        raise ValueError(error.of(key, path)) from None
    return transformer, info


def _no_mask(*_: Any, **__: Any) -> None:
    return None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
