"""The files that the ranks of a trained module write into a checkpoint: their slices of named tensors, in safetensors.

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

import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf.config.base import Section, error_text
from rlhf.types import SaveReport, WrittenFile

WEIGHTS, REFERENCE, RNG = "weights", "reference", "rng"
MOMENTS = ("exp_avg", "exp_avg_sq")
INDEX = "learner.json"
MODEL_FOLDER = "model"  # config.json and generation_config.json; an export needs them, a tokenizer and the weights
CHUNK_BYTES = 2**20  # read at once for the checksum
MEMORY_MARGIN = 1.25  # required free memory over the size of a copy of the state: other processes grow meanwhile
# Memory of control groups, by version: folder, files of limit and use, key in memory.stat of the reclaimable cache.
CGROUP_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_2 = ("", "memory.max", "memory.current", "inactive_file")
KEY = re.compile(r"(.*)\[(\d+):(\d+)\]")


class LearnerIndex(Section):
    """learner.json."""

    ranks: int  # and files of each kind
    adam_steps: int  # optimizer steps taken, Adam's t
    updates_done: int  # taken and skipped, the schedule's u
    shapes: dict[str, tuple[int, ...]]  # of each parameter and stored buffer

    @classmethod
    def read(cls, folder: Path) -> LearnerIndex:
        return cls.model_validate_json((folder / INDEX).read_text())


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `start + len(values)` of the flattened tensor `name`; values [n] on any device."""

    name: str
    start: int
    values: Tensor


def share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The elements [start, stop) of a rank if a tensor of `count` elements is cut into equal parts."""
    size = -(-count // ranks)
    return min(rank * size, count), min((rank + 1) * size, count)


# --- writing ---


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and sync it to the disk; OSError if it cannot be written."""
    path.touch()
    mode = path.stat().st_mode  # of any new file here; the library makes one for its owner alone
    try:
        save_file(dict(tensors), path, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from None
    path.chmod(mode)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_slices(path: Path, slices: Sequence[Slice]) -> WrittenFile:
    """Write a file of slices and sync it to the disk."""
    tensors = {f"{x.name}[{x.start}:{x.start + len(x.values)}]": x.values.detach().contiguous() for x in slices}
    save_tensors(path, {key: values for key, values in tensors.items() if len(values)})
    crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return WrittenFile(path.stat().st_size, f"{crc:08x}")


def write_rank(folder: Path, rank: int, kinds: Mapping[str, Sequence[Slice]], index: LearnerIndex | None) -> SaveReport:
    """Write a rank's files, and the index if there is one. Returns errors: files are removed once all ranks end."""
    files = {}
    try:
        for kind, slices in kinds.items():
            name = file_name(kind, rank)
            files[name] = write_slices(folder / name, slices)
        if index is not None:
            (folder / INDEX).write_text(index.model_dump_json(indent=2))  # whoever writes the manifest syncs it
    except Exception as error:  # a ValueError of a library must not end the run either
        return SaveReport(files, f"{folder}: {error_text(error)}")
    return SaveReport(files, None)


def file_name(kind: str, rank: int) -> str:
    return f"{kind}-{rank:05d}.safetensors"


def state_bytes(kinds: Mapping[str, Sequence[Slice]]) -> int:
    return sum(part.values.nbytes for slices in kinds.values() for part in slices)


def host_copy(kinds: Mapping[str, Sequence[Slice]], *, ranks_on_node: int) -> dict[str, list[Slice]] | None:
    """A copy of the slices in host memory, so that training may go on; None if the node has too little free memory."""
    if state_bytes(kinds) * ranks_on_node * MEMORY_MARGIN > free_host_memory():
        return None
    return {
        kind: [replace(part, values=part.values.detach().to("cpu", copy=True)) for part in slices]
        for kind, slices in kinds.items()
    }


def free_host_memory(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may still allocate; a container or a batch system may allow less than the machine has."""
    free = psutil.virtual_memory().available
    for line in own.read_text().splitlines() if own.is_file() else []:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount, limit, used, cache = CGROUP_1 if controllers else CGROUP_2
        top, inside = groups / mount, Path(path.lstrip("/"))
        # In a container the path may be that of the host; the top folder is then the container's own group.
        for folder in {top, *(top / part for part in (inside, *inside.parents))}:
            try:
                most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
                stat = dict(row.split() for row in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if most != "max":
                free = min(free, int(most) - now + int(stat.get(cache, 0)))
    return free


# --- reading ---


class SliceReader:
    """Reads any part of any tensor of one kind; ValueError if a file is missing or not in the safetensors format."""

    def __init__(self, folder: Path, kind: str, *, ranks: Iterable[int]) -> None:
        self._what = f"{folder}: {kind}"
        self.parts: dict[str, list[tuple[int, int, Any]]] = {}  # by tensor: start, stop, elements that are not read yet
        for path in (folder / file_name(kind, rank) for rank in ranks):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: not readable as safetensors ({error}).") from None
            for key in file.keys():  # noqa: SIM118 - not a dict
                match = KEY.fullmatch(key)
                if match is None:
                    raise ValueError(f"{path}: the key {key!r} does not have the form name[start:stop].")
                self.parts.setdefault(match[1], []).append((int(match[2]), int(match[3]), file.get_slice(key)))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened tensor, in host memory; ValueError if the files lack some of them."""
        spans = [
            (max(start, begin) - begin, min(stop, end) - begin, part)
            for begin, end, part in sorted(self.parts.get(name, ()), key=lambda held: held[0])
            if max(start, begin) < min(stop, end)
        ]
        if (held := sum(high - low for low, high, _ in spans)) != stop - start:
            raise ValueError(
                f"{self._what}: the files hold only {held} of the {stop - start} elements [{start}:{stop}] of {name}. "
                "Use another checkpoint."
            )
        parts: list[Tensor] = [part[low:high] for low, high, part in spans]
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else torch.empty(0)


def check_shapes(folder: Path, index: LearnerIndex, tensors: Mapping[str, Sequence[int]]) -> None:
    """Check that a checkpoint is of a model with these tensors; ValueError names the first other one."""
    for name in tensors.keys() | index.shapes.keys():
        saved, now = index.shapes.get(name), tuple(tensors[name]) if name in tensors else None
        if saved != now:
            shapes = f"the shape {saved} in the checkpoint, and {now} in model.path (None: it does not exist)"
            raise ValueError(f"{folder}: {name} has {shapes}. Set model.path to the model of that run.")
