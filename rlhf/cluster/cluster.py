"""The roles of a run on Ray: starts and ends all of them. Calls of the engines are in `engines`.

`separate` gives each role its own GPUs. `colocated` puts engine i on the GPUs of learners i x tensor_parallel to
(i + 1) x tensor_parallel - 1, and critic i on that of learner i. They take turns:

    sample   engines awake; learners and critics have only their weights there
    train    engines asleep; policy and critic one after the other, each brings back its state when it updates
    send     states leave, engines wake without their cache, the weights are sent, buffers are freed, the cache wakes
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.placement_group import remove_placement_group

from rlhf.check.memory import check_shared_gpus
from rlhf.check.resources import check_resources
from rlhf.cluster import heartbeat
from rlhf.cluster.actor_start import create, create_guest, environment_of, new_actor, shared_cores, shared_gpus
from rlhf.cluster.actors import ActorGroup
from rlhf.cluster.rank_group import RankGroup, RoleCheckpoints, folder_of
from rlhf.cluster.session import RaySession
from rlhf.cluster.worker_actors import worker_nodes
from rlhf.config.printing import say
from rlhf.config.program import TrainingProgramConfig
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, Role
from rlhf.log.clock import Watch
from rlhf.types import World

if TYPE_CHECKING:
    from rlhf.learner.critic import Critic
    from rlhf.learner.policy import Learner
    from rlhf.learner.rank import TrainedRank


class Cluster:
    """Everything that runs outside the driver, from `ray.init` until the last process is gone.

    Args:
        first_step: training steps done before this start; a resumed run samples with new noise.
        trains: False starts only the engines, for an evaluation.
        compare_nodes: False lets nodes with other versions take part.
        watch_stage: a context around each stage of the start.
    """

    def __init__(
        self,
        config: TrainingProgramConfig,
        *,
        first_step: int = 0,
        trains: bool = True,
        compare_nodes: bool = True,
        watch_stage: Watch = contextlib.nullcontext,
    ) -> None:
        self.config, self.first_step, self.trains, self.watch_stage = config, first_step, trains, watch_stage
        self.roles = config.roles(trains=trains)
        # engines and critics are on the GPUs of the learners, and take turns with them
        self.shares_gpus = trains and getattr(config.cluster, "placement", "separate") == "colocated"
        self.checkpoints = RoleCheckpoints(self.trained)
        self.lost = ""  # why Ray has ended; empty while it runs
        self._compare_nodes = compare_nodes
        self._groups: dict[str, ActorGroup[Any]] = {}  # by role
        self._session = RaySession()
        self._watched: list[ActorGroup[Any]] = []  # by the heartbeat: all actors, also while they start
        self._watching: list[asyncio.Task[None]] = []
        self._background = set[asyncio.Task[Any]]()
        self._user: asyncio.Task[Any] | None = None  # the task that entered this context
        self._failure: Exception | None = None

    def group(self, role: str) -> ActorGroup[Any]:
        """The actors of a role."""
        return self._groups[role]

    @property
    def learners(self) -> RankGroup[Learner]:
        return cast(RankGroup[Any], self.group(LEARNER))

    @property
    def critics(self) -> RankGroup[Critic]:
        return cast(RankGroup[Any], self.group(CRITIC))

    def trained(self) -> Mapping[str, RankGroup[TrainedRank]]:
        """The ranks of each trained role, by its name."""
        return {
            role.name: cast(RankGroup[Any], self.group(role.name)) for role in self.roles if role.training is not None
        }

    async def __aenter__(self) -> Cluster:
        self._user = asyncio.current_task()
        try:
            self._watching.append(asyncio.ensure_future(heartbeat.watch(self._watched)))
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """End everything.

        Raises:
            LostError: Ray itself has ended; RayLostError if it was not started here.
            Exception: the first one that `end_with` was called with.
        """
        if self._failure is not None and self._user is not None:
            self._user.uncancel()
            error = self._failure
        self._user = None  # nothing cancels the end
        lost = self.lost or ("" if error is None else self._session.lost())
        groups = self._groups.items()
        if not lost:
            names = {str(x.process): f"{name} {i}" for name, group in groups for i, x in enumerate(group.locations)}
            self._session.keep_logs(error, Path(self.config.run.dir), names)
        for task in [*self._watching, *self._background]:
            task.cancel()
        if ray.is_initialized() and not lost:  # actors close, and return their resources to a cluster that goes on
            await asyncio.gather(*(group.end() for _, group in groups))
            for reservation in filter(None, (group.reservation for _, group in groups)):
                remove_placement_group(reservation)
        self._session.stop()
        if lost:
            raise self._session.lost_error(lost) from None
        if self._failure is not None:
            raise self._failure from None

    def background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start work beside the task that uses this cluster. `end_with` cancels it first, so that it keeps no lock.

        An error of this work ends the use of the cluster.
        """
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._has_ended)
        return task

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        self._background.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.end_with(error)

    def end_with(self, failure: Exception) -> None:
        """Cancel the task that uses this cluster; the end of the context then raises `failure`."""
        if self._failure is None and self._user is not None:
            self._failure = failure
            for task in [*self._background, self._user]:
                task.cancel()

    async def _end_when_lost(self) -> None:
        """End the use of this cluster when Ray has ended: calls would never be answered."""
        try:
            self.lost = await self._session.wait_until_lost()
        except Exception as error:  # without the watch a lost Ray would be noticed at a deadline only
            self.lost = f"Ray could not be watched: {error!r}."
        self.end_with(self._session.lost_error(self.lost))

    # --- start ---

    async def _start(self) -> None:
        config = self.config.cluster
        with self.watch_stage("Ray"):
            self._session.start(config.ray_address)
        self._watching.append(asyncio.ensure_future(self._end_when_lost()))
        if self._compare_nodes:
            await self._session.compare_nodes(deadline_s=config.start_deadline_s)
        check_resources(self.config, ray.cluster_resources(), trains=self.trains)
        guests = [role for role in self.roles if role.guest and self.shares_gpus]
        hosts = [role for role in self.roles if role not in guests]
        # Every creation ends before the first failure is raised: none may go on while the rest is stopped.
        starts = (self._create(role, guests if role.name == LEARNER else ()) for role in hosts)
        created = await asyncio.gather(*starts, return_exceptions=True)
        for failure in created:
            if failure is not None:
                raise failure
        for guest in guests:
            self._groups[guest.name] = await create_guest(guest, config, self.learners)
        self._watched += self._groups.values()
        if self.shares_gpus:
            await self._build_one_after_another()
        else:
            # All roles load in parallel: none needs another to load, and an engine takes the longest.
            await asyncio.gather(*map(self._build, self.roles))

    async def _create(self, role: Role, guests: Sequence[Role]) -> None:
        self._groups[role.name] = await create(role, self.config.cluster, guests=guests)

    async def _build_one_after_another(self) -> None:
        """Load the roles that share GPUs. An engine takes the memory that is free when it starts, so it comes last."""
        for role in self.roles:
            if role.name == ENGINE and self.config.cluster.device == "cuda":  # else in tests of this project
                measured = {
                    name: await ranks.call(lambda rank: rank.gpu_memory()) for name, ranks in self.trained().items()
                }
                for warning in check_shared_gpus(cast(Any, self.config), measured):
                    say(warning, file=sys.stderr)
            await self._build(role)
            if role.training is not None:
                await self.leave_gpus(role.name)

    async def _build(self, role: Role) -> None:
        """Construct the hosted objects of a role."""
        arguments = self._arguments(role, self.first_step)
        with self.watch_stage(role.name if role.name == ENGINE else f"weights of the {role.name}"):
            await self.group(role.name).build(arguments, deadline_s=self.config.cluster.start_deadline_s)

    def _arguments(self, role: Role, version: int) -> list[tuple[Any, ...]]:
        """For each actor of a role: its environment, and the arguments of the class that it hosts."""
        config, locations = self.config.cluster, self.group(role.name).locations
        nodes = [location.node for location in locations]
        trained = [location for ranks in self.trained().values() for location in ranks.locations]
        read: tuple[Any, ...] = ()
        if role.reads:
            module, function = role.reads.split(":")
            read = (getattr(importlib.import_module(module), function)(self.config),)
        arguments = []
        for rank, node in enumerate(nodes):
            share = 1 if role.training is None else shared_cores(locations[rank], trained)
            world = World(
                rank,
                size=len(nodes),
                # A learner sees only its own GPU, as device 0; on CPU the ranks of a node are numbered.
                local_rank=0 if config.device == "cuda" else nodes[:rank].count(node),
                master_host=locations[0].host,
                master_port=locations[0].port,
                threads=config.threads_per_learner or share,
                ranks_on_node=nodes.count(node),
                deterministic=self.config.run.deterministic,
                version=version,
                deadline_s=max(config.start_deadline_s, config.step_deadline_s),
                sequence_parallel=config.sequence_parallel if role.training is not None else 1,
            )
            environment = environment_of(role.name, self.config, sockets=self._session.temp)  # deleted with this folder
            if role.guest and self.shares_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = shared_gpus(self.learners.locations, role, rank)
            arguments.append((environment, self.config, world, *read))
        return arguments

    async def start_another(self, role_name: str, rank: int, *, version: int) -> ActorGroup[Any]:
        """Start a replacement for an actor. Returns a group of one, which has the weights of model.path.

        `version`: version of the weights that the other actors have.
        """
        config, old = self.config.cluster, self.group(role_name)
        (role,) = (role for role in self.roles if role.name == role_name)
        assert old.reservation is not None
        actor = new_actor(role, role.cpus, old.reservation, old.bundles[rank])
        new = ActorGroup[Any](f"{role_name} {rank}, a new one,", [actor], deadline_s=config.step_deadline_s)
        with self.watched(new):
            await new.locate(deadline_s=config.start_deadline_s)
            await new.build([self._arguments(role, version)[rank]], deadline_s=config.start_deadline_s)
        return new

    @contextlib.contextmanager
    def watched(self, group: ActorGroup[Any]) -> Iterator[None]:
        """A context in which the heartbeat looks at a group that is being started; after an error it is killed."""
        self._watched.append(group)
        try:
            yield
        except BaseException:
            for actor in group.actors:
                ray.kill(actor)
            raise
        finally:
            self._watched.remove(group)

    def keep(self, name: str, group: ActorGroup[Any]) -> None:
        """From now on watch a group of actors, and end it with this cluster."""
        self._groups[name] = group
        self._watched.append(group)

    async def end(self, name: str) -> None:
        """End a group of `keep`; after a failure the end of the cluster does it, which keeps the logs."""
        if self._failure is None and not self._session.lost():
            group = self._groups.pop(name)
            self._watched.remove(group)
            await group.end()

    def rollout_worker_nodes(self) -> list[str]:
        """The node of each rollout worker that is an actor; see `worker_nodes`."""
        nodes = [location.node for location in self.group(ENGINE).locations]
        here, cores = ray.get_runtime_context().get_node_id(), ray.cluster_resources().get("CPU", 0.0)
        return worker_nodes(cast(Any, self.config), nodes, cores, here)

    # --- while it runs ---

    async def leave_gpus(self, *roles: str) -> None:
        """Make room on shared GPUs: these roles, by default all trained ones, keep only their weights there."""
        for role in roles or self.trained():
            offload = getattr(self.config.cluster, "offload_while_sampling", True)
            ranks: RankGroup[TrainedRank] = cast(RankGroup[Any], self.group(role))
            await ranks.call(lambda rank: rank.leave_gpu(offload))  # noqa: B023

    async def run_together(self, calls: Mapping[str, Coroutine[Any, Any, Any]]) -> list[Any]:
        """Calls on trained roles, by role: at the same time, or on shared GPUs one after another."""
        if not self.shares_gpus:
            return list(await asyncio.gather(*calls.values()))
        results = []
        for role, call in calls.items():
            results.append(await call)
            await self.leave_gpus(role)
        return results

    async def load(self, folder: Path) -> None:
        """Load a checkpoint into all trained roles; engines on the same GPUs must sleep."""
        for name, ranks in self.trained().items():
            await ranks.call(lambda rank: rank.load(str(folder_of(name, folder))))  # noqa: B023
            if self.shares_gpus:
                await self.leave_gpus(name)
