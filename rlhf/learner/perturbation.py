"""Perturb weights so far that an engine must follow, and restore them: the same bits are flipped in place, twice.

Nothing is copied: copies of a model of 70 B would take 140 GB of host memory per rank. Every rank flips what it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIDE = 3  # a third of the elements: a tensor that is not perturbed with the others around it stands out
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def bits_to_flip(dtype: torch.dtype, *, all_zero: bool) -> int:
    """The bits that turn x into -x; for a tensor of zeros, the bits that turn 0 into 1."""
    number = torch.ones((), dtype=dtype) if all_zero else -torch.zeros((), dtype=dtype)
    return int(number.view(INTEGERS[dtype.itemsize]))


def flip(part: Tensor, *, first: int, bits: int) -> None:
    """Flip these bits of every STRIDE-th element of a tensor; a second call restores it bit for bit.

    Args:
        part: [n] consecutive elements of the tensor, changed in place.
        first: the index of the first of them in the tensor.
    """
    numbers = part.view(-1).view(INTEGERS[part.itemsize])
    numbers[-first % STRIDE :: STRIDE].bitwise_xor_(bits)
