"""The actors that hold environments on the other nodes of a cluster, one on each; see `rlhf.environments.nodes`."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf.cluster.actors import ActorGroup, HostedAsyncActor, wait_for
from rlhf.cluster.node_report import node_names
from rlhf.config.sections import LearnersConfig
from rlhf.environments.nodes import NodeHosts, RemoteHosts, Spread

HOST = "environment host"
# By default an actor that ends kills its children, so also the keeper, which has yet to kill the processes of tools.
KEEPERS_END_THEMSELVES = {"RAY_kill_child_processes_on_worker_exit": "0"}
RESTART_DELAY_S = 5.0  # before a lost actor is started again: the cause of its end may last a while


class EnvironmentNodes:
    """The other nodes that are alive when the run starts.

    Attributes:
        group: their actors; one that is lost is replaced.
    """

    def __init__(self, spread: Spread, cluster: LearnersConfig) -> None:
        here = ray.get_runtime_context().get_node_id()
        names = node_names([node for node in ray.nodes() if node["Alive"]])
        self._names = {node: name for node, name in names.items() if node != here}
        self._spread, self._cluster = spread, cluster
        self.group = self._actors(*self._names)

    async def start(self) -> list[asyncio.Task[None]]:
        """Start the environments of all nodes. Returns tasks that replace lost actors; the caller cancels them.

        Raises:
            ValueError: a node cannot load the environments.
        """
        await self.group.locate(deadline_s=self._cluster.start_deadline_s)
        hosts = await asyncio.gather(*(self._build(self.group, rank) for rank in range(len(self._names))))
        self.group.built = True
        kept = (self._spread.keep(each, partial(self._start_again, rank)) for rank, each in enumerate(hosts))
        return [asyncio.ensure_future(each) for each in kept]

    def _actors(self, *nodes: str) -> ActorGroup[NodeHosts]:
        actors = []
        for node in nodes:
            actor: Any = ray.remote(HostedAsyncActor).options(
                num_cpus=0,
                max_concurrency=10_000,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"env_vars": KEEPERS_END_THEMSELVES},
            )
            actors.append(actor.remote("rlhf.environments.nodes", "NodeHosts"))
        return ActorGroup(HOST, actors, deadline_s=self._cluster.step_deadline_s)

    async def _build(self, group: ActorGroup[NodeHosts], rank: int) -> RemoteHosts:
        """Let a located actor load the environments, with the environment variables that they are granted here."""
        actor, here, deadline_s = group.actors[rank], self._spread.here, self._cluster.start_deadline_s
        node = self._names[group.locations[rank].node]

        async def call(method: str, *arguments: Any, deadline_s: float) -> Any:
            answer = actor.call.remote(method, *arguments)
            return await wait_for(answer, what=method, deadline_s=deadline_s, homes=group.homes)

        granted = {name: os.environ[name] for name in here.config.env}
        built = actor.build.remote(granted, here.config, here.tools, here.sources, here.port)
        what = f"environments on node {node}: start-up"
        try:
            await wait_for(built, what=what, deadline_s=deadline_s, homes=group.homes)
        except ValueError as error:
            raise ValueError(f"node {node}: {error}") from None
        for name in {*await call("unconfined", deadline_s=deadline_s)} - {*here.unconfined}:
            self._spread.say(
                f"warning: environment: the kernel of node {node} cannot keep environments from your {name} "
                "(docs/security.md)."
            )
        return RemoteHosts(node, here, call, self._spread.say)

    async def _start_again(self, rank: int) -> RemoteHosts:
        """A new actor in place of a lost one."""
        self.group.absent.add(rank)
        lost = ActorGroup[NodeHosts](HOST, [self.group.actors[rank]], deadline_s=RESTART_DELAY_S)
        lost.built = True
        await lost.end()  # ends its child processes too, if it still answers
        await asyncio.sleep(RESTART_DELAY_S)
        new = self._actors(self.group.locations[rank].node)
        try:
            await new.locate(deadline_s=self._cluster.start_deadline_s)
            hosts = await self._build(new, 0)
        except BaseException:
            ray.kill(new.actors[0])
            raise
        self.group.replace(rank, new)
        return hosts
