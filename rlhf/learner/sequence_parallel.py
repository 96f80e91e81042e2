"""One row over several learners: each computes a part of its tokens, and attention all of them for a part of the heads.

The method is that of DeepSpeed-Ulysses (arXiv:2309.14509). S ranks hold a row of U computed tokens, n = ceil(U / S)
each; the last part repeats the row's last token where S does not divide U. Everything but attention works on a token by
itself, so on a part. Around attention two exchanges turn the row:

    q, k, v  [n, all heads, d]  --exchange-->  [U, heads / S, d]   -- attention of whole rows, of some heads
    out      [n, all heads, d]  <--exchange--  [U, heads / S, d]

What the head computes is gathered right behind it, so that a loss has the whole row on every rank. Each rank derives
that loss by its own part alone. The gradients of all ranks then add up to those of one rank that holds the row.

DeepSpeed's exchange across dimension 0 is used. Its attention module is not: it takes rows of one fixed length, and
sends position ids along to find out where sequences begin. Ours knows where they do, and that beginnings are shared.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.sequence.layer import _dim_zero_all_to_all, register_all_to_all_group
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf.learner.segments import UnsharedRowError
from rlhf.types import World


class SequenceGroup:
    """The `size` ranks that hold a row together; this one is number `rank` of them."""

    def __init__(self, world: World) -> None:
        self.size, self.rank = world.sequence_parallel, world.rank % world.sequence_parallel
        self._group, _ = dist.new_subgroups(group_size=self.size)  # consecutive ranks, as in `World`
        register_all_to_all_group(self._group)

    @classmethod
    def of(cls, world: World) -> SequenceGroup | None:
        """The group of this rank; None if every rank holds rows of its own. All ranks of the world call this."""
        return cls(world) if world.sequence_parallel > 1 else None

    def part(self, tokens: int) -> tuple[int, int, int]:
        """-> first token, number of tokens and of places of this rank's part of a row of `tokens` tokens."""
        places = -(-tokens // self.size)
        first = min(self.rank * places, tokens)
        return first, min(places, tokens - first), places

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each [n, heads, d] of this rank's tokens -> [tokens, heads / S, d] of all tokens of the row.

        Fewer key heads than S are repeated, so that each rank has those of its query heads.
        """
        if (fits := math.gcd(heads := q.shape[1], self.size)) < self.size:
            has = f"it has {heads} attention heads in a layer"
            raise UnsharedRowError(f"{has}. Set cluster.sequence_parallel to {fits}")
        copies = math.lcm(k.shape[1], self.size) // k.shape[1]
        k, v = (x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v))
        shapes = [(x.shape[1] // self.size, x.shape[2]) for x in (q, k, v)]
        sent = torch.cat([x.reshape(len(x), self.size, -1) for x in (q, k, v)], -1)  # [n, S, q and k and v]
        row = self._exchange(sent.transpose(0, 1)).flatten(0, 1)[:tokens]
        q, k, v = (x.unflatten(1, s) for x, s in zip(row.split([h * d for h, d in shapes], -1), shapes, strict=True))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """[tokens, heads / S, d] of all tokens of the row -> [n, heads, d] of this rank's tokens."""
        places = -(-len(out) // self.size)
        out = F.pad(out, (0, 0, 0, 0, 0, self.size * places - len(out)))
        return self._exchange(out.unflatten(0, (self.size, places))).transpose(0, 1).flatten(1, 2)

    def own_heads(self, values: Tensor) -> Tensor:
        """[heads] -> [heads / S], those whose attention this rank computes."""
        return values.view(self.size, -1)[self.rank]

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks. Each rank gets the whole gradient, which must be the same on all of them."""
        return _Sum.apply(x, self._group)

    def _exchange(self, x: Tensor) -> Tensor:
        """[S, ...] -> [S, ...]: part j of rank i becomes part i of rank j."""
        return _dim_zero_all_to_all(self._group, x)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
