"""The Ray actors of rollout workers: how they are placed, built, reached and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.cluster.actors import END_S, ActorGroup, HostedAsyncActor, LostError, SilentError, wait_for
from rlhf.cluster.dispatch import News, Order
from rlhf.cluster.engine_choice import ListedEngines
from rlhf.cluster.node_report import node_names
from rlhf.config.environment import LOOPBACK, SERVICE
from rlhf.config.grpo import GRPOConfig
from rlhf.config.program import with_values
from rlhf.processes import objects
from rlhf.processes.code import Sources
from rlhf.processes.confinement import NETWORK_VARIABLES
from rlhf.rewards.rubric import SPENT, Judge

if TYPE_CHECKING:
    from rlhf.cluster.engines import Engines
    from rlhf.cluster.hosted_worker import HostedWorker
    from rlhf.learner.reward_scorer import RewardScorer

WORKER, JUDGE = "rollout worker", "judge"
HOSTED = "rlhf.cluster.hosted_worker:HostedWorker"
# By default an actor that ends kills its children, so also the keeper, which has yet to kill the processes of tools.
KEEPERS_END_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
RESTART_DELAY_S = 5.0  # before a lost actor is started again: the cause of its end may last a while
ACCOUNT_S = 5.0  # between two looks at what the judge has spent
SILENT_S = 90.0  # an exchange answers in a few seconds; without an answer, the worker is lost
FEW_CORES, CORES_PER_WORKER = 8, 4  # of `cluster.rollout_workers=auto`
MIN_ALLOWED = 4  # workers that a cluster may have whatever its cores


@dataclass(frozen=True)
class WorkerParts:
    """What a worker actor is built from."""

    number: int  # of the worker, for ties between engines
    workers: int  # of the run
    workers_on_node: int  # they share `reward.workers`
    folder: str  # where the run was started; the meaning of relative paths
    sources: Mapping[str, Sources]  # fingerprints of the user's code in the driver, by the noun of messages
    engines: tuple[int, ListedEngines, str | None]  # the newest arguments of `EngineChoice.update`
    reward_models: ActorGroup[RewardScorer] | None  # the actors of the reward model
    scale: tuple[float, float] | None  # mean and std of the reward model's scores; None without a reward model
    judge: Any  # the actor that grades by rubrics


class JudgeGroup(ActorGroup[Judge]):
    """The judge's actor. What it has spent is kept in this process too, for a restart of the run."""

    async def keep_account(self) -> None:
        with contextlib.suppress(LostError):
            while True:
                await asyncio.sleep(ACCOUNT_S)
                SPENT.update(*await self.call(lambda judge: judge.spent()))

    async def end(self) -> None:
        if self.built:
            with contextlib.suppress(LostError):
                SPENT.update(*await self.call(lambda judge: judge.spent(), deadline_s=END_S))
        await super().end()


class WorkerActors:
    """The worker actors of a run. Fulfils `EngineListener`.

    Args:
        sources: fingerprints of the user's code in this process, by the noun of messages.
        reward_models: the actors of the reward model; None without any.
    """

    def __init__(
        self,
        engines: Engines,
        config: GRPOConfig,
        sources: Mapping[str, Sources],
        reward_models: ActorGroup[RewardScorer] | None,
    ) -> None:
        self._engines, self._cluster, self._config = engines, engines.cluster, config
        self._sources, self._reward_models = sources, reward_models
        self._group: ActorGroup[HostedWorker] = ActorGroup(WORKER, [], deadline_s=config.cluster.step_deadline_s)
        self._names: dict[str, str] = {}  # of nodes, by id
        self._homes: dict[str, str] = {}  # `homes` of the group
        self._driver = ray.get_runtime_context().get_node_id()
        self._ready: tuple[int, ListedEngines, str | None] = (0, {}, None)  # the newest list of engines
        self._scale: tuple[float, float] | None = None
        self._judge: Any = None

    def node(self, rank: int) -> str:
        """The name of a worker's node."""
        return self._names[self._group.locations[rank].node]

    @property
    def several_nodes(self) -> bool:
        return len({location.node for location in self._group.locations}) > 1

    async def exchange(self, rank: int, orders: Sequence[Order]) -> Sequence[News]:
        """Send a worker orders and wait for news. Raises LostError.

        Both are pickled here and there: that takes half the time of Ray's own pickler.
        """
        answer = self._group.actors[rank].call.remote("exchange", pickle.dumps(orders))
        what, homes = f"{WORKER} {rank}", self._homes
        try:
            answered = await wait_for(answer, what=what, deadline_s=SILENT_S / 2, homes=homes)
        except SilentError:  # or this process stood still
            answered = await wait_for(answer, what=what, deadline_s=SILENT_S / 2, homes=homes)
        news: Sequence[News] = pickle.loads(answered)
        return news

    def send(self, rank: int, orders: Sequence[Order]) -> None:
        """Send a worker orders while an exchange waits for news."""
        self._group.actors[rank].call.remote("take", pickle.dumps(orders))

    # --- what all workers are told ---

    def update(self, number: int, engines: ListedEngines, failure: str | None = None) -> None:
        self._ready = (number, engines, failure)
        self._tell("update_engines", *self._ready)

    def set_scale(self, mean: float, std: float) -> None:
        self._scale = (mean, std)
        self._tell("set_scale", mean, std)

    def _tell(self, method: str, *arguments: Any) -> None:
        for actor in self._group.present if self._group.built else ():
            actor.call.remote(method, *arguments)

    def _has_built(self) -> None:
        """After a worker was built: tell all what may have changed meanwhile."""
        self._homes = self._group.homes
        self._tell("update_engines", *self._ready)
        if self._scale is not None:
            self._tell("set_scale", *self._scale)

    # --- start ---

    async def start(self, nodes: Sequence[str]) -> None:
        """Start a worker on each of these nodes. Raises ValueError if one cannot start what the config names."""
        self._names = node_names(ray.nodes())
        deadline_s = self._config.cluster.start_deadline_s
        if any(part.name == "rubric" for part in self._config.reward.all_parts):
            judge = JudgeGroup(
                JUDGE, [_new_actor("rlhf.rewards.rubric:Judge", self._driver)], deadline_s=self._group.deadline_s
            )
            self._cluster.keep(JUDGE, judge)
            await judge.locate(deadline_s=deadline_s)
            keys = [part.options.get("key_variable_name") for part in self._config.reward.all_parts]
            await judge.build([(_granted(keys), self._config.reward, SPENT)], deadline_s=deadline_s)
            (self._judge,) = judge.actors
            self._cluster.background(judge.keep_account())
        self._group.actors = [_new_actor(HOSTED, node) for node in nodes]
        self._cluster.keep(WORKER, self._group)
        await self._group.locate(deadline_s=deadline_s)
        self._engines.recovery.subscribe(self)
        await asyncio.gather(*(self._build(self._group, rank, rank, nodes) for rank in range(len(nodes))))
        self._group.built = True
        self._has_built()

    async def end(self) -> None:
        """End all actors, while the cluster goes on."""
        self._engines.recovery.unsubscribe(self)
        await self._cluster.end(WORKER)
        if self._judge is not None:
            await self._cluster.end(JUDGE)

    async def start_again(self, rank: int) -> None:
        """Put a new actor in place of a lost one; on another node if Ray says that its own is gone."""
        self._group.absent.add(rank)
        lost: ActorGroup[HostedWorker] = ActorGroup(WORKER, [self._group.actors[rank]], deadline_s=RESTART_DELAY_S)
        lost.built = True
        await lost.end()  # ends its processes too, if it still answers
        await asyncio.sleep(RESTART_DELAY_S)
        nodes, engines = [place.node for place in self._group.locations], self._engines.group
        while True:
            with_engines = [
                place.node for number, place in enumerate(engines.locations) if number not in engines.absent
            ]
            nodes[rank] = node_for(nodes, rank, with_engines, self._alive())
            try:
                self._group.replace(rank, await self._start_another(rank, nodes))
            except LostError:
                if nodes[rank] in self._alive():
                    raise
            else:
                self._has_built()
                return

    def _alive(self) -> set[str]:
        """The nodes that Ray calls alive; it takes some seconds to notice that one is gone."""
        nodes = ray.nodes()
        self._names |= node_names(nodes)
        return {node["NodeID"] for node in nodes if node["Alive"]}

    async def _start_another(self, rank: int, nodes: Sequence[str]) -> ActorGroup[HostedWorker]:
        what, deadline_s = f"{WORKER} {rank}, a new one,", self._config.cluster.start_deadline_s
        new: ActorGroup[HostedWorker] = ActorGroup(what, [_new_actor(HOSTED, nodes[rank])], deadline_s=deadline_s)
        with self._cluster.watched(new):
            await new.locate(deadline_s=deadline_s)
            await self._build(new, 0, rank, nodes)
        return new

    async def _build(self, group: ActorGroup[HostedWorker], rank: int, number: int, nodes: Sequence[str]) -> None:
        """Construct worker `number` in an actor of the group; `nodes`: of all workers."""
        config, actor, node = self._config, group.actors[rank], group.locations[rank].node
        environment, grades = config.environment, config.reward.all_parts
        keys = [*environment.env, *(part.key_variable_name for part in environment.parts.values())]
        granted = _granted([*keys, *(name for part in grades for name in part.env)])
        own = worker_config(config, number, nodes)
        if environment.endpoint_host != LOOPBACK and node != self._driver:
            own = with_values(own, environment={"endpoint_host": group.locations[rank].host})
        parts = WorkerParts(
            number, len(nodes), nodes.count(node), os.getcwd(), self._sources, self._ready, self._reward_models,
            self._scale, self._judge,
        )  # fmt: skip
        what = f"{WORKER} {number} on node {self._names[node]}: start-up"
        answer, deadline_s = actor.build.remote(objects.sent(), granted, own, parts), config.cluster.start_deadline_s
        try:
            await wait_for(answer, what=what, deadline_s=deadline_s, homes=group.homes)
        except ValueError as error:
            raise ValueError(f"node {self._names[node]}: {error}") from None


def _new_actor(hosted: str, node: str) -> Any:
    actor: Any = ray.remote(HostedAsyncActor).options(
        num_cpus=0,
        max_concurrency=10_000,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": KEEPERS_END_THEMSELVES},
    )
    return actor.remote(*hosted.split(":"))


def _granted(names: Iterable[str | None]) -> dict[str, str]:
    """The environment variables of these names and those of the network, with their values here."""
    names = (*NETWORK_VARIABLES, "no_proxy", "NO_PROXY", *names)
    return {name: os.environ[name] for name in names if name is not None and name in os.environ}


def worker_nodes(config: GRPOConfig, engine_nodes: Sequence[str], cores: float, driver: str) -> list[str]:
    """The node of each rollout worker that is an actor; none if the only one is in the driver's process.

    Args:
        engine_nodes: the node of each engine.
        cores: of the whole cluster.
        driver: the driver's node. If a service reaches the model at 127.0.0.1, all workers are there.

    Raises ValueError if the config asks for more workers than there are cores, unless that is at most MIN_ALLOWED.
    """
    environment, count = config.environment, config.cluster.rollout_workers
    if count != "auto" and count > max(cores, MIN_ALLOWED):
        raise ValueError(
            f"cluster.rollout_workers={count}: the cluster has {cores:g} cores, and a worker needs one. Set auto, or "
            "a smaller number."
        )
    nodes = list(dict.fromkeys(engine_nodes))
    if environment.endpoint_host == LOOPBACK and any(part.name == SERVICE for part in environment.parts.values()):
        nodes = [driver]
    automatic = 0 if cores < FEW_CORES else min(len(nodes), int(cores / CORES_PER_WORKER))
    return [nodes[number % len(nodes)] for number in range(automatic if count == "auto" else count)]


def worker_config(config: GRPOConfig, number: int, nodes: Sequence[str]) -> GRPOConfig:
    """The config of worker `number`, with its share of `environment.processes` and of requests to a reward model.

    `nodes`: of all workers.
    """
    environment, model = config.environment, config.reward_model
    has_services = any(part.name == SERVICE for part in environment.parts.values())
    sharing = [other for other, node in enumerate(nodes) if has_services or node == nodes[number]]
    processes = share(environment.processes, len(sharing), sharing.index(number))
    changed: dict[str, dict[str, int]] = {"environment": {"processes": processes}}
    if model is not None and not model.path:  # behind an endpoint
        changed["reward_model"] = {"replicas": share(model.replicas, len(nodes), number)}
    return with_values(config, **changed)


def share(total: int, shares: int, number: int) -> int:
    """The size of share `number` from 0; at least 1. Together they are `total`, if that is enough for all."""
    return max(1, (total + shares - 1 - number) // shares)


def node_for(nodes: Sequence[str], rank: int, with_engines: Sequence[str], alive: Collection[str]) -> str:
    """The node where a worker is started again: its own, or, if that is gone, the one of engines with the fewest.

    `nodes`: of all workers. Raises LostError if no node with engines is alive.
    """
    if nodes[rank] in alive:
        return nodes[rank]
    left = [node for node in with_engines if node in alive]
    if not left:
        raise LostError(f"{WORKER} {rank} cannot be started again: no node with engines is left.")
    return min(left, key=nodes.count)
