"""Sends only the changed elements of the weights: every learner rank finds its own, and rank 0 sends all of them.

    rank r                                  rank 0                            a node of engines
    ------                                  ------                            -----------------
    which bits differ from the
    last transfer?            -- counts --> how many in all?
    a patch of each bucket    ------------> one after another     ----------> checksum, then into the node's copy

Nothing is gathered whole. An update below |w| / 256 is not visible in bfloat16, so at the learning rates of RL only
some percent of the elements change in a step. The bytes of a patch, for n changes of a bucket:

    checksum 8 | changes in each block of BLOCK elements, 4 each | new values | places in their block, 2 n

so that a changed bfloat16 element costs 4 bytes. Values are compared and copied as integers: bit for bit.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.weights.parameters import INTEGERS, Bucket, ParameterSource

BLOCK = 2**16  # elements whose places fit in 2 bytes
CHECKSUM_BYTES = 8


def _blocks(bucket: Bucket) -> int:
    """An even number, so that values of 8 bytes stay aligned."""
    return 2 * -(-bucket.elements // (2 * BLOCK))


def patch_bytes(bucket: Bucket, changes: int) -> int:
    return CHECKSUM_BYTES + 4 * _blocks(bucket) + changes * (bucket.itemsize + 2)


def make_patch(bucket: Bucket, places: Tensor, values: Tensor) -> Tensor:
    """The bytes of a patch, uint8 in host memory.

    `places`: [n] int64, ascending elements of the bucket; `values`: [n], the new ones, integers of the bucket's width.
    """
    counts = torch.bincount(places // BLOCK, minlength=_blocks(bucket)).to(torch.int32)
    within = (places % BLOCK - BLOCK // 2).to(torch.int16)
    body = torch.cat([part.view(torch.uint8) for part in (counts, values, within)]).cpu()
    return torch.cat([torch.tensor([_checksum(body)]).view(torch.uint8), body])


def write_patch(bucket: Bucket, own: Tensor, patch: Tensor) -> bool:
    """Write a patch into the bucket's bytes, uint8 [end - start]; False, and nothing is written, if it is damaged."""
    checksum, body = patch[:CHECKSUM_BYTES], patch[CHECKSUM_BYTES:]
    if int(checksum.view(torch.int64)) != _checksum(body):
        return False
    blocks = _blocks(bucket)
    counts = body[: 4 * blocks].view(torch.int32)
    split = len(body) - 2 * int(counts.sum())
    values, within = body[4 * blocks : split].view(INTEGERS[bucket.itemsize]), body[split:].view(torch.int16)
    firsts = torch.arange(blocks) * BLOCK + BLOCK // 2
    own.view(values.dtype)[torch.repeat_interleave(firsts, counts) + within] = values
    return True


def _checksum(body: Tensor) -> int:
    return zlib.crc32(body.numpy().data)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])


class Changes:
    """A copy in host memory of this rank's parts as they were sent last, and the changes since then."""

    def __init__(self, source: ParameterSource, cut: Sequence[Bucket]) -> None:
        self._source, self._buckets = source, cut
        firsts = itertools.accumulate((len(bucket.parameters) for bucket in cut), initial=0)
        self._tensors = [slice(*pair) for pair in itertools.pairwise(firsts)]  # of each bucket
        alone = not dist.is_initialized()
        self._rank, self._ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._sent: list[Tensor] = []

    def remember(self) -> None:
        """Copy the present weights, which the engines now have."""
        self._sent = []  # freed first
        self._sent = [_bits(part).to("cpu", copy=True) for part, _ in self._source.own_parts()]

    def count(self) -> Tensor:
        """[ranks, tensors] int64, the numbers of changed elements in the part of every rank; a collective."""
        parts = self._source.own_parts()
        counts = torch.stack(
            [(_bits(part) != sent.to(part.device)).sum() for (part, _), sent in zip(parts, self._sent, strict=True)]
        )
        if self._ranks == 1:
            return counts[None].cpu()
        by_rank = [torch.empty_like(counts) for _ in range(self._ranks)]
        dist.all_gather(by_rank, counts)
        return torch.stack(by_rank).cpu()

    def _changed(self, counts: Tensor) -> Iterator[tuple[int, int, int]]:
        """(number of a bucket, rank, number of this rank's changes in it), in the order of sending."""
        for number, tensors in enumerate(self._tensors):
            by_rank = counts[:, tensors].sum(1).tolist()
            yield from ((number, rank, changes) for rank, changes in enumerate(by_rank) if changes)

    def messages(self, counts: Tensor) -> list[tuple[int, int]]:
        """(number of the bucket, bytes) of each patch that `patches` yields."""
        return [(number, patch_bytes(self._buckets[number], n)) for number, _, n in self._changed(counts)]

    def patches(self, counts: Tensor) -> Iterator[tuple[int, Tensor]]:
        """On rank 0: (number of the bucket, patch) of all ranks. The other ranks send theirs meanwhile.

        `counts`: the result of `count`; no weight may have changed since.
        """
        parts = self._source.own_parts()
        device = parts[0][0].device  # of the learners' group
        for number, rank, changes in self._changed(counts):
            bucket, tensors = self._buckets[number], self._tensors[number]
            if rank == self._rank:
                patch = self._own_patch(bucket, parts[tensors], self._sent[tensors])
                if rank == 0:
                    yield number, patch
                else:
                    dist.send(patch.to(device), 0)
            elif self._rank == 0:
                patch = torch.empty(patch_bytes(bucket, changes), dtype=torch.uint8, device=device)
                dist.recv(patch, rank)
                yield number, patch.cpu()

    def _own_patch(self, bucket: Bucket, parts: Sequence[tuple[Tensor, int]], sent: Sequence[Tensor]) -> Tensor:
        """The patch of this rank; its changes count as sent from now on."""
        places, values, start = [], [], 0
        for meta, (part, first), before in zip(bucket.parameters, parts, sent, strict=True):
            now = _bits(part)
            changed = (now != before.to(now.device)).nonzero().view(-1)
            places.append(start + first + changed)
            values.append(now[changed])
            if len(changed):
                before.copy_(now)
            start += meta.numel
        return make_patch(bucket, torch.cat(places), torch.cat(values))

    def on_all_ranks(self, holds: bool) -> bool:
        """Rank 0's value of `holds`; a collective."""
        if self._ranks == 1:
            return holds
        answer = torch.tensor([holds], dtype=torch.int32, device=self._source.own_parts()[0][0].device)
        dist.broadcast(answer, 0)
        return bool(answer)
