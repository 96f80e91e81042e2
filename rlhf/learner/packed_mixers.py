"""Token mixers that are not attention, computed one segment of a packed row at a time.

Convolutions, state spaces, gated delta rules and linear attention run along the row and would carry one sequence into
the next. Such a mixer is causal, so it is given the blocks in which attention is computed on CPU: a batch of segments
with padding on the right, whose outputs are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.learner.segments import MIXES, UnsharedRowError, segments_of_row, take_rows


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that mix tokens without attention; they hold a convolution, or transformers marks them as linear."""

    def mixes(module: nn.Module) -> bool:
        convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
        return convolves or vars(module).get("layer_type") == "linear_attention"

    # Some decoder layers have a layer type too; the mixer is the module inside.
    return [module for module in model.modules() if [m for m in module.modules() if mixes(m)] == [module]]


def unshared(mixer: nn.Module) -> UnsharedRowError:
    """The error of a mixer on a shared row: it runs along the whole of it."""
    return UnsharedRowError(f"its {type(mixer).__name__} {MIXES}")


def whole_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of a model with mixers: their parameters are gathered all at once, before any module computes.

    A mixer reads the weights of its convolution itself, and a layer may ask for the type of its norm. At ZeRO-3 the
    ranks have different numbers of blocks, so gathers inside the blocks would wait for each other forever.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {module for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if layer not in inner] if mixers_of(model) else []


def run_by_segments(model: nn.Module) -> None:
    """Let every mixer of the model compute packed rows."""
    for mixer in mixers_of(model):
        mixer.forward = _by_segments(mixer)
    for layer in whole_layers(model):
        from deepspeed.utils import set_z3_leaf_module

        set_z3_leaf_module(layer, True)


def _by_segments(mixer: nn.Module) -> Any:
    """The forward of a mixer, from its own, which computes a batch of single sequences."""
    whole = mixer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        segments = segments_of_row()
        if segments.group is not None:
            raise unshared(mixer)
        kwargs.pop("segments", None)  # meant for attention; fused kernels take no unknown argument
        # Padding repeats a segment's last token. Its outputs are dropped, so no gradient comes from there.
        layout = segments.layout
        shapes = [(len(block.positions), block.keys) for block in layout.blocks]
        outputs = []
        for shape, tokens in zip(shapes, layout.keys.split([n * longest for n, longest in shapes]), strict=True):

            def block(x: Any, shape: tuple[int, int] = shape, tokens: Tensor = tokens) -> Any:
                if isinstance(x, tuple):  # cosines and sines
                    return tuple(map(block, x))
                has_tokens = isinstance(x, Tensor) and x.shape[:2] == (1, len(segments.computed))
                return take_rows(x[0], tokens).unflatten(0, shape) if has_tokens else x

            out = whole(*map(block, args), **{name: block(x) for name, x in kwargs.items()})
            outputs.append(out)
        block_outputs = [(out[0] if isinstance(out, tuple) else out).flatten(0, 1) for out in outputs]
        row = torch.cat(block_outputs).index_select(0, layout.among_keys).unsqueeze(0)
        # Other results of a mixer, such as its last state, belong to a block and not to the row.
        return (row, *(None for _ in outputs[0][1:])) if isinstance(outputs[0], tuple) else row

    return forward
