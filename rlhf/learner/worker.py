"""The policy's rank: log-prob passes, updates, its frozen reference, and the exchange of weights with the engines.

A plain class; `rlhf.cluster` makes a Ray actor of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from rlhf.algo.packing import gather, pack
from rlhf.config.run import GRPOConfig
from rlhf.learner.messages import LearnerMinibatch, LogprobPass, Place
from rlhf.learner.model import DeviceTokens, PolicyModel, check_packed, load_policy
from rlhf.learner.rank import TrainedRank, Training
from rlhf.learner.reference import Reference
from rlhf.learner.update import PolicyObjective, policy_microbatch
from rlhf.transfer import EngineClient, ParameterMeta, Rendezvous, WeightSender, make_sender
from rlhf.types import PackedTokens, Rollout, StepMetrics

PERTURBED_STRIDE = 3  # a third of the signs: a tensor that is not perturbed with the others around it stands out


def policy_training(config: GRPOConfig) -> Training:
    return Training(
        name="learner",
        section=config.learner,
        total_updates=config.total_updates,
        warmup_updates=config.warmup_updates,
        dtype=config.model.dtype,
        device=config.cluster.device,
        trust_remote_code=config.model.trust_remote_code,
    )


class Learner(TrainedRank):
    """One rank of the policy."""

    def __init__(self, config: GRPOConfig, place: Place) -> None:
        super().__init__(policy_training(config), place)
        self.config = config
        self.objective = PolicyObjective.of(config)
        self._sender: WeightSender | None = None
        self._saved: list[tuple[nn.Parameter, Tensor]] = []
        self.wrap(self._load_model(trains=True))
        check_packed(
            lambda tokens: self.engine(tokens).logprobs, self.device, longest=config.max_sequence_tokens,
            dtype=config.model.dtype, key="model.path", path=config.model.path,
        )  # fmt: skip
        self.reference: Reference | None = None
        if config.needs_reference:
            self.reference = Reference(self._load_model(trains=False), self)

    def _load_model(self, *, trains: bool) -> PolicyModel:
        config = self.config
        with self.loading():
            model = load_policy(
                config.model.path,
                dtype=config.model.dtype,
                temperature=config.rollout.temperature,
                gradient_checkpointing=trains and config.model.gradient_checkpointing,
                trust_remote_code=config.model.trust_remote_code,
            )
        return model.train() if trains else model.eval().requires_grad_(False)

    # --- passes ---

    @torch.no_grad()
    def logprobs(self, minibatches: list[tuple[PackedTokens, ...]], old: bool) -> list[list[LogprobPass]]:
        """Log-probs of the current policy (where `old`) and of the reference, on the microbatches of the update."""
        return [[self._logprob_pass(packed, old) for packed in microbatches] for microbatches in minibatches]

    def _logprob_pass(self, packed: PackedTokens, old: bool) -> LogprobPass:
        tokens = DeviceTokens.of(packed, self.device)
        zeros = np.zeros(len(packed.token_ids), np.float32)
        return LogprobPass(
            old=self.engine(tokens).logprobs.float().cpu().numpy() if old else zeros,
            ref=self.reference.model(tokens).logprobs.float().cpu().numpy() if self.reference is not None else zeros,
        )

    @torch.no_grad()
    def canary(self, sequences: list[np.ndarray], in_float32: bool = False) -> list[np.ndarray]:
        """Log-probs at temperature 1 of given sequences under the current weights: [L] each, entry 0 is 0.

        In one row, as in training: what packing would spoil shows against the engine too. In the model's own type, or
        computed in float32 from the same weights.
        """
        rollouts = [
            Rollout("canary", 0, i, ids, np.arange(len(ids)) > 0, np.zeros(len(ids), np.float32), (), "stop")
            for i, ids in enumerate(sequences)
        ]
        packed = pack(rollouts, range(len(rollouts)))
        tokens = DeviceTokens.of(packed, self.device, in_float32=in_float32)
        logprobs = self.engine(tokens, temperature=1.0, in_float32=in_float32).logprobs
        return list(gather(logprobs.float().cpu().numpy(), packed).values())

    # --- update ---

    def update(self, minibatches: list[LearnerMinibatch]) -> list[StepMetrics]:
        """One optimizer step for each minibatch; this rank's metrics of each."""
        return [self._update(minibatch) for minibatch in minibatches]

    def _update(self, minibatch: LearnerMinibatch) -> StepMetrics:
        def forward(i: int) -> tuple[Tensor, StepMetrics]:
            tokens = DeviceTokens.of(minibatch.microbatches[i], self.device)
            return policy_microbatch(self.engine, tokens, minibatch.targets[i], minibatch.denominators, self.objective)

        return self.take_step(len(minibatch.microbatches), forward)

    def change_objective(self, objective: PolicyObjective) -> None:
        """Optimize this from the next update on: a scan of objectives keeps its stack and puts the weights back."""
        self.objective = objective

    def blend_reference(self, decay: float) -> None:
        """Reference := decay x reference + (1 - decay) x policy; a decay of 0 replaces it by the policy."""
        assert self.reference is not None, "there is no reference to move"
        self.reference.blend(self, decay)

    # --- weights out ---

    def metadata(self) -> list[ParameterMeta]:
        """What iteration yields, without gathering: names and shapes of the Hugging Face checkpoint."""
        return [
            ParameterMeta(name, str(p.dtype).removeprefix("torch."), tuple(getattr(p, "ds_shape", p.shape)))
            for name, p in self.names.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.names.items():
            with self.whole(param):
                yield name, param.detach()

    def connect(self, backend: str, client: EngineClient, rendezvous: Rendezvous) -> None:
        """Build the transfer group with the engines; every rank, once they are up."""
        self._sender = make_sender(backend, self, client, rendezvous, rank=self.place.rank)

    def send_weights(self, version: int) -> None:
        assert self._sender is not None, "connect comes first"
        self._sender.send(version)

    @torch.no_grad()
    def perturb_weights(self, start: int = 0, stop: int | None = None) -> None:
        """Move tensors `start` to `stop`, every PERTURBED_STRIDE-th element of each, and remember their true values.

        An element changes its sign; in a tensor of zeros it becomes 1.
        """
        assert not self._saved, "the weights are perturbed already"
        for param in list(self.names.values())[start:stop]:
            with self.whole(param, modify=True):
                self._saved.append((param, param.detach().to("cpu", copy=True)))
                moved = param.view(-1)[::PERTURBED_STRIDE]
                moved.copy_(-moved if param.any() else torch.ones_like(moved))

    @torch.no_grad()
    def restore_weights(self) -> None:
        """Put the true values back, bit for bit."""
        for param, value in self._saved:
            with self.whole(param, modify=True):
                param.copy_(value)
        self._saved.clear()

    # --- to disk ---

    def save(self, folder: str) -> None:
        super().save(folder)
        if self.reference is not None and self.config.reference_moves:
            self.reference.save(self, folder)

    def load(self, folder: str, updates_done: int) -> None:
        super().load(folder, updates_done)
        if self.reference is not None and self.config.reference_moves:
            self.reference.load(self, folder)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()
