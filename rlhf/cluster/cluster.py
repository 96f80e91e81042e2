"""The roles of a run on Ray: starts all of them, connects learners and engines, moves weights and samples, ends all.

`separate` gives each role its own GPUs. `colocated` puts engine i on the GPUs of learners i x tensor_parallel to
(i + 1) x tensor_parallel - 1, and critic i on that of learner i. They take turns:

    sample   engines awake; learners and critics have only their weights there
    train    engines asleep; policy and critic one after the other, each brings back its state when it updates
    send     states leave, engines wake without their cache, the weights are sent, buffers are freed, the cache wakes
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
from ray.util.placement_group import remove_placement_group

from rlhf.cluster.actors import ActorGroup, LostError, start_call
from rlhf.cluster.checkpoints import Checkpoints
from rlhf.cluster.env_vars import environment_of
from rlhf.cluster.heartbeat import Heartbeat
from rlhf.cluster.placement import Placed, create, new_actor, rank_places, shared_gpus
from rlhf.cluster.rank_group import RankGroup
from rlhf.cluster.replacement import EngineLostError, Replacements, while_healthy
from rlhf.cluster.session import RaySession
from rlhf.config.grpo import GRPOConfig
from rlhf.config.printing import say
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, REWARD_MODEL, Role
from rlhf.data.templates import reward_input
from rlhf.log.clock import Watch, unwatched
from rlhf.plan import check_resources
from rlhf.plan.shared_gpus import check_shared_gpus
from rlhf.rollout.requests import SamplingSettings
from rlhf.types import Prompt, Rollout
from rlhf.weights import transfer
from rlhf.weights.client import EngineClient


class Cluster:
    """Everything that runs outside the driver, from `ray.init` until the last process is gone.

    Args:
        first_step: training steps done before this start; a resumed run samples with new noise.
        trains: False starts only the engines, for an evaluation.
        compare_nodes: False lets nodes with other versions take part.

    Attributes:
        lost: why Ray has ended; "" while it runs. The task that entered this context is then cancelled, and the end of
            the context raises an error in place of the cancellation.
    """

    watch_stage: Watch = staticmethod(unwatched)  # a context around each stage of the start

    def __init__(
        self, config: GRPOConfig, *, first_step: int = 0, trains: bool = True, compare_nodes: bool = True
    ) -> None:
        self.config = config
        self._compare_nodes = compare_nodes
        self.first_step = first_step
        self.trains = trains
        self.roles = config.roles(trains=trains)
        self._placed: dict[str, Placed] = {}  # by role
        self._session = RaySession()
        self._shares_gpus = trains and config.cluster.placement == "colocated"
        self._asleep = False
        self.checkpoints = Checkpoints(self.trained)
        self._version = first_step  # of the weights that the engines have
        self._connected: list[Any] = []  # the engines that the learners can send to
        self._transfer_lock = asyncio.Lock()
        self._replacements: Replacements | None = None
        self._groups: list[ActorGroup] = []  # all actors, those that are starting too
        self.heartbeat = Heartbeat(self._groups)
        self._watching: list[asyncio.Task[None]] = []
        self.lost = ""

    def group(self, role: str) -> ActorGroup:
        """The actors of a role."""
        return self._placed[role].group

    @property
    def learners(self) -> RankGroup:
        return cast(RankGroup, self.group(LEARNER))

    @property
    def critics(self) -> RankGroup:
        return cast(RankGroup, self.group(CRITIC))

    @property
    def engines(self) -> ActorGroup:
        return self.group(ENGINE)

    def trained(self) -> Mapping[str, RankGroup]:
        """The ranks of each trained role, by its name."""
        return {role.name: cast(RankGroup, self.group(role.name)) for role in self.roles if role.training is not None}

    async def __aenter__(self) -> Cluster:
        try:
            self._watching.append(asyncio.ensure_future(self.heartbeat.watch()))
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End everything.

        Raises:
            LostError: Ray itself has ended; RayLostError if it was not started here.
        """
        lost = self.lost or ("" if error is None else self._session.lost())
        if self.lost and (task := asyncio.current_task()):
            task.uncancel()
        if not lost:
            self._session.keep_logs(error, Path(self.config.run.dir), self._names())
        await self._stop(polite=not lost)
        if lost:
            raise self._session.lost_error(lost) from None

    async def _end_when_lost(self, task: asyncio.Task[Any]) -> None:
        """Cancel the task that uses this cluster when Ray has ended: its calls would never be answered."""
        try:
            self.lost = await self._session.wait_until_lost()
        except Exception as error:  # without the watch a lost Ray would be noticed at a deadline only
            self.lost = f"Ray could not be watched: {error!r}."
        task.cancel()

    # --- start ---

    async def _start(self) -> None:
        config = self.config.cluster
        with self.watch_stage("Ray"):
            self._session.start(config.ray_address)
        if task := asyncio.current_task():
            self._watching.append(asyncio.ensure_future(self._end_when_lost(task)))
        if self._compare_nodes:
            await self._session.compare_nodes(deadline_s=config.start_deadline_s)
        check_resources(self.config, ray.cluster_resources(), trains=self.trains)
        roles = {role.name: role for role in self.roles}
        guests = [roles.pop(name) for name in (CRITIC, ENGINE) if name in roles] if self._shares_gpus else []
        # Every creation ends before the first failure is raised: none may go on while the rest is stopped.
        starts = (self._create(role, guests if role.name == LEARNER else ()) for role in roles.values())
        created = await asyncio.gather(*starts, return_exceptions=True)
        for failure in created:
            if failure is not None:
                raise failure
        for guest in guests:
            self._placed[guest.name] = await create(guest, config, learners=self._placed[LEARNER])
        self._groups += [placed.group for placed in self._placed.values()]
        if self._shares_gpus:
            await self._build_one_after_another()
        else:
            # All roles load in parallel: none needs another to load, and an engine takes the longest.
            await asyncio.gather(*(self._build(role.name) for role in self.roles))
        if self.trains:
            await self._connect()

    async def _create(self, role: Role, guests: Sequence[Role]) -> None:
        self._placed[role.name] = await create(role, self.config.cluster, guests=guests)

    async def _build_one_after_another(self) -> None:
        """Load the roles that share GPUs. An engine takes the memory that is free when it starts, so it comes last."""
        for role in self.roles:
            if role.name == ENGINE:
                measured = {name: await ranks.call("gpu_memory") for name, ranks in self.trained().items()}
                for warning in check_shared_gpus(self.config, measured):
                    say(warning, file=sys.stderr)
            await self._build(role.name)
            if role.training is not None:
                await self._leave_gpus(role.name)

    async def _build(self, role: str) -> None:
        """Construct the hosted objects of a role."""
        placed, config = self._placed[role], self.config.cluster
        environments = [self._environment(role) for _ in placed.locations]
        arguments: list[tuple[Any, ...]]
        if placed.role.training is not None:
            # policy and critic compute at the same time
            threads = config.threads_per_learner or max(
                1, (os.cpu_count() or 1) // (config.learners * len(self.trained()))
            )
            places = rank_places(placed.locations, threads, config.device, deterministic=self.config.run.deterministic)
            arguments = [(self.config, place) for place in places]
        elif role == REWARD_MODEL:
            model, threads_each = self.config.reward_model, config.threads_per_learner or 1
            arguments = [(model, config.device, threads_each, reward_input(model))] * placed.role.count
        else:
            arguments = [self._engine_arguments(rank) for rank in range(placed.role.count)]
        if role in (CRITIC, ENGINE) and self._shares_gpus:
            for i, environment in enumerate(environments):
                gpus = shared_gpus(self._placed[LEARNER].locations, placed.role, i)
                environment["CUDA_VISIBLE_DEVICES"] = gpus
        with self.watch_stage(role if role == ENGINE else f"weights of the {role}"):
            await placed.group.build(environments, arguments, deadline_s=config.start_deadline_s)

    def _engine_arguments(self, rank: int) -> tuple[Any, ...]:
        return self.config, _engine_seed(self.config.run.seed, rank, self._version), self.transfer_backend

    async def _leave_gpus(self, *roles: str) -> None:
        """Make room on shared GPUs: these roles, or all trained roles, keep only their weights there."""
        for role in roles or self.trained():
            await self.group(role).call("leave_gpu", self.config.cluster.offload_while_sampling)

    async def together(self, calls: Mapping[str, Coroutine[Any, Any, Any]]) -> list[Any]:
        """Calls on trained roles, by role: at the same time, or on shared GPUs one after another."""
        if not self._shares_gpus:
            return list(await asyncio.gather(*calls.values()))
        results = []
        for role, call in calls.items():
            results.append(await call)
            await self._leave_gpus(role)
        return results

    def _environment(self, role: str) -> dict[str, str]:
        sockets = self._session.temp  # they are deleted with this folder
        return environment_of(role, self.config, transfer_backend=self.transfer_backend, sockets=sockets)

    # --- from disk ---

    async def load(self, folder: Path) -> None:
        """Put a checkpoint back; colocated engines sleep afterwards."""
        await self.sleep_colocated_engines()
        for role in self.trained():
            await self.checkpoints.load(role, folder)
            if self._shares_gpus:
                await self._leave_gpus(role)

    # --- weights and samples ---

    @property
    def transfer_backend(self) -> str:
        return transfer.backend_of(self.config.cluster.device, self.config.cluster.placement)

    async def _connect(self) -> None:
        connection = await self._connection()
        await self.learners.call("connect", *connection, deadline_s=self.config.cluster.start_deadline_s)
        self._connected = self.engines.present

    async def _connection(self) -> tuple[str, EngineClient, transfer.Rendezvous]:
        """What the learners need to meet the present engines."""
        config, engines = self.config.cluster, self.engines.present
        # Located again, for a port that is free now.
        sender, *_ = await self.learners.locate(deadline_s=config.start_deadline_s)
        engine_nodes = {location.node for location in self.engines.locations}
        rendezvous = transfer.Rendezvous(
            host=sender.host,
            port=sender.port,
            world_size=1 + len(engines) * config.tensor_parallel,
            timeout_s=config.start_deadline_s,
            one_node=engine_nodes == {sender.node},
        )
        client = EngineClient(
            partial(start_call, engines),
            engines=[f"engine {rank}" for rank in range(len(self.engines.actors)) if rank not in self.engines.absent],
            workers_per_engine=config.tensor_parallel,
        )
        return self.transfer_backend, client, rendezvous

    async def send_weights(self, version: int) -> None:
        """Learners -> engines, in flight: running requests pause, the weights change, the requests continue.

        Colocated engines have no requests then; they sleep until the weights come, to leave memory for the buffers.
        """
        await self.sleep_colocated_engines()
        if self._replacements is not None:
            await self._replacements.enough()
        async with self._transfer_lock:
            if self._asleep:
                await self._leave_gpus()
                await self.engines.call("wake_up", ["weights"])
            await self._transfer(version)
        if self._replacements is not None:
            self._replacements.ready()

    async def _transfer(self, version: int, *, unless_changed: bool = False) -> bool:
        """Send the weights to every engine, also to new ones; if the engines have changed, build a new transfer group.

        Args:
            unless_changed: send nothing if an update has begun; the result says whether the weights were sent.
        """
        joining = {} if self._replacements is None else self._replacements.admit()
        await self._pause_engines()
        connection = await self._connection() if self.engines.present != self._connected else None
        may_send = not (unless_changed and self.learners.changed)
        if may_send:  # no await before the call is sent: an update would come between
            engines = self.engines.present
            await while_healthy(self.engines, self.learners.call("send_weights", version, connection))
            self._connected = engines
            self._version, self.learners.changed = version, False
            if self._asleep:
                await self._leave_gpus()  # without the buffers of the transfer
                await self.engines.call("wake_up", ["kv_cache"])
                self._asleep = False
        await self.engines.call("resume")
        if self._replacements is not None and not may_send:
            self._replacements.send_back(joining)
        return may_send

    async def _pause_engines(self) -> None:
        ranks = [rank for rank in range(len(self.engines.actors)) if rank not in self.engines.absent]
        outcomes = await asyncio.gather(
            *(self.engines.call_one(rank, "pause", what="pausing") for rank in ranks), return_exceptions=True
        )
        for rank, outcome in zip(ranks, outcomes, strict=True):
            replaced = isinstance(outcome, LostError) and self._replaces(rank, outcome)
            if isinstance(outcome, BaseException) and not replaced:
                raise outcome
        if not self.engines.present:
            raise LostError("no engine is left to send the weights to")

    # --- engines that are lost ---

    def replace_lost_engines(self, check: Callable[[], Awaitable[None]]) -> None:
        """From now on replace lost engines, except on shared GPUs; `check` is called when a new one has joined."""
        if self._shares_gpus:
            return

        async def join(rank: int) -> None:
            async with self._transfer_lock:
                assert self._replacements is not None
                waits = rank in self._replacements.built and not self.learners.changed
                if waits and await self._transfer(self._version, unless_changed=True):
                    await check()
                    self._replacements.ready()

        self._replacements = Replacements(
            self.engines,
            start=self._start_engine,
            join=join,
            fewest=self.config.cluster.min_engines,
            allowed=self.config.run.max_restarts,
        )
        self._watching.append(asyncio.ensure_future(self._replacements.watch()))

    async def _start_engine(self, rank: int) -> ActorGroup:
        """A new engine in the place of another one, with the weights of model.path."""
        placed, config = self._placed[ENGINE], self.config.cluster
        assert placed.bundles is not None
        actor = new_actor(placed.role, placed.role.cpus, placed.bundles, placed.order[rank])
        new = ActorGroup(f"{ENGINE} {rank}, a new one,", [actor], deadline_s=config.step_deadline_s)
        self._groups.append(new)
        try:
            await new.locate(deadline_s=config.start_deadline_s)
            arguments = [self._engine_arguments(rank)]
            await new.build([self._environment(ENGINE)], arguments, deadline_s=config.start_deadline_s)
        except BaseException:
            ray.kill(actor)
            raise
        finally:
            self._groups.remove(new)
        return new

    def _replaces(self, rank: int, error: LostError) -> bool:
        return self._replacements is not None and self._replacements.take_over(rank, error)

    async def next_engine(self, in_flight: Sequence[int]) -> int:
        """The engine with the fewest groups in progress."""
        if self._replacements is None:
            return min(range(len(in_flight)), key=in_flight.__getitem__)
        return await self._replacements.next_engine(in_flight)

    async def sleep_colocated_engines(self) -> None:
        """Before the learners work: engines on the same GPUs free their memory until the next weights arrive."""
        if self._shares_gpus and not self._asleep:
            await self.engines.call("sleep")
            self._asleep = True

    async def sample_group(
        self, engine: int, prompt: Prompt, samples: int, settings: SamplingSettings
    ) -> list[Rollout]:
        """All samples of a prompt.

        Raises:
            EngineLostError: the engine is lost and being replaced; another engine can sample the group.
        """
        sampling = self.engines.call_one(
            engine, "sample_group", prompt, samples, settings, what=f"sampling {prompt.id}"
        )
        try:
            if self._replacements is not None:  # a failed replacement may have left this engine paused
                sampling = self._replacements.unless_failed(sampling)
            rollouts: list[Rollout] = await sampling
        except LostError as error:
            if self._replaces(engine, error):
                raise EngineLostError(str(error)) from error
            raise
        return rollouts

    async def score_conversations(self, copy: int, conversations: list[list[dict[str, str]]]) -> list[float | None]:
        """Scores from one copy of the reward model."""
        scores: list[float | None] = await self.group(REWARD_MODEL).call_one(
            copy, "score", conversations, what=f"{len(conversations)} responses"
        )
        return scores

    # --- end ---

    def _names(self) -> dict[str, str]:
        """The names of the actors by process."""
        groups = [(role, placed.group.locations) for role, placed in self._placed.items()]
        return {str(place.process): f"{role} {rank}" for role, places in groups for rank, place in enumerate(places)}

    async def _stop(self, *, polite: bool) -> None:
        """End everything; `polite` lets the actors close, and frees what they hold of a cluster that goes on."""
        for task in self._watching:
            task.cancel()
        if self._replacements is not None:
            await self._replacements.close(kill=polite and ray.is_initialized())
        if ray.is_initialized() and polite:
            await asyncio.gather(*(placed.group.end() for placed in self._placed.values()))
            for placed in self._placed.values():
                if placed.bundles is not None:
                    remove_placement_group(placed.bundles)
        self._session.stop()


def _engine_seed(seed: int, engine: int, first_step: int) -> int:
    """Engines sample differently from each other, and a resumed run does not repeat the noise of its first part."""
    return int(np.random.SeedSequence([seed, engine, first_step]).generate_state(1)[0]) & 0x7FFFFFFF
