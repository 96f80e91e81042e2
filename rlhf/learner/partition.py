"""The parts of fp32 weights and Adam's moments that a rank of DeepSpeed holds at every ZeRO stage; its generators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rlhf.learner.rank_checkpoint import WEIGHTS, Slice, SliceReader, share
from rlhf.types import World


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a tensor, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def generators(device: torch.device) -> dict[str, torch.Generator]:
    """The random generators of a rank, by their names in a checkpoint."""
    gpu_generator = {"cuda": torch.cuda.default_generators[device.index]} if device.type == "cuda" else {}
    return {"cpu": torch.default_generator, **gpu_generator}


class Partition:
    """Flat parts of parameters, named by kind: `weights`, `exp_avg` or `exp_avg_sq`. No call is a collective.

    Stage 0 holds everything on every rank, without a wrapper of DeepSpeed around torch's optimizer. Stages 1 and 2 cut
    one flat buffer of all parameters, so that a rank holds parts of only some; stage 3 cuts each parameter.
    """

    def __init__(self, deepspeed: Any, world: World) -> None:
        self._optimizer = deepspeed.optimizer
        # While DeepSpeed has moved the state away, the parameters have no link to it, and a checkpoint would lack it.
        assert not getattr(self._optimizer, "offloaded_states", None), "reload the optimizer's state first"
        self._world = world

    def held_span(self, param: Any) -> tuple[int, int]:
        """The elements [start, stop) of the flattened parameter that this rank holds."""
        if hasattr(param, "ds_id"):
            size, rank = param.ds_tensor.ds_numel, self._world.rank
            return min(rank * size, param.ds_numel), min((rank + 1) * size, param.ds_numel)
        if not hasattr(param, "_hp_mapping"):
            return 0, param.numel()
        if param._hp_mapping is None:
            return 0, 0
        address = param._hp_mapping.lp_fragment_address
        return address.start, address.start + address.numel

    def slices(self, params: Mapping[str, Tensor], kind: str) -> list[Slice]:
        """The held elements that this rank writes: each element has one owner."""
        slices = []
        for name, param in params.items():
            first, stop = self.held_span(param)
            start = first
            if not hasattr(param, "ds_id") and not hasattr(param, "_hp_mapping"):
                start, stop = share(param.numel(), self._world.rank, self._world.size)
            slices.append(Slice(name, start, self.values(param, kind)[start - first : stop - first]))
        return slices

    @torch.no_grad()
    def fill(self, params: Mapping[str, Tensor], kind: str, reader: SliceReader | None) -> None:
        """Fill the held elements from the files, or with 0 without a reader."""
        for name, param in params.items():
            start, stop = self.held_span(param)
            if start < stop:
                values = torch.zeros(stop - start) if reader is None else reader.read(name, start, stop)
                self.values(param, kind).copy_(values)

    def values(self, param: Any, kind: str) -> Tensor:
        """[stop - start] float32, the held elements in any memory; writing to them changes the state."""
        start, stop = self.held_span(param)
        state = None if kind == WEIGHTS else kind
        if hasattr(param, "ds_id"):
            # safe_get_local_fp32_param would copy offloaded values to the GPU: in a save, all parameters at once.
            read = param._z3_optimizer._get_fp32_opt_state_partition
            padded, _ = read(param, release_swap_buffers=True, optim_state_key=state)
            return cast(Tensor, padded.detach()[: stop - start])
        if hasattr(param, "_hp_mapping"):
            if param._hp_mapping is None:
                return torch.empty(0)
            return cast(Tensor, param._hp_mapping.get_hp_fragment(state).detach())
        if state is None:
            return cast(Tensor, param.detach().view(-1))
        moments = self._optimizer.state.get(param, {})  # an expert that got no token has none
        return moments[kind].view(-1) if kind in moments else torch.zeros_like(param).view(-1)
