"""The policy's rank: log-prob passes, updates, its reference, and the exchange of weights with the engines."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.algo.packing import pack
from rlhf.config.grpo import GRPOConfig
from rlhf.config.teacher import TeacherModel
from rlhf.learner.hub_format import hub_ranges, hub_shapes, hub_tensors
from rlhf.learner.policy_model import load_policy
from rlhf.learner.rank_checkpoint import REFERENCE, Slice, share
from rlhf.learner.reference import FrozenCopy, MovingCopy, Reference, make_reference, make_teachers
from rlhf.learner.replay import RecordShape, check_replay, replay_recorded
from rlhf.learner.step import StepRank
from rlhf.learner.update import policy_microbatch
from rlhf.log.reductions import UpdateOutcome
from rlhf.processes.code import load_function
from rlhf.types import Minibatch, PackedTokens, PolicyTargets, Support, WeightsSent, World
from rlhf.weights.adapter import AdapterSender
from rlhf.weights.client import EngineClient
from rlhf.weights.parameters import INTEGERS, ParameterMeta
from rlhf.weights.transfer import CPUSender, Rendezvous, VLLMSender, make_sender

STRIDE = 3  # a third of the elements: a tensor that is not perturbed with the others around it stands out


class Learner(StepRank):
    """One rank of the policy; a plain class that `rlhf.cluster.actors` hosts in a Ray actor."""

    def __init__(self, config: GRPOConfig, world: World) -> None:
        device = config.cluster.device
        super().__init__(world, name="learner", training=config.training, model=config.model, device=device)
        self.config = config
        self._sender: CPUSender | VLLMSender | AdapterSender | None = None
        self._client: EngineClient | None = None
        self._flipped: dict[str, int] = {}  # perturbed tensors, and the bits flipped in each
        if config.algo.has_own_loss:  # its file may be missing on this node
            load_function(config.algo.policy_loss)
        with self.loading():
            model = load_policy(config.model, temperature=config.rollout.temperature, seed=config.run.seed)
        coef, path = config.learner.router_balance_coef, config.model.path
        if coef and not model.has_balancing_loss:
            why = f"the routers of {path} have no balancing loss (it is dense, or a bias balances them)"
            raise ValueError(f"learner.router_balance_coef={coef}: {why}. Set it to 0.")
        if config.learner.replays_experts:
            replay_recorded(model.transformer)
        self.wrap(model)
        self.check_packed(self.deepspeed, key="model.path", path=path)
        self._record: RecordShape | None = None
        if config.learner.replays_experts:
            self._record = check_replay(self.deepspeed, self.transformer, self.device, path=path)
        self.reference = make_reference(config, self)
        self.teachers = make_teachers(config, self)

    # --- a training step ---

    def start_step(self, tokens: PackedTokens, epochs: Sequence[Sequence[Minibatch]]) -> np.ndarray:
        if self._record is not None:
            self._record.check(tokens)
        return super().start_step(tokens, epochs)

    def logprobs(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Old and reference log-probs on the microbatches of the first epoch; None if the config does not need them."""
        old = ref = None
        if self.config.needs_old_logprobs_pass:
            old = self.run_passes(lambda tokens: self.deepspeed(tokens).logprobs)
        if self.reference is not None:
            self._offload.come_back()
            ref = self.run_passes(self.reference.logprobs)
        return old, ref

    def teacher_logprobs(self, teacher: TeacherModel) -> tuple[np.ndarray]:
        """The log-probs of a teacher on the microbatches of the first epoch."""
        self._offload.come_back()
        if teacher.own == "policy":
            return (self.run_passes(lambda tokens: self.deepspeed(tokens).logprobs),)
        model: Reference | None = self.reference if teacher.path is None else self.teachers[teacher.path]
        assert model is not None, "own=average needs the average"
        return (self.run_passes(model.logprobs),)

    def update(self, targets: PolicyTargets) -> list[UpdateOutcome]:
        teacher = None
        if (config := self.config.algo.teacher) is not None and config.in_loss:
            self._offload.come_back()
            model = self.reference if config.path is None else self.teachers[config.path]
            assert isinstance(model, FrozenCopy), "own=average needs the average"
            teacher = model.as_teacher
        microbatch = functools.partial(policy_microbatch, self.deepspeed, config=self.config, teacher=teacher)
        return self.run_updates(targets, microbatch)

    @torch.no_grad()
    def canary(
        self, sequences: list[np.ndarray], in_float32: bool = False, temperature: float = 1.0,
        supports: Sequence[Support | None] | None = None,
    ) -> list[np.ndarray]:  # fmt: skip
        """Log-probs of given sequences under the current weights: [L] each, entry 0 is 0.

        They are packed into one row, so that the comparison also checks packing. `in_float32`: as in `PolicyModel`;
        `supports`: as in `pack`.
        """
        packed = pack(sequences, supports=supports)
        tokens = self.put(packed)
        output = self.deepspeed(tokens, temperature=temperature, in_float32=in_float32)
        logprobs = output.logprobs.float().cpu().numpy()
        return np.split(logprobs, packed.cu_seqlens[1:-1])

    def blend_reference(self, decay: float) -> None:
        """Reference := decay x reference + (1 - decay) x policy; a decay of 0 replaces it by the policy."""
        assert isinstance(self.reference, MovingCopy), "no reference that moves is loaded"
        self._offload.come_back()
        self.reference.blend(decay)

    def _movable(self) -> list[Tensor]:
        frozen: list[Reference] = [*self.teachers.values()]
        frozen += [] if self.reference is None else [self.reference]
        return [tensor for each in frozen for tensor in each.movable()] + super()._movable()

    # --- weights out ---

    def metadata(self) -> list[ParameterMeta]:
        """Names, types and shapes of the tensors that iterating yields; gathers nothing."""
        return [
            ParameterMeta(stored, str(like.dtype).removeprefix("torch."), tuple(like.shape))
            for name, tensor in self._to_send()
            for stored, like in hub_shapes(self.transformer, name, tensor)
        ]

    def _to_send(self) -> list[tuple[str, Tensor]]:
        """The published tensors, those with larger elements first."""
        return sorted(self.published.items(), key=lambda item: -item[1].itemsize)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.each_whole(self._to_send()):
            yield from hub_tensors(self.transformer, name, tensor.detach())

    def own_parts(self) -> list[tuple[Tensor, int]]:
        """At ZeRO-3 the partition that this rank holds, else an equal share; a view of each of `metadata`."""
        parts = []
        for name, tensor in self._to_send():
            flat, start = self._own_part(tensor)
            for first, stop in self._ranges[name]:
                low, high = (min(max(edge - start, 0), len(flat)) for edge in (first, stop))
                parts.append((flat[low:high], start + low - first))
        return parts

    def _own_part(self, tensor: Any) -> tuple[Tensor, int]:
        """This rank's part of a tensor, flat, and the number of its first element."""
        if hasattr(tensor, "ds_id"):
            size = tensor.ds_tensor.ds_numel
            start = min(self.world.rank * size, tensor.ds_numel)
            return tensor.ds_tensor.data.view(-1)[: tensor.ds_numel - start], start
        start, stop = share(tensor.numel(), self.world.rank, self.world.size)
        return tensor.data.view(-1)[start:stop], start

    @functools.cached_property
    def _ranges(self) -> dict[str, list[tuple[int, int]]]:
        return {name: list(hub_ranges(self.transformer, name, tensor)) for name, tensor in self._to_send()}

    def connect(self, backend: str, client: EngineClient, rendezvous: Rendezvous) -> None:
        """Build the transfer group with the engines. Every rank calls it after the engines have started."""
        if self._sender is not None:  # a new engine replaces a lost one
            self._sender.close()
        if self._client is not None:  # the new engine must load what the first ones loaded
            client.proved = self._client.proved
        self._client = client
        if (lora := self.config.model.lora) is not None:
            self._sender = AdapterSender(
                lambda: self.each_whole(self.published.items()), client, lora, rank=self.world.rank
            )
            return
        only_changes = self.config.sends_changes
        self._sender = make_sender(backend, self, client, rendezvous, rank=self.world.rank, only_changes=only_changes)

    def send_weights(
        self, version: int, connection: tuple[str, EngineClient, Rendezvous] | None = None
    ) -> WeightsSent | None:
        """Connect, if a new `connection` is given, then send the weights; no update may come between."""
        if connection is not None:
            self.connect(*connection)
        assert self._sender is not None, "connect comes first"
        return self._sender.send(version)

    def tensor_names(self) -> list[str]:
        """The tensors that `perturb_weights` numbers: not the constants of activations, which vLLM sets itself."""
        return [name for name, tensor in self.published.items() if tensor.ndim]

    def perturb_weights(self, start: int = 0, stop: int | None = None) -> None:
        """Perturb every STRIDE-th element of tensors `start` to `stop`, by so much that the log-probs move.

        An element changes its sign; in a tensor of zeros it becomes 1. `restore_weights` flips the same bits again,
        since copies of a model of 70 B would take 140 GB of host memory per rank. Every rank flips the elements that it
        holds, and checks by the first and the last of them that the bytes of each tensor have changed: RuntimeError if
        they have not, or if the share of a rank and the whole parameter differ.
        """
        assert not self._flipped, "the weights are perturbed already"
        names = self.tensor_names()[start:stop]
        tensors = [self.published[name] for name in names]
        nonzero = torch.stack(
            [torch.stack([part.any() for part, _ in self._held_parts(tensor)]).any() for tensor in tensors]
        )
        dist.all_reduce(nonzero := nonzero.int(), op=dist.ReduceOp.MAX)  # a rank may hold only zeros of a tensor
        for name, tensor, moves in zip(names, tensors, nonzero.tolist(), strict=True):
            number = -torch.zeros((), dtype=tensor.dtype) if moves else torch.ones((), dtype=tensor.dtype)
            self._flipped[name] = int(number.view(INTEGERS[tensor.itemsize]))
        self._flip()

    def restore_weights(self) -> None:
        """Restore the true values, bit for bit; errors as of `perturb_weights`."""
        self._flip()
        self._flipped.clear()

    @torch.no_grad()
    def _flip(self) -> None:
        ends, apart = dict[str, tuple[Tensor, Tensor]](), list[str]()
        for name, bits in self._flipped.items():
            held = [
                (part.view(INTEGERS[part.itemsize]), start) for part, start in self._held_parts(self.published[name])
            ]
            flipped = [part[-start % STRIDE :: STRIDE] for part, start in held]
            last = flipped[-1][:: max(1, len(flipped[-1]) - 1)]  # the first and the last element
            ends[name] = last, last.clone()
            for numbers in flipped:
                numbers.bitwise_xor_(bits)
            (share, start), (whole, _) = held[0], held[-1]
            if len(held) > 1 and not torch.equal(share, whole[start:][: len(share)]):
                apart.append(name)
        # after all of them, so that a memory which two names share shows
        changes = [(before.bitwise_xor_(now) == self._flipped[name]).all() for name, (now, before) in ends.items()]
        changed = zip(ends, torch.stack(changes).tolist(), strict=True)
        if wrong := apart + [name for name, is_changed in changed if not is_changed]:
            raise RuntimeError(
                f"learner.zero_stage={self.training.section.zero_stage}: {', '.join(wrong)} cannot be perturbed for "
                "the canary: DeepSpeed holds it in a memory that the learner does not know. Use another zero_stage."
            )

    def _held_parts(self, tensor: Any) -> list[tuple[Tensor, int]]:
        """Every memory in which this rank holds elements of a tensor: (flat part, number of its first element).

        At ZeRO-3 these are the rank's share of a parameter and, while it is gathered, the whole parameter. DeepSpeed
        keeps small parameters gathered. With one rank the share and the whole parameter are the same memory.
        """
        if not hasattr(tensor, "ds_id"):
            return [(tensor.data.view(-1), 0)]
        share, start = self._own_part(tensor)
        if tensor.ds_status.name != "AVAILABLE":
            return [(share, start)]
        whole = tensor.data.view(-1)
        return [(whole, 0)] if whole[start:].data_ptr() == share.data_ptr() else [(share, start), (whole, 0)]

    # --- to disk ---

    def state(self) -> dict[str, list[Slice]]:
        state = super().state()
        if isinstance(self.reference, MovingCopy):
            state[REFERENCE] = self.reference.state()
        return state

    def load(self, folder: str) -> None:
        super().load(folder)
        if isinstance(self.reference, MovingCopy):
            self.reference.load(folder)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()
