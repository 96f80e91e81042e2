"""Token mixers that are not attention, computed one segment of a packed row at a time.

Convolutions, state spaces, gated delta rules and linear attention run along the row and would carry one sequence into
the next. Such a mixer is causal, so it is given the blocks in which attention is computed on CPU: a batch of segments
with padding on the right, whose outputs are dropped.

The mixers are told the row's segments here and not by an argument, since many decoder layers pass them none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rlhf.learner.attention import Segments, take_rows

_SEGMENTS: ContextVar[Segments | None] = ContextVar("segments of the row that is computed", default=None)


@contextlib.contextmanager
def row_of(segments: Segments | None) -> Iterator[None]:
    """Within this context mixers compute the row of these segments."""
    token = _SEGMENTS.set(segments)
    try:
        yield
    finally:
        _SEGMENTS.reset(token)


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of gradient checkpointing: layers are recomputed on the row of their forward."""
    return contextlib.nullcontext(), row_of(_SEGMENTS.get())


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens without attention; they hold a convolution, or transformers marks them as linear."""

    def mixes(module: nn.Module) -> bool:
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        return convolves or vars(module).get("layer_type") == "linear_attention"

    return [module for module in model.modules() if mixes(module)]


def run_by_segments(model: nn.Module) -> None:
    """Let every mixer of the model compute packed rows.

    At ZeRO-3 the parameters of a mixer are gathered together, once: the ranks have different numbers of blocks, so
    gathers inside the blocks would wait for each other forever.
    """
    for mixer in mixers_of(model):
        mixer.forward = _by_segments(mixer.forward)
        mixer._z3_leaf = True  # type: ignore[assignment]  # what deepspeed.utils.set_z3_leaf_module sets


def _by_segments(whole: Any) -> Any:
    """The forward of a mixer, from one that computes a batch of single sequences."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        segments = _SEGMENTS.get()
        assert segments is not None, "row_of() says which row is computed"
        kwargs.pop("segments", None)  # meant for attention; fused kernels take no unknown argument
        sizes = [n * longest for n, longest in segments.blocks]
        outputs = []
        for shape, places in zip(segments.blocks, segments.gather.split(sizes), strict=True):

            def block(x: Any, shape: tuple[int, int] = shape, places: Tensor = places) -> Any:
                of_tokens = isinstance(x, Tensor) and x.shape[:2] == (1, len(segments.computed))
                return take_rows(x[0], places).unflatten(0, shape) if of_tokens else x

            out = whole(*tree_map(block, args), **tree_map(block, kwargs))
            outputs.append(out)
        of_blocks = [(out[0] if isinstance(out, tuple) else out).flatten(0, 1) for out in outputs]
        row = torch.cat(of_blocks).index_select(0, segments.restore).unsqueeze(0)
        # What else a mixer returns, as its last state, is of a block and not of the row.
        return (row, *(None for _ in outputs[0][1:])) if isinstance(outputs[0], tuple) else row

    return forward
