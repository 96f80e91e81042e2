"""Causal attention inside each segment of a packed row, as an attention function of transformers.

A packed row holds S sequences, T tokens and no padding. transformers would build a dense [T, T] mask from the position
ids; here each token attends to the earlier tokens of its own segment and nothing else is computed:

    CPU   segments of similar length are gathered into [n, longest] blocks, with one causal sdpa per block. Padding
          is on the right, where no earlier token can attend to it, and its outputs are dropped. Segments that begin
          like another have fewer queries than keys; they are in blocks of their own, by their number of queries.
    CUDA  torch's variable-length flash attention takes the row, with fewer queries than keys if beginnings are shared:
          version 3 on Hopper where its package (`flash_attn_interface`) is installed, else (and if the run is
          deterministic) version 2. Flex attention computes capped scores and sinks. Blocks compute what both refuse:
          float32, heads wider than 256, values of another width than queries.

Some layers see only a part of the past. The layer's mask function tells which: here it returns a `Window`, not a mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from rlhf.algo.numerics import full_precision
from rlhf.config.sections import ModelConfig
from rlhf.learner.loading import Loaded, check_tied, load
from rlhf.learner.segments import Segments, segments_of_row, take_rows
from rlhf.learner.text_model import drop_encoders

PACKED = "packed"
# In bfloat16 the CPU kernel's backward pass sets up each of its small products anew: with so few queries float32 is
# up to 2.5 times as fast (keys 111 to 600). From there to 256 queries it is no slower.
SHORT_QUERIES = 128
FLASH_WIDTH = 256  # the widest heads of flash attention 2 and 3
OWN_RULE = "its attention mask has a rule of its own"
FLASH_3 = "flash_attn_interface"  # the module of flash attention 3, as torch imports it
# Biases that balance a router stay float32 in a bfloat16 model; most families' classes ask for that themselves.
PreTrainedModel._keep_in_fp32_modules_strict = ["e_score_correction_bias", "expert_bias"]


class UnpackableError(Exception):
    """Raised for a model whose sequences cannot share a row; the message is a clause that gives the reason."""

    def of(self, key: str, path: str) -> str:
        """The whole message for a user."""
        packed = "sequences cannot be packed into one row for this model"
        return f"{key}={path}: {packed}, since {self}. Use a model such as Qwen2, Qwen3, Llama or Mistral."


@dataclass(frozen=True)
class Window:
    """The past that a token sees in a layer: its last `size` tokens, itself included, or its chunk of `size` tokens."""

    size: int
    chunked: bool


class Scoring(NamedTuple):
    """How keys are scored for a query."""

    scale: float | None  # of the products; None: 1 / sqrt(d)
    window: int | None  # a query sees only its last tokens, itself included; None: the whole past
    softcap: float | None  # scores become softcap tanh(score / softcap)
    sinks: Tensor | None  # [heads], one more score per head, whose value vector is 0

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Window | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row; query [1, heads, U, d], key and value [1, kv_heads, U, d] -> [1, U, heads, d].

    If several ranks hold the row, all four have this rank's tokens [n] in place of the U; it computes some of the heads
    for the whole row.

    Args:
        attention_mask: the layer's window, as this module's mask function returned it.
        segments: None if the model has not passed them on; the current row's segments are used then.
        s_aux: the sinks of `Scoring`.
    """
    window, segments = attention_mask, segments or segments_of_row()
    assert query.shape[0] == 1, "a packed row is a batch of one"
    if not isinstance(window, Window | None):  # the layer has made a mask
        raise UnpackableError(OWN_RULE)
    assert dropout == 0.0, "dropout would make old and current log-probabilities differ"
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # [U, heads, d]; x[0] would copy gradients
    if vars(module).get("attn_temperature_tuning") and not module.use_rope:
        q = _scale_by_position(q, module, segments)
    group = segments.group
    if group is not None:
        q, k, v = group.to_heads(q, k, v, len(segments.computed))
        s_aux = None if s_aux is None else group.own_heads(s_aux)
    if window is not None and window.chunked:
        segments, window = segments.cut_into_chunks(window.size), None
    size = None if window is None or window.size >= segments.longest else window.size
    out = _attention(q, k, v, segments, Scoring(scaling, size, softcap, s_aux))
    return (out if group is None else group.to_tokens(out)).unsqueeze(0), None


def _attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    """q [U, heads, d], k and v [U, kv_heads, d] -> [U, heads, d], by the kernel that computes it."""
    flash = q.device.type != "cpu" and q.dtype != torch.float32 and q.shape[-1] == v.shape[-1] <= FLASH_WIDTH
    if not flash:
        return _blockwise_attention(q, k, v, segments, scoring)
    k, v = segments.expand_rows(k), segments.expand_rows(v)
    if not scoring.is_plain:
        return flex_scored_attention(q, k, v, segments, scoring)
    from torch.nn.attention.varlen import varlen_attn

    # Fewer queries than keys: both are aligned at their last token, which is always computed.
    out = varlen_attn(
        q, k, v, segments.cu_computed, segments.cu_seqlens, segments.longest, segments.longest,
        scale=scoring.scale, window_size=(-1 if scoring.window is None else scoring.window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def use_flash_attention_3() -> bool:
    """Let torch compute with flash attention 3, which is for Hopper; False without such a GPU or the package."""
    from torch.nn.attention import activate_flash_attention_impl

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if not hopper or find_spec(FLASH_3) is None:
        return False
    activate_flash_attention_impl("FA3")
    return True


def _scale_by_position(q: Tensor, module: Any, segments: Segments) -> Tensor:
    """Llama 4 scales queries [n, heads, d] by their position in the row: scale by the position in the segment instead.

    The scale at position t is 1 + attn_scale ln(1 + floor((t + 1) / floor_scale)), in layers without rotary positions.
    """

    def scale(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale)) * module.attn_scale + 1

    position = segments.positions()[1][segments.held]
    ratio = scale(position) / scale(torch.arange(len(q), device=q.device))
    return (q * ratio[:, None, None]).to(q.dtype)


def _blockwise_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    """q [U, heads, d], k and v [U, kv_heads, d] -> [U, heads, d]; a block of n segments is one batch of n."""
    layout = segments.layout
    queries = take_rows(q, layout.queries).split([block.positions.numel() for block in layout.blocks])
    keys, values = (take_rows(x, layout.keys).split([len(b.positions) * b.keys for b in layout.blocks]) for x in (k, v))
    outputs = []
    for block, *parts in zip(layout.blocks, queries, keys, values, strict=True):
        query, key, value = (x.view(len(block.positions), -1, *x.shape[1:]).transpose(1, 2) for x in parts)
        if q.device.type == "cpu" and query.shape[-2] <= SHORT_QUERIES:
            query, key, value = full_precision(query), full_precision(key), full_precision(value)
        seen = block.visible(scoring.window)
        if scoring.is_plain:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                query, key, value, seen, is_causal=seen is None, scale=scoring.scale, enable_gqa=grouped
            )
        else:
            out = _attention_by_matrix(query, key, value, seen, scoring)
        outputs.append(out.to(q.dtype).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.among_queries)


def _attention_by_matrix(query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scoring: Scoring) -> Tensor:
    """Attention that stores the score matrix.

    Args:
        query: [n, heads, Q, d]; key and value: [n, kv_heads, K, d].
        seen: [n, 1, Q, K] bool, True where a query sees a key; None = causal.

    Returns:
        [n, heads, Q, d].
    """
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = full_precision(query @ key.transpose(-1, -2)) * scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~seen, float("-inf"))
    if scoring.sinks is not None:
        sink = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    return scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype) @ value


def flex_scored_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scoring: Scoring) -> Tensor:
    """On a GPU: q [U, heads, d] of the computed tokens, k and v [T, kv_heads, d] of the whole row -> [U, heads, d].

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
    return out[0].transpose(0, 1)


def _block_mask(segments: Segments, window: int | None) -> BlockMask:
    """Which tokens of the row each computed token sees, made once for all layers with this window."""
    masks = segments.block_masks
    if window not in masks:
        segment, position = segments.positions()
        query_segment, query_position = segment[segments.computed], position[segments.computed]

        def seen(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            past = (query_segment[query] == segment[key]) & (position[key] <= query_position[query])
            return past if window is None else past & (position[key] > query_position[query] - window)

        make, device = _compiled(create_block_mask, segment.device.type), segment.device
        masks[window] = make(seen, B=None, H=None, Q_LEN=len(query_segment), KV_LEN=len(segment), device=device)
    return masks[window]


@functools.cache
def _compiled(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function compiled for any length; on CPU, where only tests run it, traced and then run step by step."""
    return torch.compile(function, dynamic=True, backend="inductor" if device == "cuda" else "aot_eager")


def load_packed(
    auto_class: Any, path: str, model: ModelConfig, *, key: str, without_data: bool = False, **options: Any
) -> Loaded:
    """`loading.load` with packed attention. Of a checkpoint that wraps a text model, only that one is returned.

    ValueError if the model does not take packed rows, by what is known before a forward (`policy_model.check_packed`).
    """
    refusal = ValueError(UnpackableError("its attention cannot be replaced").of(key, path))
    try:
        transformer, report = load(
            auto_class, path, model, without_data=without_data, attn_implementation=PACKED, **options
        )
    except KeyError as error:
        if error.args != (PACKED,):
            raise
        raise refusal from None
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        lacks = f"no {auto_class.__name__.removeprefix('AutoModelFor')} class for this type of model"
        raise ValueError(f"{key}={path}: transformers has {lacks}. Use another model.") from None
    module = type(transformer).__module__  # hybrids of transformers set no flag
    looks_up = module.startswith("transformers.") and hasattr(sys.modules[module], "ALL_ATTENTION_FUNCTIONS")
    if not (transformer.is_backend_compatible() or looks_up):
        raise refusal
    check_tied(transformer, path, key=key)
    transformer = drop_encoders(transformer)
    _restore_rotary_frequencies(transformer)
    return transformer, report


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


def _window_of_mask(
    *_: Any, config: Any, local_size: int | None = None, use_vmap: bool = False, **__: Any
) -> Window | None:
    """In place of a mask: the window or chunk of the layers that it is for; None if they see the whole past."""
    if use_vmap:  # the model adds a rule
        raise UnpackableError(OWN_RULE)
    if local_size is None:
        return None
    return Window(local_size, chunked=vars(config).get("attention_chunk_size") == local_size)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _window_of_mask)
# The starts of the sequences are known; transformers would ask the device for them in every forward, and wait.
masking_utils.find_packed_sequence_indices = lambda position_ids: None
