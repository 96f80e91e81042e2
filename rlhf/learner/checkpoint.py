"""What the ranks of one trained module write into a checkpoint: their own slices of named tensors, in safetensors.

    learner.json                  typed: number of ranks, shape of each tensor, optimizer steps
    weights-00000.safetensors     the slices of rank 0: fp32 master weights, and the buffers that belong to the model
    exp_avg-00000.safetensors     Adam's first moments; exp_avg_sq-... the second
    reference-00000.safetensors   the reference policy, if it moves
    rng-00000.safetensors         the rank's random generators
    model/                        config.json and generation_config.json

A key such as `model.norm.weight[0:64]` names elements 0 to 63 of the flattened tensor. The slices of all ranks together
are the whole tensor, so any number of learners reads its own part, and a reader needs neither DeepSpeed nor pickle.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf.config.base import Section
from rlhf.learner.host_memory import free_host_memory
from rlhf.types import SaveReport, WrittenFile

WEIGHTS, REFERENCE, RNG = "weights", "reference", "rng"
MOMENTS = ("exp_avg", "exp_avg_sq")
INDEX = "learner.json"
MODEL_FOLDER = "model"  # config.json and generation_config.json; an export needs them, a tokenizer and the weights
PIECE_BYTES = 64 * 2**20  # copied to the host and written at once
MEMORY_MARGIN = 1.25  # required free memory over the size of a copy of the state: other processes grow meanwhile
KEY = re.compile(r"(.*)\[(\d+):(\d+)\]")
TYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class LearnerIndex(Section):
    """learner.json.

    Attributes:
        ranks: number of ranks, and of files of each kind.
        adam_steps: optimizer steps taken, Adam's t. updates_done: taken and skipped, the schedule's u.
        shapes: of each parameter and stored buffer.
    """

    ranks: int
    adam_steps: int
    updates_done: int
    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: Path) -> LearnerIndex:
        return cls.model_validate_json((folder / INDEX).read_text())


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `start + len(values)` of the flattened tensor `name`; values [n] on any device."""

    name: str
    start: int
    values: Tensor

    @property
    def key(self) -> str:
        return f"{self.name}[{self.start}:{self.start + len(self.values)}]"


def share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements [start, stop) of a rank if a tensor of `count` elements is cut into equal parts."""
    size = -(-count // ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


# --- writing ---


def layout(
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """-> the header of a safetensors file with these tensors, and the offset of each tensor's bytes in the file.

    Wide types come first, so that each tensor is aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for name, dtype, shape in sorted(entries, key=lambda entry: -entry[1].itemsize):
        places[name] = end
        end += torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": TYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [places[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, at most PIECE_BYTES of it in host memory at once."""
    for piece in tensor.detach().reshape(-1).split(PIECE_BYTES // tensor.element_size()):
        yield memoryview(piece.cpu().contiguous().view(torch.uint8).numpy())


def write_slices(path: Path, slices: Sequence[Slice]) -> WrittenFile:
    """Write a file and sync it to the disk; the checksum is of the bytes that were meant to be written."""
    slices = sorted((part for part in slices if len(part.values)), key=lambda part: -part.values.element_size())
    head, _ = layout([(part.key, part.values.dtype, part.values.shape) for part in slices], {"format": "pt"})
    crc, size = zlib.crc32(head), len(head)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(head))
        for part in slices:
            for piece in pieces(part.values):
                _write_all(file, piece)
                crc, size = zlib.crc32(piece, crc), size + len(piece)
        os.fsync(file.fileno())
    return WrittenFile(size, f"{crc:08x}")


def _write_all(file: Any, content: memoryview) -> None:
    """A raw file may accept only a part of the bytes; writing the rest then raises the reason."""
    while len(content):
        content = content[file.write(content) :]


def write_rank(folder: Path, rank: int, kinds: Mapping[str, Sequence[Slice]], index: LearnerIndex | None) -> SaveReport:
    """Write the files of one rank, and the index if it is given.

    A disk error is returned, so that the other ranks' files can be removed once all ranks have finished.
    """
    files = {}
    try:
        for kind, slices in kinds.items():
            name = file_name(kind, rank)
            files[name] = write_slices(folder / name, slices)
        if index is not None:
            text = index.model_dump_json(indent=2).encode()
            with (folder / INDEX).open("wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            files[INDEX] = WrittenFile(len(text), f"{zlib.crc32(text):08x}")
    except OSError as error:
        return SaveReport(files, f"{folder}: {error.strerror or error}")
    return SaveReport(files, None)


def file_name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def state_bytes(kinds: Mapping[str, Sequence[Slice]]) -> int:
    return sum(part.values.nbytes for slices in kinds.values() for part in slices)


def host_copy(kinds: Mapping[str, Sequence[Slice]], *, ranks_on_node: int) -> dict[str, list[Slice]] | None:
    """The same slices in host memory, so that training may go on; None if the node's free memory is too small."""
    if state_bytes(kinds) * ranks_on_node * MEMORY_MARGIN > free_host_memory():
        return None
    return {
        kind: [replace(part, values=part.values.detach().to("cpu", copy=True)) for part in slices]
        for kind, slices in kinds.items()
    }


# --- reading ---


class SliceReader:
    """Reads any part of any tensor of one kind; only the bytes that are asked for are read.

    Raises:
        ValueError: a file is missing or is not a safetensors file. Nothing is ever unpickled.
    """

    def __init__(self, folder: Path, kind: str, *, ranks: Iterable[int]) -> None:
        self._what = f"{folder}: {kind}"
        self._parts: dict[str, list[tuple[int, int, Any]]] = {}
        for rank in ranks:
            self._open(folder / file_name(kind, rank))

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: not readable as safetensors ({error}).") from None
        for key in file.keys():  # noqa: SIM118 - not a dict
            match = KEY.fullmatch(key)
            if match is None:
                raise ValueError(f"{path}: {key!r} names no slice, as name[start:stop] does.")
            name, start, stop = match[1], int(match[2]), int(match[3])
            self._parts.setdefault(name, []).append((start, stop, file.get_slice(key)))

    @property
    def names(self) -> Iterable[str]:
        return self._parts.keys()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor, in host memory.

        Raises:
            ValueError: the files lack some of these elements.
        """
        values, read = None, 0
        for begin, end, part in self._parts.get(name, ()):
            low, high = max(start, begin), min(stop, end)
            if low >= high:
                continue
            content = part[low - begin : high - begin]
            if (low, high) == (start, stop):
                return content
            if values is None:
                values = torch.empty(stop - start, dtype=content.dtype)
            values[low - start : high - start] = content
            read += high - low
        if read != stop - start:
            raise ValueError(f"{self._what} has {read} of elements {start} to {stop} of {name}.")
        return torch.empty(0) if values is None else values


def check_shapes(folder: Path, index: LearnerIndex, tensors: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint is of a model with these tensors.

    Raises:
        ValueError: the first tensor that is missing, extra or of another shape.
    """
    for name in tensors.keys() | index.shapes.keys():
        if name not in tensors:
            raise ValueError(f"{folder}: the checkpoint has a parameter {name} that model.path does not have.")
        if name not in index.shapes:
            raise ValueError(f"{folder}: the checkpoint lacks {name}, which model.path has.")
        saved, now = index.shapes[name], tuple(tensors[name])
        if saved != now:
            raise ValueError(f"{folder}: {name} has the shape {saved} in the checkpoint, and {now} in model.path.")
