"""The reference policy of a learner, in several kinds, and its teachers.

`make_reference` chooses the kind. The learner asks it for `logprobs`. Checkpoints hold a reference that moves.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algo.distillation import HeadInput
from rlhf.algo.lora import adapters_off
from rlhf.config.grpo import GRPOConfig
from rlhf.learner.partition import whole_shape
from rlhf.learner.policy_model import DeviceTokens, PolicyModel, load_policy
from rlhf.learner.rank import TrainedRank
from rlhf.learner.rank_checkpoint import REFERENCE, LearnerIndex, Slice, SliceReader, file_name, share
from rlhf.learner.replay import replay_recorded


class Reference(Protocol):
    """The interface of every kind. All ranks make the same calls: at ZeRO-3 they are collectives."""

    def logprobs(self, tokens: DeviceTokens) -> Tensor:
        """-> [T] log-probs, 0 outside of the response mask."""

    def movable(self) -> list[Tensor]:
        """Its tensors that are not needed while the engines sample."""


def make_reference(config: GRPOConfig, rank: TrainedRank) -> Reference | None:
    """The reference that the config asks for; None if it asks for none."""
    if not config.needs_reference:
        return None
    if config.model.lora is not None:
        return AdaptersOff(rank)
    tiled = config.model.gradient_checkpointing == "tiled"  # with other tiles its roundings would differ
    frozen = config.model.model_copy(update={"gradient_checkpointing": "tiled" if tiled else False})
    with rank.loading():
        model = load_policy(frozen, temperature=config.rollout.temperature, exported=False)
    if config.learner.replays_experts:  # the KL compares weights, not choices of experts
        replay_recorded(model.transformer)
    if config.algo.ref_update == "fixed":
        return FrozenCopy(model, rank)
    return MovingCopy(model, rank, averages=config.algo.ref_update == "average")


def make_teachers(config: GRPOConfig, rank: TrainedRank) -> dict[str, FrozenCopy]:
    """path -> teacher, for all teachers that are models of their own."""
    teachers = {}
    for key, path in config.further_models.items():
        model = config.model.model_copy(update={"path": path, "gradient_checkpointing": False, "lora": None})
        with rank.loading():
            teacher = FrozenCopy(load_policy(model, temperature=1.0, key=key, exported=False), rank)
        rank.check_packed(teacher.logprobs, key=key, path=path)
        teachers[path] = teacher
    return teachers


class AdaptersOff:
    """The trained model itself without its adapters: the frozen start model."""

    def __init__(self, rank: TrainedRank) -> None:
        self._rank = rank

    def logprobs(self, tokens: DeviceTokens) -> Tensor:
        with adapters_off(self._rank.transformer):
            return self._rank.deepspeed(tokens).logprobs

    def movable(self) -> list[Tensor]:
        return []


class FrozenCopy:
    """A second model, which stays as it was loaded; partitioned like the policy at ZeRO-3."""

    def __init__(self, model: PolicyModel, rank: TrainedRank) -> None:
        self._rank = rank
        self._model = rank.place_frozen(model.requires_grad_(False))
        self._params = dict(model.transformer.named_parameters())

    def logprobs(self, tokens: DeviceTokens) -> Tensor:
        return self._model(tokens).logprobs

    def as_teacher(self, tokens: DeviceTokens) -> HeadInput:
        """As in `PolicyModel`; not at ZeRO-3, where a rank has only a share of the head."""
        return self._model.as_teacher(tokens)

    def movable(self) -> list[Tensor]:
        """Its parameters; none at ZeRO-3, where a rank has only a share of them."""
        return [param for param in self._params.values() if not hasattr(param, "ds_id")]


class MovingCopy(FrozenCopy):
    """A copy that follows the policy: it is replaced by it at intervals, or is its moving average.

    In bfloat16 the small change of one step would be lost in rounding: an average is in host memory in float32, an
    equal share of each parameter on each rank. Such a share is also what a rank writes into a checkpoint.
    """

    def __init__(self, model: PolicyModel, rank: TrainedRank, *, averages: bool) -> None:
        super().__init__(model, rank)
        self._averages = averages
        self._average: dict[str, Tensor] = {}

    @torch.no_grad()
    def blend(self, decay: float) -> None:
        """Reference := decay x reference + (1 - decay) x policy; the decay of a copy that is replaced is 0."""
        assert self._averages or decay == 0
        for name, param in self._params.items():
            trained = self._rank.trained[name]
            with self._rank.whole(trained):
                policy = trained.detach().to(torch.float32, copy=True)
            if self._averages:
                target = policy.view(-1)[slice(*self._span(name))]
                self._put(name, self._share(name).to(target.device).lerp(target, 1 - decay).cpu())
                continue
            with self._rank.whole(param, modify=True):
                param.copy_(policy)

    @torch.no_grad()
    def state(self) -> list[Slice]:
        """This rank's part of a checkpoint, in float32."""
        return [Slice(name, self._span(name)[0], self._share(name)) for name in self._params]

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Load the slices that `state` returned; ValueError if the checkpoint holds no reference."""
        path = Path(folder)
        if not (path / file_name(REFERENCE, 0)).is_file():
            raise ValueError(
                f"{folder}: the checkpoint holds no reference policy, since the run that wrote it kept a fixed one. "
                "Resume with algo.ref_update=fixed."
            )
        reader = SliceReader(path, REFERENCE, ranks=range(LearnerIndex.read(path).ranks))
        for name in self._params:
            self._put(name, reader.read(name, *self._span(name)))

    def _span(self, name: str) -> tuple[int, int]:
        """The elements [start, stop) of a flattened parameter that are this rank's share."""
        return share(math.prod(whole_shape(self._params[name])), self._rank.world.rank, self._rank.world.size)

    def _share(self, name: str) -> Tensor:
        """[stop - start] float32 in host memory, this rank's share of a parameter."""
        if name in self._average:
            return self._average[name]
        with self._rank.whole(self._params[name]):
            values = self._params[name].detach().reshape(-1)[slice(*self._span(name))]
            return values.to("cpu", torch.float32, copy=True)

    def _put(self, name: str, values: Tensor) -> None:
        """Set a parameter to the values that the shares of all ranks make up."""
        if self._averages:
            self._average[name] = values
        param, ranks = self._params[name], self._rank.world.size
        shape, own_share = whole_shape(param), values.to(self._rank.device)
        size = -(-math.prod(shape) // ranks)
        gathered = own_share.new_empty(ranks * size)
        dist.all_gather_single(gathered, torch.nn.functional.pad(own_share, (0, size - len(own_share))))
        with self._rank.whole(param, modify=True):
            param.copy_(gathered[: math.prod(shape)].view(shape))
