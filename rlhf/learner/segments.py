"""The sequences of a packed row, laid out for attention and for other token mixers.

A prompt that samples share goes through the transformer once: if a sequence begins like the previous one, the shared
tokens are not computed again. The transformer sees U of the row's T tokens, and attention repeats keys and values.
If several ranks hold the row, it sees this rank's part of the U, the *held* tokens, and attention sees all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.algo.numerics import add_rows, full_precision, segment_ids

if TYPE_CHECKING:
    from rlhf.learner.sequence_parallel import SequenceGroup

MIXES = "mixes tokens outside of attention. Set cluster.sequence_parallel to 1"

SIMILAR_LENGTH = 0.75  # segments of one block are at least this share of its longest: at most 1/3 padding


class UnsharedRowError(Exception):
    """Raised where several ranks cannot compute a row together; the message is a clause with reason and remedy."""

    def of(self, ranks: int, key: str, path: str) -> str:
        """The whole message for a user."""
        return f"{key}={path}: {ranks} learners cannot share a sequence of this model, since {self}."


@dataclass(frozen=True)
class Block:
    """Segments whose attention is one batch: `positions` [n, queries] int64, each query's position in its segment.

    Each segment has `keys` tokens, padded on the right. `whole`: no beginning is shared, so queries are keys.
    """

    positions: Tensor
    keys: int
    whole: bool

    def visible(self, window: int | None) -> Tensor | None:
        """[n, 1, queries, keys] bool, True where a query attends to a key; None where that is plainly causal."""
        window = None if window is None or window >= self.keys else window
        if self.whole and window is None:
            return None
        keys, queries = torch.arange(self.keys, device=self.positions.device), self.positions[:, None, :, None]
        return keys <= queries if window is None else (keys <= queries) & (keys > queries - window)


class Layout(NamedTuple):
    """All blocks of a row, one after another; padding repeats a segment's last token."""

    blocks: tuple[Block, ...]
    keys: Tensor  # [K] int64, the computed token at each place
    queries: Tensor  # [Q] int64, the same
    among_keys: Tensor  # [U] int64, the place of each computed token
    among_queries: Tensor


class Segments:
    """The sequences of a packed row, in the form that attention needs; made once per row, for all layers."""

    experts: Tensor | None = None  # [n, layers, k] int16, recorded for the held tokens; None: the routers choose

    def __init__(
        self, bounds: np.ndarray, shared: np.ndarray, source: np.ndarray, computed: Tensor, expand: Tensor | None,
        group: SequenceGroup | None = None,
    ) -> None:  # fmt: skip
        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(computed.device)

        lengths = np.diff(bounds)
        self.bounds = bounds  # [S+1] of the whole row, on the host
        self.cu_seqlens = put(bounds)  # int32, the same on the device
        self.longest = int(lengths.max())
        self.shared = shared  # [S] int64, the leading tokens of each segment that are shared with the previous one
        # [S+1] int32 of the computed tokens alone, which are the last ones of each segment
        self.cu_computed = put(np.concatenate([[0], np.cumsum(lengths - shared)]))
        self.computed = computed  # [U] int64, the row's tokens that are computed
        self.source = source  # [T] int64 on the host, the index among the U of each token of the row
        self.expand = expand  # the same on the device; None if all tokens are computed
        self.group = group  # the ranks that hold the row; None: this one alone
        self.held, self.state_of = computed, expand  # [n], and [T] as `expand`, but among the n held tokens
        self.held_count = len(computed)  # without the last token's repetitions at the end of `held`
        self.holds: np.ndarray | None = None  # [T] bool on the host, the tokens whose state is held; None: all
        if group is not None:
            first, count, places = group.part(len(computed))
            self.held_count = count
            places_held = torch.arange(first, first + places, device=computed.device)
            self.held = computed[places_held.clamp(max=len(computed) - 1)]
            self.holds = (source >= first) & (source < first + count)
            self.state_of = torch.from_numpy(source - first).to(computed.device)
        self.block_masks: dict[int | None, Any] = {}  # a cache of flex attention, by window
        self._chunked: dict[int, Segments] = {}

    def expand_rows(self, x: Tensor) -> Tensor:
        """[U, ...] of the computed tokens -> [T, ...] of all tokens of the row."""
        return x if self.expand is None else take_rows(x, self.expand)

    def held_rows(self) -> tuple[Tensor | None, Tensor]:
        """-> index among the held tokens of every token of the row whose state is held, None if it counts up from 0;
        and [S+1] int64, where the tokens of each segment begin among them."""
        if self.holds is None:
            return self.expand, self.cu_seqlens.long()
        before = np.concatenate([[0], np.cumsum(self.holds)])
        assert self.state_of is not None
        device = self.computed.device
        return self.state_of[torch.from_numpy(self.holds).to(device)], torch.from_numpy(before[self.bounds]).to(device)

    def positions(self) -> tuple[Tensor, Tensor]:
        """-> the segment of each token of the row, and its position there; both [T] int64."""
        tokens = torch.arange(len(self.source), device=self.computed.device)
        segment = segment_ids(self.cu_seqlens, len(tokens))
        return segment, tokens - self.cu_seqlens[segment]

    def cut_into_chunks(self, size: int) -> Segments:
        """The whole row with each segment cut into chunks of `size` tokens, which do not see each other."""
        if size >= self.longest:
            return self
        if size not in self._chunked:
            spans = itertools.pairwise(self.bounds.tolist())
            bounds = np.concatenate([*(np.arange(start, end, size) for start, end in spans), self.bounds[-1:]])
            segment = np.searchsorted(self.bounds, bounds[:-1], side="right") - 1
            shared = np.clip((self.bounds[:-1] + self.shared)[segment] - bounds[:-1], 0, np.diff(bounds))
            self._chunked[size] = Segments(bounds, shared, self.source, self.computed, self.expand)
        return self._chunked[size]

    @functools.cached_property
    def layout(self) -> Layout:
        """The blocks, made when they are first needed."""
        bounds, shared, device = self.bounds, self.shared, self.computed.device
        lengths = np.diff(bounds)
        own_lengths = lengths - shared
        # Segments that share nothing are of class 0; in another one, numbers of queries differ by a factor of up to 2.
        classes = np.where(shared > 0, np.ceil(np.log2(np.maximum(own_lengths, 1))).astype(np.int64) + 1, 0)
        order = np.lexsort((-lengths, classes))
        keys: list[np.ndarray] = []
        queries: list[np.ndarray] = []
        blocks: list[Block] = []
        start = 0
        while start < len(order):
            first, rest = order[start], order[start:]
            fits = (classes[rest] == classes[first]) & (lengths[rest] >= SIMILAR_LENGTH * lengths[first])
            stop = start + (len(fits) if fits.all() else int(np.argmin(fits)))
            rows = order[start:stop, None]
            positions = np.minimum(shared[rows] + np.arange(max(1, own_lengths[rows].max())), lengths[rows] - 1)
            keys.append((bounds[rows] + np.minimum(np.arange(lengths[first]), lengths[rows] - 1)).ravel())
            queries.append((bounds[rows] + positions).ravel())
            blocks.append(Block(torch.from_numpy(positions).to(device), int(lengths[first]), whole=not classes[first]))
            start = stop

        def computed_at(tokens: np.ndarray) -> Tensor:
            return torch.from_numpy(self.source[tokens]).to(device)

        def place_among(tokens: np.ndarray) -> Tensor:
            first_index = np.zeros(int(bounds[-1]), np.int64)
            # Padding repeats a token: its first index counts.
            first_index[tokens[::-1]] = np.arange(len(tokens))[::-1]
            return torch.from_numpy(first_index).to(device)[self.computed]

        row_keys, row_queries = np.concatenate(keys), np.concatenate(queries)
        places = place_among(row_keys), place_among(row_queries)
        return Layout(tuple(blocks), computed_at(row_keys), computed_at(row_queries), *places)


def segments_of(
    cu_seqlens: np.ndarray, shared: np.ndarray, device: torch.device, group: SequenceGroup | None = None
) -> Segments:
    """The segments of a row with these bounds [S+1] int64 and shared beginnings [S] int64, which `group` holds."""
    source = np.zeros(int(cu_seqlens[-1]), np.int64)
    is_computed = np.ones(len(source), bool)
    beginnings = list(zip(cu_seqlens[:-1].tolist(), shared.tolist(), strict=True))
    for start, count in beginnings:
        is_computed[start : start + count] = False
    source[is_computed] = np.arange(is_computed.sum())
    before = 0
    for start, count in beginnings:
        source[start : start + count] = source[before : before + count]
        before = start
    expand = torch.from_numpy(source).to(device) if shared.any() else None
    return Segments(cu_seqlens, shared, source, torch.from_numpy(np.flatnonzero(is_computed)).to(device), expand, group)


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
    """x[index] along the first dimension; the gradients of a row that is taken several times are summed in float32.

    In bfloat16 a sum of hundreds of gradients, as for a prompt that all sequences share, would stop growing.
    """
    return _TakeRows.apply(x, index)


# Many decoder layers do not pass our arguments on to their token mixers.
_SEGMENTS: ContextVar[Segments | None] = ContextVar("segments of the row that is computed", default=None)


@contextlib.contextmanager
def row_of(segments: Segments | None) -> Iterator[None]:
    """A context in which `segments_of_row` returns these segments."""
    token = _SEGMENTS.set(segments)
    try:
        yield
    finally:
        _SEGMENTS.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of gradient checkpointing: layers are recomputed on the row of their forward."""
    return contextlib.nullcontext(), row_of(_SEGMENTS.get())


def segments_of_row() -> Segments:
    """The segments of the row that is being computed."""
    segments = _SEGMENTS.get()
    assert segments is not None, "row_of() says which row is computed"
    return segments
