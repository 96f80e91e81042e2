"""The reference policy of a learner: fixed, replaced by the policy at intervals, or a moving average of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.learner.checkpoint import ShardWriter, read_shards
from rlhf.learner.policy_model import PolicyModel
from rlhf.learner.rank import TrainedRank

KIND = "reference"


class Reference:
    """Frozen weights of the policy's architecture, partitioned like the policy at ZeRO-3.

    A moving average is kept in float32 in host memory, a whole copy on each rank. In bfloat16 the small change of one
    step would be lost in rounding.
    """

    def __init__(self, module: PolicyModel, rank: TrainedRank) -> None:
        self.model: Any = rank.place_frozen(module)
        self._params: dict[str, nn.Parameter] = {
            name.removeprefix("transformer."): param for name, param in module.named_parameters()
        }
        self._average: dict[str, Tensor] = {}

    def whole_weights(self) -> list[Tensor]:
        """Its parameters; none at ZeRO-3, where a rank has only a share of them."""
        return [param for param in self._params.values() if not hasattr(param, "ds_id")]

    @torch.no_grad()
    def blend(self, rank: TrainedRank, decay: float) -> None:
        """Move towards the policy's weights; a decay of 0 copies them. Every rank calls it."""
        for name, param in self._params.items():
            with rank.whole(rank.names[name]):
                target = rank.names[name].detach().to(torch.float32, copy=True)
            if decay > 0:
                target = self._average_of(rank, name, param).to(target.device).lerp(target, 1 - decay)
                self._average[name] = target.cpu()
            else:
                self._average.pop(name, None)
            with rank.whole(param, modify=True):
                param.copy_(target)

    def _average_of(self, rank: TrainedRank, name: str, param: nn.Parameter) -> Tensor:
        if name not in self._average:
            with rank.whole(param):
                self._average[name] = param.detach().to("cpu", torch.float32, copy=True)
        return self._average[name]

    def save(self, rank: TrainedRank, folder: str) -> None:
        """Write the weights by name, in float32. Every rank calls it; only rank 0 writes."""
        writer = ShardWriter(Path(folder), KIND)
        for name, param in self._params.items():
            with rank.whole(param):
                if rank.place.rank == 0:
                    writer.add(name, self._average.get(name, param))
        writer.flush()
        if rank.place.rank == 0:
            (Path(folder) / f"{KIND}.json").write_text(json.dumps(writer.files))

    @torch.no_grad()
    def load(self, rank: TrainedRank, folder: str) -> None:
        """Put back what `save` wrote.

        Raises:
            ValueError: the checkpoint holds no reference.
        """
        index = Path(folder) / f"{KIND}.json"
        if not index.is_file():
            raise ValueError(
                f"{folder}: the checkpoint holds no reference policy, since the run that wrote it kept a fixed one. "
                "Resume with algo.ref_update=fixed."
            )
        for name, tensor in read_shards(Path(folder), json.loads(index.read_text())):
            self._average[name] = tensor
            with rank.whole(self._params[name], modify=True):
                self._params[name].copy_(tensor)
