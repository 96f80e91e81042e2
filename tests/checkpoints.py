"""Checkpoints of a real model, written without the stack, and ranks that write them as those of a cluster do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlhf.learner.rank_checkpoint import (
    MODEL_FOLDER,
    MOMENTS,
    WEIGHTS,
    LearnerIndex,
    Slice,
    share,
    state_bytes,
    write_rank,
)
from rlhf.run.folder import RunFolder
from rlhf.run.state import RunState
from rlhf.types import WrittenFile

FACTORS = dict(zip((WEIGHTS, *MOMENTS), (1.0, 0.5, 0.25), strict=True))


def state_of(
    tensors: dict[str, torch.Tensor], rank: int, ranks: int, kinds: Sequence[str] = tuple(FACTORS)
) -> dict[str, list[Slice]]:
    """What one rank holds of fp32 weights and moments, cut as stage 3 does."""

    def part(name: str, values: torch.Tensor) -> Slice:
        start, stop = share(values.numel(), rank, ranks)
        return Slice(name, start, values.detach().float().reshape(-1)[start:stop])

    return {kind: [part(name, FACTORS[kind] * values) for name, values in tensors.items()] for kind in kinds}


class Ranks:
    """Stands for the cluster of a run: its ranks write the slices of `tensors` to the disk, as real ones do."""

    def __init__(self, tensors: dict[str, torch.Tensor], ranks: int, kinds: Sequence[str] = tuple(FACTORS)) -> None:
        self._tensors, self._ranks, self._kinds = tensors, ranks, kinds

    def _state(self, rank: int) -> dict[str, list[Slice]]:
        return state_of(self._tensors, rank, self._ranks, self._kinds)

    async def bytes(self) -> int:
        return sum(state_bytes(self._state(rank)) for rank in range(self._ranks))

    async def save(self, folder: Path) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        index = LearnerIndex(ranks=self._ranks, adam_steps=3, updates_done=4, shapes=shapes)
        self._reports = [
            write_rank(folder, rank, self._state(rank), None if rank else index) for rank in range(self._ranks)
        ]

    async def finish_save(self) -> dict[str, WrittenFile]:
        if errors := [report.error for report in self._reports if report.error]:
            raise OSError(errors[0])
        return {name: file for report in self._reports for name, file in report.files.items()}


async def write_checkpoint(
    run: RunFolder, state: RunState, tensors: dict[str, torch.Tensor], *, ranks: int = 2, keep: int = 9
) -> Path:
    """One checkpoint of these tensors."""
    cluster, partial = Ranks(tensors, ranks), run.begin_checkpoint(state.step)
    await cluster.save(partial)
    return run.finish_checkpoint(partial, state, keep=keep, written=await cluster.finish_save())


async def write_model_checkpoint(
    run: RunFolder, state: RunState, model: Path, tensors: dict[str, Any] | None = None
) -> tuple[Path, dict[str, Any]]:
    """One checkpoint of a model folder's weights, or of an adapter of it, and these as the learner would hold them."""
    from transformers import AutoTokenizer

    from rlhf.learner.hub_format import model_tensors, start_generation_config, write_model_config
    from rlhf.learner.text_model import drop_encoders, language_model

    _, kind = language_model(str(model), trust_remote_code=False)
    transformer = drop_encoders(kind.from_pretrained(model, dtype=getattr(torch, state.config["model"]["dtype"])))
    tensors = tensors or model_tensors(transformer)
    cluster, partial = Ranks(tensors, 3, [WEIGHTS]), run.begin_checkpoint(state.step)
    await cluster.save(partial)
    write_model_config(partial / MODEL_FOLDER, transformer, start_generation_config(str(model)))
    AutoTokenizer.from_pretrained(model).save_pretrained(partial / MODEL_FOLDER)
    return run.finish_checkpoint(partial, state, keep=9, written=await cluster.finish_save()), tensors
