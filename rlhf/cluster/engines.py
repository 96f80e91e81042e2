"""All engines of a started cluster behind one object: sampling, weight transfers, sleep, replacement."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf.cluster.actors import ActorGroup, LostError, start_call
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.engine_recovery import EngineRecovery, while_healthy
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import say
from rlhf.config.roles import ENGINE
from rlhf.log.clock import BusyMeter, Watch
from rlhf.rollout.requests import Completion, SamplingSettings
from rlhf.types import WeightsSent
from rlhf.weights import transfer
from rlhf.weights.client import EngineClient

if TYPE_CHECKING:
    from rlhf.learner.policy import Learner
    from rlhf.rollout.engine import RolloutEngine


@contextlib.asynccontextmanager
async def started_engines(
    config: GRPOConfig, *, trains: bool = True, watch_stage: Watch = contextlib.nullcontext
) -> AsyncIterator[Engines]:
    """A cluster and its engines, without a run around them; `watch_stage`: a context around each stage of the start."""
    async with Cluster(config, trains=trains, watch_stage=watch_stage) as cluster, Engines(cluster, config) as engines:
        yield engines


class Engines:
    """The engines of a cluster that has started; an async context, which connects learners and engines."""

    def __init__(self, cluster: Cluster, config: GRPOConfig) -> None:
        self.cluster = cluster
        self.meter = BusyMeter()  # counts sampled tokens and busy seconds
        self.group: ActorGroup[RolloutEngine] = cluster.group(ENGINE)
        self._run_config, self._config = config, config.cluster
        self._max_restarts = config.run.max_restarts
        self.transfer_metrics: dict[str, float] = {}  # of the last transfer; empty unless weights.transfer=delta
        self._in_flight = [0] * len(self.group.actors)
        self._asleep = False
        self._version = cluster.first_step  # of the weights that they have
        self._connected: list[Any] = []  # the engines of the present transfer group
        self._recovery = EngineRecovery(
            self.group,
            start=lambda rank: cluster.start_another(ENGINE, rank, version=self._version),
            join=self._join,
            fail=cluster.end_with,
            min_engines=config.cluster.min_engines,
        )
        self._check: Callable[[int], Awaitable[Any]] | None = None

    @property
    def transport(self) -> str:
        """How weights reach the engines; an adapter goes through Ray."""
        if self._run_config.model.lora is not None:
            return "ray"
        return transfer.backend_of(self._run_config)

    @property
    def learners(self) -> RankGroup[Learner]:
        return self.cluster.learners

    async def __aenter__(self) -> Engines:
        if self.cluster.trains:
            connection, deadline_s = await self._connection(), self._config.start_deadline_s
            await self.learners.call(lambda learner: learner.connect(*connection), deadline_s=deadline_s)
            self._connected = self.group.present
        return self

    async def __aexit__(self, *_failure: object) -> None:
        await self.stop_replacing()

    # --- sampling ---

    async def generate(
        self,
        token_ids: np.ndarray,
        settings: SamplingSettings,
        *,
        samples: int = 1,
        seed: int | None = None,
        what: str = "a request",
        engine: int | None = None,
        prefer: int | None = None,
    ) -> list[Completion]:
        """Sample `samples` continuations of these ids [P] in one request, on the engine with the fewest requests.

        If the engine is lost, it is replaced, and another one samples unless `engine` names it.

        Args:
            prefer: the engine of the rollout's earlier turns (`Completion.engine`), whose prefix cache holds them. It
                samples unless others are far less busy; another one has to compute the whole context.
            seed: seed of the first sample's noise; sample i uses seed + i. None: the engine's own generator.
        """
        while True:
            chosen = await self._recovery.next_engine(self._in_flight, prefer) if engine is None else engine
            self._in_flight[chosen] += 1
            self.meter.begin()
            try:
                completions = await self.group.call_one(
                    chosen, lambda engine: engine.generate(token_ids, settings, samples, seed), what=f"sampling {what}"
                )
            except LostError as error:
                if not self._recovery.recover(chosen, error) or engine is not None:
                    raise
            else:
                self.meter.tokens += sum(len(completion.token_ids) for completion in completions)
                return completions
            finally:
                self._in_flight[chosen] -= 1
                self.meter.end()

    # --- weights ---

    async def send_weights(self, version: int) -> None:
        """Send the learners' weights to all engines and label them `version`.

        Running requests pause and go on with the new weights. Colocated engines have no requests; they sleep until the
        weights come, to leave memory for the buffers. If engines are replaced, the caller holds
        `learners.weights_lock`.
        """
        await self.sleep_if_colocated()
        self._recovery.lost = 0
        if self._asleep:
            await self.cluster.leave_gpus()
            await self.group.call(lambda engine: engine.wake_up(["weights"]))
        self._version, self.learners.updated_since_send = version, False
        if not self._recovery.has_enough():  # a new engine joins first
            self.learners.weights_lock.notify_all()
            await self.learners.weights_lock.wait_for(self._recovery.has_enough)
        await self._transfer()

    async def sleep_if_colocated(self) -> None:
        """Let engines on the learners' GPUs free their memory until the next weights arrive."""
        if self.cluster.shares_gpus and not self._asleep:
            await self.group.call(lambda engine: engine.sleep())
            self._asleep = True

    async def wake_if_asleep(self, version: int) -> bool:
        """If the engines sleep, wake them by sending the weights of `version` again. Returns whether they slept."""
        slept = self._asleep
        if slept:
            await self.send_weights(version)
        return slept

    async def _transfer(self) -> None:
        """Send the weights to all engines, through a new transfer group if the engines have changed."""
        await self._pause()
        connection = await self._connection() if self.group.present != self._connected else None
        present = self.group.present
        sent, *_ = await while_healthy(
            self.group, self.learners.call(lambda learner: learner.send_weights(self._version, connection))
        )
        self._report(sent)
        self._connected = present
        if self._asleep:
            await self.cluster.leave_gpus()  # without the buffers of the transfer
            await self.group.call(lambda engine: engine.wake_up(["kv_cache"]))
            self._asleep = False
        await self.group.call(lambda engine: engine.resume())

    def _report(self, sent: WeightsSent | None) -> None:
        self.transfer_metrics = {}
        if sent is None or not self._run_config.sends_changes:
            return
        if sent.why_all:
            say(f"weights of version {self._version}: everything was sent, because {sent.why_all}")
        self.transfer_metrics["weights/sent_mib"] = sent.bytes / 2**20
        if sent.share is not None:
            self.transfer_metrics["weights/changed"] = sent.share

    async def _pause(self) -> None:
        ranks = [rank for rank in range(len(self.group.actors)) if rank not in self.group.absent]
        outcomes = await asyncio.gather(
            *(self.group.call_one(rank, lambda engine: engine.pause(), what="pausing") for rank in ranks),
            return_exceptions=True,
        )
        for rank, outcome in zip(ranks, outcomes, strict=True):
            replaced = isinstance(outcome, LostError) and self._recovery.recover(rank, outcome)
            if isinstance(outcome, BaseException) and not replaced:
                raise outcome
        if not self.group.present:
            raise LostError("the transfer of weights failed: no engine is left")

    async def _connection(self) -> tuple[str, EngineClient, transfer.Rendezvous]:
        """Transport, client and meeting point for a transfer group with the present engines."""
        config, present = self._config, self.group.present
        # Every group needs a new free port.
        sender, *_ = await self.learners.locate(deadline_s=config.start_deadline_s)
        ranks = [rank for rank in range(len(self.group.actors)) if rank not in self.group.absent]
        rendezvous = transfer.Rendezvous(
            host=sender.host,
            port=sender.port,
            world_size=1 + len(present) * config.tensor_parallel,
            timeout_s=config.start_deadline_s,
            node=sender.node,
            engine_nodes=tuple(self.group.locations[rank].node for rank in ranks),
        )
        client = EngineClient(
            partial(start_call, present),
            engines=[f"engine {rank}" for rank in ranks],
            workers_per_engine=config.tensor_parallel,
        )
        return self.transport, client, rendezvous

    # --- engines that are lost ---

    def replace_lost(self, check: Callable[[int], Awaitable[Any]]) -> None:
        """From now on replace lost engines, except on shared GPUs; `check` compares all of them with the learner."""
        if not self.cluster.shares_gpus:
            self._check = check
            self.cluster.before_end = self._recovery.cancel
            self._recovery.begin(self._max_restarts)

    async def stop_replacing(self) -> None:
        """Stop replacing engines, since nothing more is sampled."""
        await self._recovery.close()

    async def _join(self, rank: int, new: ActorGroup[RolloutEngine]) -> None:
        """Send a new engine the weights that the others have, once the learners hold them; then it may sample."""
        assert self._check is not None, "only `replace_lost` lets engines be replaced"
        async with self.learners.weights_lock:
            await self.learners.weights_lock.wait_for(lambda: not self.learners.updated_since_send)
            self._recovery.unverified.add(rank)
            self.group.replace(rank, new)
            await self._transfer()
            await self._check(self._version)
            self._recovery.unverified.discard(rank)
            self.learners.weights_lock.notify_all()
