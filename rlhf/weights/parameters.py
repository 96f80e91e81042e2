"""The published tensors, and where their bytes are in a node's copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf.algo.sizes import BUCKET_BYTES

ALIGNMENT = 64  # bytes; every bucket begins at a multiple of it
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


@dataclass(frozen=True)
class ParameterMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def bytes(self) -> int:
        return self.numel * self.torch_dtype.itemsize


class ParameterSource(Protocol):
    """The tensors that the learner publishes: their list, and a stream of whole tensors in the same order.

    Iterating may be a collective, so every rank iterates in step. Tensors with larger elements come first: vLLM packs
    them without gaps, and views a tensor of float32 only at a multiple of 4 bytes.
    """

    def metadata(self) -> list[ParameterMeta]: ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    def own_parts(self) -> list[tuple[Tensor, int]]:
        """For each tensor the part that this rank compares, flat, and the number of its first element; no collective.

        Each element is in the part of exactly one rank. A part is a view, and may be empty.
        """
        ...


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters of one type; their bytes begin at `start` of the memory of all buckets."""

    start: int
    parameters: list[ParameterMeta]

    @property
    def end(self) -> int:
        return self.start + sum(meta.bytes for meta in self.parameters)

    @property
    def elements(self) -> int:
        return sum(meta.numel for meta in self.parameters)

    @property
    def itemsize(self) -> int:
        return self.parameters[0].torch_dtype.itemsize

    def tensors_in(self, own: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and its part of the bucket's bytes, uint8 [end - start], not a copy."""
        flat = own.view(self.parameters[0].torch_dtype)
        for meta, part in zip(self.parameters, flat.split([meta.numel for meta in self.parameters]), strict=True):
            yield meta.name, part.view(meta.shape)


def buckets(metadata: Iterable[ParameterMeta], bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut the parameters into buckets of at most `bucket_bytes`; a single larger tensor has a bucket of its own."""
    cut: list[Bucket] = []
    filled = 0
    for meta in metadata:
        if not cut or cut[-1].parameters[0].dtype != meta.dtype or filled + meta.bytes > bucket_bytes:
            cut.append(Bucket(-(-cut[-1].end // ALIGNMENT) * ALIGNMENT if cut else 0, []))
            filled = 0
        cut[-1].parameters.append(meta)
        filled += meta.bytes
    return cut
