"""The engines of a started cluster as one: they sample, are sent weights, sleep on shared GPUs, and are replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import ray

from rlhf.cluster.actors import ActorGroup, LostError, start_call
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.rank_group import RankGroup
from rlhf.cluster.replacement import Replacements, while_healthy
from rlhf.config.grpo import GRPOConfig
from rlhf.config.roles import ENGINE
from rlhf.log.clock import BusyMeter
from rlhf.rollout.requests import Completion, SamplingSettings
from rlhf.weights import transfer
from rlhf.weights.client import EngineClient


@contextlib.asynccontextmanager
async def started_engines(config: GRPOConfig, *, trains: bool = True) -> AsyncIterator[Engines]:
    """A cluster and its engines, without a run around them."""
    async with Cluster(config, trains=trains) as cluster, Engines(cluster, config) as engines:
        yield engines


class Engines:
    """The engines of a cluster that has started; an async context, which connects learners and engines.

    Attributes:
        group: their actors.
        meter: counts the tokens that they have sampled and their busy seconds.
        joining: a new engine holds it while it joins. Who trains holds it from sending weights until the canary has
            compared them: an engine that joined between would be compared with the weights before.
    """

    def __init__(self, cluster: Cluster, config: GRPOConfig) -> None:
        self.cluster, self.meter = cluster, BusyMeter()
        self.group: ActorGroup = cluster.group(ENGINE)
        self.joining = asyncio.Lock()
        self._config = config.cluster
        self._max_restarts = config.run.max_restarts
        self._in_flight = [0] * len(self.group.actors)
        self._asleep = False
        self._version = cluster.first_step  # of the weights that they have
        self._connected: list[Any] = []  # those that the learners can send to
        self._replacements = Replacements(
            self.group, start=self._start_another, join=self._join, fewest=config.cluster.min_engines
        )
        self._check_joined: Callable[[], Awaitable[Any]] | None = None
        self._watching: list[asyncio.Task[None]] = []

    @property
    def transport(self) -> str:
        """How weights reach the engines."""
        return transfer.backend_of(self._config.device, self._config.placement)

    @property
    def learners(self) -> RankGroup:
        return self.cluster.learners

    async def __aenter__(self) -> Engines:
        if self.cluster.trains:
            await self.learners.call("connect", *await self._connection(), deadline_s=self._config.start_deadline_s)
            self._connected = self.group.present
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        for task in self._watching:
            task.cancel()
        lost = self.cluster.why_lost(error)
        await self._replacements.close(kill=not lost and ray.is_initialized())

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

        An engine that is lost meanwhile is replaced, and another one samples, unless `engine` names it.

        Args:
            prefer: the engine of the rollout's earlier turns (`Completion.engine`), whose prefix cache holds them. It
                samples as long as it can; another one has to compute the whole context.
            seed: of the first sample's noise; that of sample i is i more. None: the engine's own generator.
        """
        while True:
            chosen = await self._replacements.next_engine(self._in_flight, prefer) if engine is None else engine
            call = self.group.call_one(chosen, "generate", token_ids, settings, samples, seed, what=f"sampling {what}")
            self._in_flight[chosen] += 1
            self.meter.begin()
            try:  # a failed replacement may have left this engine paused
                completions: list[Completion] = await self._replacements.unless_failed(call)
            except LostError as error:
                if not self._replacements.take_over(chosen, error) or engine is not None:
                    raise
            else:
                self.meter.tokens += sum(len(completion.token_ids) for completion in completions)
                return completions
            finally:
                self._in_flight[chosen] -= 1
                self.meter.end()

    # --- weights ---

    async def send_weights(self, version: int) -> None:
        """Learners -> engines, in flight: running requests pause, the weights change, the requests continue.

        Colocated engines have no requests then; they sleep until the weights come, to leave memory for the buffers.
        """
        await self.sleep_if_colocated()
        await self._replacements.enough()
        if self._asleep:
            await self.cluster.leave_gpus()
            await self.group.call("wake_up", ["weights"])
        await self._transfer(version)
        self._replacements.ready()

    async def sleep_if_colocated(self) -> None:
        """Before the learners work: engines on the same GPUs free their memory until the next weights arrive."""
        if self.cluster.shares_gpus and not self._asleep:
            await self.group.call("sleep")
            self._asleep = True

    async def _transfer(self, version: int, *, unless_changed: bool = False) -> bool:
        """Send the weights to every engine, also to new ones; if the engines have changed, build a new transfer group.

        Args:
            unless_changed: send nothing if an update has begun; the result says whether the weights were sent.
        """
        joining = self._replacements.admit()
        await self._pause()
        connection = await self._connection() if self.group.present != self._connected else None
        may_send = not (unless_changed and self.learners.changed)
        if may_send:  # no await before the call is sent: an update would come between
            present = self.group.present
            await while_healthy(self.group, self.learners.call("send_weights", version, connection))
            self._connected = present
            self._version, self.learners.changed = version, False
            if self._asleep:
                await self.cluster.leave_gpus()  # without the buffers of the transfer
                await self.group.call("wake_up", ["kv_cache"])
                self._asleep = False
        await self.group.call("resume")
        if not may_send:
            self._replacements.send_back(joining)
        return may_send

    async def _pause(self) -> None:
        ranks = [rank for rank in range(len(self.group.actors)) if rank not in self.group.absent]
        outcomes = await asyncio.gather(
            *(self.group.call_one(rank, "pause", what="pausing") for rank in ranks), return_exceptions=True
        )
        for rank, outcome in zip(ranks, outcomes, strict=True):
            replaced = isinstance(outcome, LostError) and self._replacements.take_over(rank, outcome)
            if isinstance(outcome, BaseException) and not replaced:
                raise outcome
        if not self.group.present:
            raise LostError("no engine is left to send the weights to")

    async def _connection(self) -> tuple[str, EngineClient, transfer.Rendezvous]:
        """What the learners need to meet the present engines."""
        config, present = self._config, self.group.present
        # Located again, for a port that is free now.
        sender, *_ = await self.learners.locate(deadline_s=config.start_deadline_s)
        nodes = {location.node for location in self.group.locations}
        rendezvous = transfer.Rendezvous(
            host=sender.host,
            port=sender.port,
            world_size=1 + len(present) * config.tensor_parallel,
            timeout_s=config.start_deadline_s,
            one_node=nodes == {sender.node},
        )
        client = EngineClient(
            partial(start_call, present),
            engines=[f"engine {rank}" for rank in range(len(self.group.actors)) if rank not in self.group.absent],
            workers_per_engine=config.tensor_parallel,
        )
        return self.transport, client, rendezvous

    # --- engines that are lost ---

    def replace_lost(self, check: Callable[[], Awaitable[Any]]) -> None:
        """From now on replace lost engines, except on shared GPUs; `check` is called when a new one has joined."""
        if not self.cluster.shares_gpus:
            self._check_joined, self._replacements.allowed = check, self._max_restarts
            self._watching.append(asyncio.ensure_future(self._replacements.watch()))

    async def _start_another(self, rank: int) -> ActorGroup:
        return await self.cluster.start_another(ENGINE, rank, version=self._version)

    async def _join(self, rank: int) -> None:
        """Give a new engine the current weights at once, if the learners still hold them."""
        async with self.joining:
            waits = rank in self._replacements.built and not self.learners.changed
            if waits and await self._transfer(self._version, unless_changed=True):
                assert self._check_joined is not None, "only `replace_lost` lets engines be replaced"
                await self._check_joined()
                self._replacements.ready()
