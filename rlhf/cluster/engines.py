"""All engines of a started cluster behind one object: weight transfers, sleep, replacement, speed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlhf.cluster.actors import ActorGroup, LostError, start_call
from rlhf.cluster.cluster import Cluster
from rlhf.cluster.engine_choice import EngineChoice
from rlhf.cluster.engine_recovery import HEALTH_DEADLINE_S, EngineRecovery, while_healthy
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import say
from rlhf.config.roles import ENGINE
from rlhf.log.clock import Watch
from rlhf.log.reductions import UpdateOutcome
from rlhf.types import PolicyTargets, WeightsSent
from rlhf.weights import transfer
from rlhf.weights.client import EngineClient

if TYPE_CHECKING:
    from rlhf.learner.policy import Learner
    from rlhf.sampling.engine import RolloutEngine

T = TypeVar("T")


@contextlib.asynccontextmanager
async def started_engines(
    config: GRPOConfig, *, trains: bool = True, watch_stage: Watch = contextlib.nullcontext
) -> AsyncIterator[Engines]:
    """A cluster and its engines, without a run around them; `watch_stage`: a context around each stage of the start."""
    async with Cluster(config, trains=trains, watch_stage=watch_stage) as cluster, Engines(cluster, config) as engines:
        yield engines


class Engines:
    """The engines of a cluster that has started; an async context, which connects learners and engines.

    Attributes:
        recovery: says which engines are ready; workers subscribe to it.
        choice: the engines as a worker in this process sees them.
    """

    def __init__(self, cluster: Cluster, config: GRPOConfig) -> None:
        self.cluster = cluster
        self.group: ActorGroup[RolloutEngine] = cluster.group(ENGINE)
        self._run_config, self._config = config, config.cluster
        self._max_restarts = config.run.max_restarts
        self.transfer_metrics: dict[str, float] = {}  # of the last transfer; empty unless weights.transfer=delta
        self._asleep = False
        # Held while the weights change, and from a transfer to the end of its comparison with the engines. Otherwise a
        # new engine could be compared with other weights than it was sent.
        self._weights = asyncio.Condition()
        self._updated = False  # whether an update has begun since the last transfer
        self.version = cluster.first_step  # of the weights that the engines have
        self._connected: list[Any] = []  # the engines of the present transfer group
        self.recovery = EngineRecovery(
            self.group,
            start=lambda rank: cluster.start_another(ENGINE, rank, version=self.version),
            join=self._join,
            fail=cluster.end_with,
            background=cluster.background,
            min_engines=config.cluster.min_engines,
        )
        self.choice = EngineChoice(0, config.request_deadline_s, self.recovery.report)
        self.recovery.subscribe(self.choice)
        self._check: Callable[[int], Awaitable[Any]] | None = None

    @property
    def transport(self) -> str:
        """How weights reach the engines; an adapter goes through Ray."""
        if self._run_config.model.lora is not None:
            return "ray"
        return transfer.backend_of(self._run_config)

    @property
    def sleeps(self) -> bool:
        """Whether the engines sleep while the learners, on the same GPUs, train."""
        return self.cluster.shares_gpus

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

    async def take_work(self) -> tuple[dict[str, float], float]:
        """(metrics of the engines, busy seconds of the busiest one) since the last call, with evaluations.

        Busy seconds are those in which an engine had a request and was awake; idle time does not lower the rate.
        Several engines sample at the same time, so the rate is the tokens of all engines over the busy seconds of the
        busiest one. An engine that does not answer is not counted.
        """
        answers = await self._call_each(
            lambda engine: engine.take_work(), what="its speed", deadline_s=HEALTH_DEADLINE_S
        )
        work = [answer for answer in answers.values() if not isinstance(answer, LostError)]
        busy_s = max((each.busy_s for each in work), default=0.0)
        passes = sum(each.passes for each in work)
        metrics = {
            "rollout/tokens_per_second": sum(each.tokens for each in work) / busy_s if busy_s else 0.0,
            "rollout/kv_cache_usage": max((each.kv_cache_usage for each in work), default=0.0),
            "rollout/kv_cache_wait_fraction": sum(each.waiting_passes for each in work) / max(1, passes),
        }
        return metrics, busy_s

    async def cached_sequences(self) -> float | None:
        """How many sequences of the greatest length all KV caches hold together; None if vLLM does not say."""
        held = await self.group.call(lambda engine: engine.cached_sequences())
        return None if None in held else sum(each for each in held if each is not None)

    # --- weights ---

    async def update_learners(self, targets: PolicyTargets) -> list[UpdateOutcome]:
        """`RankGroup.update` of the policy. A new engine joins before it, or with the next transfer."""
        async with self._weights:
            self._updated = True
            return await self.learners.update(targets)

    async def publish(
        self,
        version: int,
        check: Callable[[int], Awaitable[dict[str, float]]],
        *,
        watch: Watch = contextlib.nullcontext,
    ) -> dict[str, float]:
        """`send_weights`, then `check` that the engines have them. Returns the metrics of both.

        `watch`: a context around the transfer and around the check.
        """
        async with self._weights:
            with watch("transfer"):
                await self.send_weights(version)
            with watch("canary"):
                compared = await check(version)
            self._weights.notify_all()
        return compared | self.transfer_metrics

    async def send_weights(self, version: int) -> None:
        """Send the learners' weights to all engines and label them `version`.

        Running requests pause and go on with the new weights. Colocated engines sleep until the weights come, to leave
        memory for the buffers. Call `publish` after `replace_lost`.
        """
        await self.sleep_if_colocated()
        self.recovery.begin_transfer()
        if self._asleep:
            await self.cluster.leave_gpus()
            await self.group.call(lambda engine: engine.wake_up(["weights"]))
        self.version, self._updated = version, False
        if not self.recovery.has_enough():  # a new engine joins first
            self._weights.notify_all()
            await self._weights.wait_for(self.recovery.has_enough)
        await self._transfer()

    async def sleep_if_colocated(self) -> None:
        """Let engines on the learners' GPUs free their memory until the next weights arrive; their requests wait."""
        if self.sleeps and not self._asleep:
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
            self.group, self.learners.call(lambda learner: learner.send_weights(self.version, connection))
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
            say(f"weights of version {self.version}: everything was sent, because {sent.why_all}")
        self.transfer_metrics["weights/sent_mib"] = sent.bytes / 2**20
        if sent.share is not None:
            self.transfer_metrics["weights/changed"] = sent.share

    async def _pause(self) -> None:
        for rank, outcome in (await self._call_each(lambda engine: engine.pause(), what="pausing")).items():
            if isinstance(outcome, LostError) and not self.recovery.recover(rank, outcome):
                raise outcome
        if not self.group.present:
            raise LostError("the transfer of weights failed: no engine is left")

    async def _call_each(
        self, ask: Callable[[RolloutEngine], Coroutine[Any, Any, T]], *, what: str, deadline_s: float | None = None
    ) -> dict[int, T | LostError]:
        """The answers of the present engines by rank; of an engine that is lost, its error."""

        async def call(rank: int) -> T | LostError:
            try:
                return await self.group.call_one(rank, ask, what=what, deadline_s=deadline_s)
            except LostError as error:
                return error

        ranks = [rank for rank in range(len(self.group.actors)) if rank not in self.group.absent]
        return dict(zip(ranks, await asyncio.gather(*map(call, ranks)), strict=True))

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
        if not self.sleeps:
            self._check = check
            self.recovery.begin(self._max_restarts)

    async def stop_replacing(self) -> None:
        """Stop replacing engines, since nothing more is sampled."""
        await self.recovery.close()

    async def _join(self, rank: int, new: ActorGroup[RolloutEngine]) -> None:
        """Send a new engine the weights that the others have, once the learners hold them; then it may sample."""
        assert self._check is not None, "only `replace_lost` lets engines be replaced"
        async with self._weights:
            await self._weights.wait_for(lambda: not self._updated)
            self.group.replace(rank, new)
            await self._transfer()
            await self._check(self.version)
            self._weights.notify_all()
