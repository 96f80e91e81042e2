"""Reserves resources for a role and creates its actors: their bundles, locations and order.

Learners form one DeepSpeed world whose ranks on a node are neighbours. Engines are independent, each on one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf.cluster.actors import ActorGroup, ClusterError, HostedActor, HostedAsyncActor, Location, wait_for
from rlhf.cluster.rank_group import RankGroup
from rlhf.config.roles import CRITIC, ENGINE, LEARNER, REWARD_MODEL, Role
from rlhf.config.sections import ClusterConfig
from rlhf.learner.rank_place import Place
from rlhf.plan import GPU

HOSTED = {
    LEARNER: "rlhf.learner.worker:Learner",
    CRITIC: "rlhf.learner.critic:Critic",
    REWARD_MODEL: "rlhf.learner.reward_scorer:RewardScorer",
    ENGINE: "rlhf.rollout.engine:RolloutEngine",
}


@dataclass(frozen=True)
class Placed:
    """The actors of a role, in the order of their ranks.

    Attributes:
        locations: of each actor.
        bundles: the role's own reservation; None if its actors are in the bundles of another role.
        order: the bundle of each actor, by number.
    """

    role: Role
    group: ActorGroup
    locations: list[Location]
    bundles: PlacementGroup | None
    order: list[int]


async def create(role: Role, cluster: ClusterConfig, *, learners: Placed | None = None) -> Placed:
    """Reserve what a role asks for and create its actors; nothing is loaded in them yet.

    Args:
        learners: those whose GPUs engines share; engine i is in the bundle of its first learner.

    Raises:
        ClusterError: the resources were not free within the deadline. Nothing stays reserved.
    """
    if learners is not None:
        assert learners.bundles is not None
        order = learners.order[:: cluster.tensor_parallel]
        placed = await _start_actors(role, cluster, learners.bundles, order, _shared_cpus(cluster))
        return replace(placed, bundles=None)
    shared = _shared_cpus(cluster) if role.name == LEARNER and cluster.placement == "colocated" else 0.0
    bundle = {"CPU": role.cpus + shared} | ({GPU: role.gpus} if role.gpus else {})
    bundles = placement_group([bundle] * role.count, strategy="PACK")
    try:
        await _wait_until_reserved(bundles, f"{role.count} {role.name}s of {bundle} each", cluster.start_deadline_s)
        return await _start_actors(role, cluster, bundles, range(role.count), role.cpus)
    except BaseException:
        remove_placement_group(bundles)
        raise


async def _start_actors(
    role: Role, cluster: ClusterConfig, bundles: PlacementGroup, order: Sequence[int], cpus: float
) -> Placed:
    """Create the actors of a role in these bundles; ranks of a trained role that share a node become neighbours."""
    group = (ActorGroup if role.training is None else RankGroup)(
        role.name,
        [new_actor(role, cpus, bundles, index) for index in order],
        deadline_s=cluster.step_deadline_s,
    )
    locations = await group.locate(deadline_s=cluster.start_deadline_s)
    if role.training is not None:
        neighbours = _neighbours_together(locations)
        group.reorder(neighbours, locations)
        locations, order = [locations[i] for i in neighbours], [order[i] for i in neighbours]
    return Placed(role, group, locations, bundles, list(order))


def _shared_cpus(cluster: ClusterConfig) -> float:
    """What each learner's bundle holds for the engine on its GPU: an engine's CPUs, divided among its learners.

    Any learner may become the first of its engine, whose bundle the engine's actor joins, so all bundles are equal.
    """
    return cluster.cpus_per_engine / cluster.tensor_parallel


def rank_places(locations: Sequence[Location], threads: int) -> list[Place]:
    """The place of each rank of one world; ranks of a node are neighbours."""
    places = []
    for rank, location in enumerate(locations):
        before = sum(other.node == location.node for other in locations[:rank])
        # Ray shows a learner only its own GPU, as device 0; on CPU the ranks of a node are numbered.
        local_rank = 0 if location.gpu_ids else before
        places.append(Place(rank, len(locations), local_rank, locations[0].host, locations[0].port, threads))
    return places


def shared_gpus(learners: Sequence[Location], engine: int, tensor_parallel: int) -> str:
    """The GPUs of the learners that an engine shares; they must be on one node."""
    own = learners[engine * tensor_parallel : (engine + 1) * tensor_parallel]
    if len({location.node for location in own}) > 1:
        raise ClusterError(
            f"cluster.placement=colocated: the {tensor_parallel} GPUs of engine {engine} are on several nodes "
            f"({', '.join(sorted({location.host for location in own}))}). Choose cluster.tensor_parallel so that it "
            "divides the GPUs of a node."
        )
    return ",".join(gpu for location in own for gpu in location.gpu_ids)


async def _wait_until_reserved(bundles: PlacementGroup, what: str, deadline_s: float) -> None:
    available = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", GPU)}
    await wait_for(
        bundles.ready(),
        what=f"resources for {what}, the whole cluster having {available}",
        deadline_s=deadline_s,
    )


def new_actor(role: Role, cpus: float, bundles: PlacementGroup, index: int) -> Any:
    """Create an actor of a role in one bundle; it starts when the bundle is there and free."""
    hosts_coroutines = role.name == ENGINE
    options: dict[str, Any] = {"max_concurrency": 10_000} if hosts_coroutines else {}
    actor: Any = ray.remote(HostedAsyncActor if hosts_coroutines else HostedActor).options(
        num_cpus=cpus,
        num_gpus=role.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index),
        **options,
    )
    return actor.remote(*HOSTED[role.name].split(":"))


def _neighbours_together(locations: Sequence[Location]) -> list[int]:
    """An order in which actors of one node are neighbours; nodes keep the order of their first actor."""
    nodes = list(dict.fromkeys(location.node for location in locations))
    return sorted(range(len(locations)), key=lambda i: (nodes.index(locations[i].node), i))
