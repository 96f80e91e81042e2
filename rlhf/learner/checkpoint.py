"""fp32 master weights and Adam moments by parameter name, independent of the number of learners and of DeepSpeed.

A checkpoint is a folder:

    weights-00000.safetensors   fp32 master weights and stored buffers, by the names of the Hugging Face model
    exp_avg-00000.safetensors   Adam's first moments, the same names
    exp_avg_sq-00000...         second moments
    learner.json                Adam's own step count and the shard lists

No pickle; reading it needs only safetensors. The driver adds its own files and renames the folder when it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed import utils, zero
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
SHARD_BYTES = 2 * 2**30


class ShardWriter:
    """Writes named tensors one by one into shards of bounded size, so that no process holds the whole model twice."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._pending: dict[str, Tensor] = {}
        self._bytes = 0
        self.files: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._pending[name] = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        self._bytes += self._pending[name].nbytes
        if self._bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        file = f"{self._kind}-{len(self.files):05d}.safetensors"
        save_file(self._pending, self._folder / file)
        self.files.append(file)
        self._pending, self._bytes = {}, 0


def read_shards(folder: Path, files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(folder / file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - not a dict
                yield name, shard.get_tensor(name)


class OptimizerView:
    """Full fp32 weights and moments of each parameter at every ZeRO stage.

    Reading is a collective at stages 1 to 3: every rank asks for the same parameters in the same order.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._stage = engine.zero_optimization_stage()

    def _is_plain(self, param: nn.Parameter) -> bool:
        """Whether torch's own optimizer holds the parameter, without a wrapper of DeepSpeed."""
        return self._stage == 0 and not hasattr(param, "_hp_mapping")

    def weight(self, param: nn.Parameter) -> Tensor:
        return param.detach() if self._is_plain(param) else utils.safe_get_full_fp32_param(param)

    def moment(self, param: nn.Parameter, key: str) -> Tensor:
        if self._is_plain(param):
            return self._engine.optimizer.state.get(param, {}).get(key, torch.zeros_like(param))
        return utils.safe_get_full_optimizer_state(param, key)

    def set_weight(self, param: nn.Parameter, value: Tensor) -> None:
        if not self._is_plain(param):
            utils.safe_set_full_fp32_param(param, value.to(param.device))
        with zero.GatheredParameters([param], modifier_rank=0, enabled=self._stage == 3):
            param.data.copy_(value)

    def set_moment(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        if self._is_plain(param):
            self._engine.optimizer.state[param][key] = value.to(param.device)
        else:
            utils.safe_set_full_optimizer_state(param, value.to(param.device), key)


def save_learner(
    folder: Path,
    names: dict[str, nn.Parameter],
    buffers: dict[str, Tensor],
    view: OptimizerView,
    *,
    adam_steps: int,
    write: bool,
) -> None:
    """Write weights, moments and Adam's step count. Every rank calls it; the rank with `write` writes."""
    files: dict[str, list[str]] = {}
    kinds = ("weights", *MOMENTS) if adam_steps else ("weights",)
    for kind in kinds:
        writer = ShardWriter(folder, kind)
        for name, param in names.items():
            tensor = view.weight(param) if kind == "weights" else view.moment(param, kind)
            if write:
                writer.add(name, tensor)
        if write and kind == "weights":
            for name, buffer in buffers.items():
                writer.add(name, buffer)
        writer.flush()
        files[kind] = writer.files
    if write:
        (folder / "learner.json").write_text(json.dumps({"adam_steps": adam_steps, "files": files}, indent=2))


def load_learner(folder: Path, names: dict[str, nn.Parameter], buffers: dict[str, Tensor], view: OptimizerView) -> int:
    """Put weights, moments and buffers back; the optimizer's state must exist. Returns Adam's step count.

    Raises:
        ValueError: the checkpoint belongs to another model.
    """
    index = json.loads((folder / "learner.json").read_text())
    for kind, files in index["files"].items():
        missing = dict(names)
        for name, tensor in read_shards(folder, files):
            if name in buffers:
                buffers[name].copy_(tensor)
                continue
            param = missing.pop(name, None)
            if param is None:
                raise ValueError(f"{folder}: the checkpoint has a parameter {name} that model.path does not have.")
            if kind == "weights":
                view.set_weight(param, tensor)
            else:
                view.set_moment(param, kind, tensor)
        if missing:
            raise ValueError(f"{folder}: the checkpoint lacks {next(iter(missing))}, which model.path has.")
    return int(index["adam_steps"])
