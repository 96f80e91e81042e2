"""The reference policy of a learner: fixed, replaced by the policy at intervals, or a moving average of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf.learner.checkpoint import REFERENCE, LearnerIndex, Slice, SliceReader, file_name, share
from rlhf.learner.policy_model import PolicyModel
from rlhf.learner.rank import TrainedRank


class Reference:
    """Frozen weights of the policy's architecture, partitioned like the policy at ZeRO-3.

    A moving average is kept in float32 in host memory; each rank has an equal share of each parameter. In bfloat16 the
    small change of one step would be lost in rounding.
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
                policy = rank.names[name].detach().to(torch.float32, copy=True)
            if decay == 0:
                self._average.pop(name, None)
                with rank.whole(param, modify=True):
                    param.copy_(policy)
                continue
            if name not in self._average:
                self._average[name] = self._share_of(rank, param)
            start, stop = share(policy.numel(), rank.place.rank, rank.place.world_size)
            target = policy.view(-1)[start:stop]
            self._average[name] = self._average[name].to(target.device).lerp(target, 1 - decay).cpu()
            self._set(rank, name)

    def _share_of(self, rank: TrainedRank, param: nn.Parameter) -> Tensor:
        """[stop - start] float32 in host memory, this rank's share of a parameter."""
        with rank.whole(param):
            start, stop = share(param.numel(), rank.place.rank, rank.place.world_size)
            return param.detach().reshape(-1)[start:stop].to("cpu", torch.float32, copy=True)

    def _set(self, rank: TrainedRank, name: str) -> None:
        """Give the model's parameter the average, put together from the shares of all ranks."""
        param, ranks = self._params[name], rank.place.world_size
        shape = getattr(param, "ds_shape", param.shape)
        own = self._average[name].to(rank.device)
        size = -(-shape.numel() // ranks)
        gathered = own.new_empty(ranks * size)
        dist.all_gather_single(gathered, torch.nn.functional.pad(own, (0, size - len(own))))
        with rank.whole(param, modify=True):
            param.copy_(gathered[: shape.numel()].view(shape))

    @torch.no_grad()
    def state(self, rank: TrainedRank) -> list[Slice]:
        """This rank's part of a checkpoint, in float32. Every rank calls it."""
        slices = []
        for name, param in self._params.items():
            numel = getattr(param, "ds_shape", param.shape).numel()
            start, _ = share(numel, rank.place.rank, rank.place.world_size)
            values = self._average.get(name)
            slices.append(Slice(name, start, self._share_of(rank, param) if values is None else values))
        return slices

    @torch.no_grad()
    def load(self, rank: TrainedRank, folder: str) -> None:
        """Put back what `state` returned.

        Raises:
            ValueError: the checkpoint holds no reference.
        """
        path = Path(folder)
        if not (path / file_name(REFERENCE, 0)).is_file():
            raise ValueError(
                f"{folder}: the checkpoint holds no reference policy, since the run that wrote it kept a fixed one. "
                "Resume with algo.ref_update=fixed."
            )
        reader = SliceReader(path, REFERENCE, ranks=range(LearnerIndex.read(path).ranks))
        for name, param in self._params.items():
            numel = getattr(param, "ds_shape", param.shape).numel()
            self._average[name] = reader.read(name, *share(numel, rank.place.rank, rank.place.world_size))
            self._set(rank, name)
