"""The files of a checkpoint: slices of named tensors that any number of ranks reads back, bit for bit."""

from __future__ import annotations

import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import state_of
from safetensors import safe_open

from rlhf.learner.rank_checkpoint import (
    LearnerIndex,
    Slice,
    SliceReader,
    check_shapes,
    free_host_memory,
    host_copy,
    share,
    write_rank,
    write_slices,
)

TENSORS = {"a.weight": torch.randn(7, 5), "b": torch.randn(3), "scale": torch.tensor(2.5)}


def index_of(ranks: int) -> LearnerIndex:
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    return LearnerIndex(ranks=ranks, adam_steps=3, updates_done=4, shapes=shapes)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (5, 2), (40, 1)])
def test_any_number_of_ranks_reads_what_any_number_has_written(tmp_path: Path, writers: int, readers: int) -> None:
    for rank in range(writers):
        report = write_rank(tmp_path, rank, state_of(TENSORS, rank, writers), None if rank else index_of(writers))
        assert report.error is None
        for name, file in report.files.items():
            content = (tmp_path / name).read_bytes()
            assert (file.bytes, file.crc32) == (len(content), f"{zlib.crc32(content):08x}")
    index = LearnerIndex.read(tmp_path)
    assert index == index_of(writers)
    for kind, factor in (("weights", 1.0), ("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        reader = SliceReader(tmp_path, kind, ranks=range(index.ranks))
        for name, tensor in TENSORS.items():
            spans = [share(tensor.numel(), rank, readers) for rank in range(readers)]
            parts = [reader.read(name, start, stop) for start, stop in spans if start < stop]
            assert torch.equal(torch.cat(parts).view(tensor.shape), factor * tensor)


def test_tensors_of_several_types_come_back_in_their_own(tmp_path: Path) -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(3, dtype=torch.uint8),
        torch.randn(3).bfloat16(),
        torch.randn(5).half(),
        torch.randn(1, dtype=torch.float64),
        torch.arange(4),
        torch.empty(0),
    ]
    write_slices(tmp_path / "weights-00000.safetensors", [Slice(str(i), 0, t) for i, t in enumerate(tensors)])
    reader = SliceReader(tmp_path, "weights", ranks=[0])
    for i, tensor in enumerate(tensors[:-1]):
        read = reader.read(str(i), 0, len(tensor))
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_elements_that_no_file_holds_are_named(tmp_path: Path) -> None:
    for rank in range(2):
        write_rank(tmp_path, rank, state_of(TENSORS, rank, 2), None)
    reader = SliceReader(tmp_path, "weights", ranks=[1])
    with pytest.raises(ValueError, match=r"weights\b.*\b17\b.*\b0\b.*\b35\b.*\ba\.weight\b"):
        reader.read("a.weight", 0, 35)
    with pytest.raises(ValueError, match=r"weights\b.*\b0\b.*\b0\b.*\b2\b.*\bc\b"):
        reader.read("c", 0, 2)
    with pytest.raises(ValueError, match=r"weights-00002\.safetensors"):
        SliceReader(tmp_path, "weights", ranks=range(3))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.path,)


def test_a_pickle_in_place_of_a_file_is_not_opened_as_one(tmp_path: Path) -> None:
    content = pickle.dumps(Bomb(tmp_path / "exploded"))
    (tmp_path / "weights-00000.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights-00000\.safetensors"):
        SliceReader(tmp_path, "weights", ranks=[0])
    assert not (tmp_path / "exploded").exists()
    pickle.loads(content)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b": None}, r"\bb\b.*\(3,\).*\bNone\b.*model\.path"),
        ({"c": (1,)}, r"\bc\b.*\bNone\b.*\(1,\).*model\.path"),
        ({"a.weight": (5, 7)}, r"\ba\.weight\b.*\(7, 5\).*\(5, 7\).*model\.path"),
    ],
)
def test_another_models_checkpoint_is_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    shapes = {name: shape for name, shape in {**index_of(1).shapes, **change}.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        check_shapes(tmp_path, index_of(1), shapes)
    check_shapes(tmp_path, index_of(1), index_of(1).shapes)


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    write_slices(tmp_path / "x.safetensors", [Slice("t", 4, torch.arange(6.0))])
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("t[4:10]"), torch.arange(6.0))
    (tmp_path / "other").touch()
    assert (tmp_path / "x.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_copy_for_writing_later_is_made_where_the_nodes_memory_holds_it(tmp_path: Path) -> None:
    values = torch.ones(1000)
    state = {"weights": [Slice("w", 0, values)]}
    copy = host_copy(state, ranks_on_node=8)
    values.fill_(2.0)  # training goes on
    assert copy is not None
    assert (copy["weights"][0].values == 1.0).all()
    assert host_copy(state, ranks_on_node=10**12) is None


def test_free_memory_is_within_the_limits_of_a_container_or_a_job(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    free = free_host_memory(nowhere, nowhere)
    (tmp_path / "cgroup").write_text("0::/job\n")
    job = tmp_path / "job"
    job.mkdir()
    (job / "memory.current").write_text("700\n")
    (job / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    (job / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path, tmp_path / "cgroup") > free / 2 > 1000
    (job / "memory.max").write_text("1000\n")
    assert free_host_memory(tmp_path, tmp_path / "cgroup") == 350
